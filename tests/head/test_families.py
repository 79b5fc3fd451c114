"""Heads over a target with latent attention and experts (DeepSeek-V2): the layer is the target's own, and training's unroll is
inference's drafting there too."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from mtp_train.batch.packing import pack
from mtp_train.head.eagle import Eagle
from mtp_train.head.mtp import Mtp
from mtp_train.head.pair import NORMS, PairHead
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.records import Batch, Sample
from mtp_train.target.weights import read_layer, read_shared

DEPTHS = 3
KINDS: dict[str, type[PairHead]] = {"mtp": Mtp, "eagle": Eagle}


def make(target: Path, kind: str, *, init: str = "random") -> PairHead:
    on = kind == "mtp"
    head = KINDS[kind](
        target_path=target,
        shared=read_shared(target),
        norms=dict.fromkeys(NORMS, on),
        column_order="hidden_embed" if on else "embed_hidden",
        zero_first_embedding=on,
        init=init,  # type: ignore[arg-type]
        seed=0,
        trust_remote_code=False,
    )
    if init == "random":
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 1:  # norms start at 1, which would hide one that is skipped
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
                else:  # without norms, the tiny target's large weights blow rounding up
                    parameter.mul_(0.5)
    return head


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_the_targets_last_one(tiny_deepseek: Path, kind: str) -> None:
    names = set(make(tiny_deepseek, kind).state_dict())
    for part in ("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight", "mlp.gate.weight", "mlp.experts.gate_up_proj"):
        assert f"decoder.layer.{part}" in names


@pytest.mark.parametrize("kind", KINDS)
def test_unroll_is_drafting_with_a_cache_from_every_base(tiny_deepseek: Path, batch: Batch, samples: list[Sample], kind: str) -> None:
    head = make(tiny_deepseek, kind)
    with torch.no_grad():
        steps = list(itertools.islice(head.unroll(batch), DEPTHS))
        for number, sample in enumerate(samples):
            cache = RaggedCache(num_slots=1)
            for base in range(sample.num_tokens - 1):
                hidden = sample.hidden_TD[base : base + 1]
                for depth in range(min(DEPTHS, sample.num_tokens - 1 - base)):
                    context = RaggedAttention(cache=cache, slots=[0], counts=[1])
                    token = sample.token_ids_T[base + 1 + depth][None]
                    out = head.draft(token_ids_T=token, hidden_TD=hidden, position_T=torch.tensor([base + depth]), context=context)
                    context.commit()
                    row = batch.bounds[number] + base
                    torch.testing.assert_close(steps[depth].hidden_TD[row], out.hidden_TD[0], rtol=1e-4, atol=1e-5)
                    hidden = out.feedback_TD
                cache.truncate(0, base + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_samples_are_those_alone(tiny_deepseek: Path, batch: Batch, samples: list[Sample], kind: str) -> None:
    head = make(tiny_deepseek, kind)
    with torch.no_grad():
        together = list(itertools.islice(head.unroll(batch), DEPTHS))
        for number, sample in enumerate(samples):
            for depth, alone in enumerate(itertools.islice(head.unroll(pack([sample])), DEPTHS)):
                inside = max(0, sample.num_tokens - 1 - depth)
                rows = slice(batch.bounds[number], batch.bounds[number] + inside)
                torch.testing.assert_close(together[depth].hidden_TD[rows], alone.hidden_TD[:inside], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_reach_every_weight(tiny_deepseek: Path, batch: Batch, precision: str) -> None:
    head = make(tiny_deepseek, "mtp")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        steps = list(itertools.islice(head.unroll(batch), DEPTHS))
        torch.stack([step.hidden_TD.float().sin().sum() for step in steps]).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.abs().sum() > 0), name


def test_it_can_start_from_the_targets_last_layer(tiny_deepseek: Path) -> None:
    """The file has each expert apart, the layer all in one; what comes out is what transformers loads."""
    from transformers import AutoModelForCausalLM

    layer = AutoModelForCausalLM.from_pretrained(tiny_deepseek, dtype=torch.float32).model.layers[-1].state_dict()
    assert "mlp.experts.3.up_proj.weight" in read_layer(tiny_deepseek, 2)
    found = make(tiny_deepseek, "mtp", init="target_last_layer").decoder.layer.state_dict()
    assert found.keys() == layer.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in layer.items())
