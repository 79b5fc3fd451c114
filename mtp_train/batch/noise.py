"""EAGLE's input noise: the hidden states that a head reads are shaken a little, so that it learns to live with its own errors."""

from __future__ import annotations

import hashlib

import torch

from mtp_train.records import Batch

# EAGLE's training script scales by 512 / sequence length: the amplitude below is that of a sample of 512 tokens.
_REFERENCE_TOKENS = 512


def add_uniform_noise(batch: Batch, *, scale: float, seed: int, step: int) -> torch.Tensor:
    """``batch.hidden_TD`` plus uniform noise in (-1/2, 1/2) x ``scale`` x 512 / tokens of the sample; (T, D), same dtype.

    EAGLE (Li et al. 2024, arXiv 2401.15077, section 4.1: U(-0.1, 0.1)) trains with ``scale`` 0.2, and its script with the
    512 / length. Each sample draws from a generator seeded by (seed, step, sample id): neither the rank nor the samples
    packed beside it change its noise. The generator is the hidden states' device's; devices draw different numbers.
    """
    if scale < 0:
        raise ValueError(f"noise scale: expected 0 or more, found {scale}")
    if scale == 0:
        return batch.hidden_TD
    noisy_TD = torch.empty_like(batch.hidden_TD)
    generator = torch.Generator(device=batch.hidden_TD.device)
    for number, sample_id in enumerate(batch.sample_ids):
        rows = slice(batch.bounds[number], batch.bounds[number + 1])
        hidden_TD = batch.hidden_TD[rows]
        generator.manual_seed(_seed(seed, step, sample_id))
        noise_TD = torch.rand(hidden_TD.shape, generator=generator, device=hidden_TD.device, dtype=torch.float32)
        amplitude = scale * _REFERENCE_TOKENS / hidden_TD.shape[0]
        noisy_TD[rows] = noise_TD.sub_(0.5).mul_(amplitude).add_(hidden_TD)  # in float32, rounded once
    return noisy_TD


def _seed(seed: int, step: int, sample_id: str) -> int:
    """63 bits of a hash: close seeds, steps and names give unrelated streams."""
    digest = hashlib.blake2b(f"{seed}/{step}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
