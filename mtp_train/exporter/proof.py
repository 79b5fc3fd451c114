"""Proves an export: the same logits as the trained head on its probe, and no tensor that could be left out unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# A tensor counts only if moving it moves some logit by this share of the largest one; float32 rounding stays below.
_MATTERS = 1e-5

LogitsOf = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


def same_tensors(written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> None:
    """ValueError unless what was read back is what was to be written, bit for bit."""
    if set(written) != set(read):
        raise ValueError(f"export: expected the tensors {sorted(written)} in the file, found {sorted(read)}; the disk or the writer lost some")
    for name, tensor in written.items():
        if tensor.dtype != read[name].dtype or not torch.equal(tensor, read[name]):
            raise ValueError(f"export: expected {name} in the file as it was written, found other values; the disk or the writer damaged it")


def compare(what: str, *, expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> float:
    """Largest difference, as a share of the largest expected magnitude.

    Errors: ValueError where it exceeds ``tolerance`` or anything is not finite.
    """
    if expected.shape != found.shape:
        raise ValueError(f"export: {what}: expected shape {tuple(expected.shape)}, found {tuple(found.shape)}")
    scale = float(expected.abs().max())
    difference = float((expected.double() - found.double()).abs().max()) / max(scale, 1e-12)
    if not difference <= tolerance:  # also where it is NaN
        raise ValueError(
            f"export: {what}: expected the trained head's values within {tolerance:g} of their largest magnitude, found them "
            f"{difference:.3g} apart; the exported graph is not the trained one, and nothing was written"
        )
    return difference


def perturbed(tensor: torch.Tensor, *, seed: int) -> torch.Tensor:
    """The tensor with noise of half its own size (of 0.1 where it is all zeros), drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    size = float(tensor.float().square().mean().sqrt())
    noise = torch.randn(tensor.shape, generator=generator) * (0.5 * size or 0.1)
    return (tensor.float() + noise).to(tensor.dtype)


def every_tensor_matters(tensors: Mapping[str, torch.Tensor], logits_of: LogitsOf) -> dict[str, float]:
    """How far each tensor, perturbed alone, moves the logits (as a share of the largest).

    ``logits_of`` computes logits from all tensors. Errors: ValueError where one moves nothing: a file with such a tensor
    says less than it seems to, and an engine that ignores it would not be noticed.
    """
    plain = logits_of(tensors)
    scale = max(float(plain.abs().max()), 1e-12)
    moved: dict[str, Any] = {}
    for index, name in enumerate(tensors):
        other = logits_of({**tensors, name: perturbed(tensors[name], seed=index)})
        moved[name] = float((other.double() - plain.double()).abs().max()) / scale
        if not moved[name] > _MATTERS:
            raise ValueError(f"export: expected every tensor to change the logits, found that {name} does not; it is not part of this graph")
    return moved
