"""Says where a step went wrong when its loss or gradient is not a finite number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

# Names listed before "and N more".
_SHOWN = 5


class PackSums(NamedTuple):
    """What one pack of the step summed up: see ``objective.Result``."""

    sample_ids: tuple[str, ...]
    sums_KX: torch.Tensor


def describe_nonfinite(
    gradients: Mapping[str, torch.Tensor], packs: Sequence[PackSums], *, words: Sequence[str], step: int, rank: int
) -> str:
    """The step, this rank's packs, depths and losses with a sum that is not finite, and the parameters whose gradient is not."""
    lines = [f"step {step}: expected a finite loss and gradient, found others; the weights were not touched (rank {rank})"]
    for pack in packs:
        bad = [
            f"{word} at depth {depth}"
            for depth, row in enumerate(pack.sums_KX.tolist())
            for word, value in zip(words, row, strict=False)
            if not torch.isfinite(torch.tensor(value))
        ]
        if bad:
            lines.append(f"  loss: {_some(bad)} in the pack of samples {_some(list(pack.sample_ids))}")
    parameters = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
    if parameters:
        lines.append(f"  gradient: {_some(parameters)}")
    lines.append("  look at these samples with tools/inspect_batch.py; if they are sound, lower optimizer.lr or set precision=fp32")
    return "\n".join(lines)


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
