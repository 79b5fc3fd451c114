"""Noise has the stated amplitude and depends on seed, step and sample only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtp_train.batch.noise import add_uniform_noise
from mtp_train.batch.packing import pack, unpack
from mtp_train.records import Sample


def _long(length: int, name: str = "long") -> Sample:
    return Sample(
        sample_id=name,
        token_ids_T=torch.zeros(length, dtype=torch.int64),
        loss_mask_T=torch.ones(length, dtype=torch.bool),
        hidden_TD=torch.zeros(length, 64),
    )


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_amplitude_falls_with_the_samples_length(length):
    noise = add_uniform_noise(pack([_long(length)]), scale=0.2, seed=0, step=0)
    bound = 0.1 * 512 / length  # U(-0.1, 0.1) at 512 tokens
    assert noise.abs().max() <= bound
    assert noise.max() > 0.99 * bound and noise.min() < -0.99 * bound
    # The mean of n draws from U(-b, b) has standard deviation b / sqrt(3 n); the variance is b^2 / 3.
    assert abs(noise.mean()) < 5 * bound / (3 * noise.numel()) ** 0.5
    assert noise.var().item() == pytest.approx(bound**2 / 3, rel=0.05)


def test_packing_and_order_do_not_change_a_samples_noise(samples):
    batch = pack(samples)
    together = add_uniform_noise(batch, scale=0.2, seed=7, step=3)
    backwards = pack(samples[::-1])
    reverse = unpack(replace(backwards, hidden_TD=add_uniform_noise(backwards, scale=0.2, seed=7, step=3)))
    for sample, packed, turned in zip(samples, unpack(replace(batch, hidden_TD=together)), reverse[::-1], strict=True):
        alone = add_uniform_noise(pack([sample]), scale=0.2, seed=7, step=3)
        assert torch.equal(alone, packed.hidden_TD) and torch.equal(alone, turned.hidden_TD)


def test_seed_step_and_sample_each_change_it():
    def noise(seed: int, step: int, name: str) -> torch.Tensor:
        return add_uniform_noise(pack([_long(16, name)]), scale=1.0, seed=seed, step=step)

    base = noise(0, 0, "a")
    assert torch.equal(base, noise(0, 0, "a"))
    assert all(not torch.equal(base, other) for other in (noise(1, 0, "a"), noise(0, 1, "a"), noise(0, 0, "b")))


def test_the_cached_states_are_left_alone_and_dtype_stays(samples):
    batch = pack(samples)
    before = batch.hidden_TD.clone()
    add_uniform_noise(batch, scale=0.2, seed=0, step=0)
    assert torch.equal(batch.hidden_TD, before)
    narrow = replace(batch, hidden_TD=batch.hidden_TD.bfloat16())
    assert add_uniform_noise(narrow, scale=0.2, seed=0, step=0).dtype == torch.bfloat16
    assert add_uniform_noise(batch, scale=0.0, seed=0, step=0) is batch.hidden_TD


def test_a_negative_scale_is_refused(samples):
    with pytest.raises(ValueError, match="0 or more"):
        add_uniform_noise(pack(samples), scale=-0.1, seed=0, step=0)
