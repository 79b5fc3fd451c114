"""Modules that treat each row by itself, computed a stretch of rows at a time, and again in the backward instead of kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# Enough rows for full matrix products; what a stretch keeps while it is differentiated does not grow with the pack.
ROWS = 2048


def by_rows(module: nn.Module, *, rows: int = ROWS) -> None:
    """Have ``module`` keep nothing but its input, of whatever length: all but attention in a decoder layer is such a module.

    A layer's feed-forward part is the largest: for Llama-3.3-70B and 131,072 tokens, its four tensors of 28,672 columns are 30 GB in
    bfloat16. Results are those of the whole to rounding: products of fewer rows may be summed in another order.
    """
    whole: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return whole(x)
        parts: list[torch.Tensor] = [checkpoint(whole, part, use_reentrant=False) for part in x.split(rows, dim=-2)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    module.forward = forward
