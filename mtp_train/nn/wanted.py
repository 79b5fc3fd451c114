"""Rows of a pack whose outputs somebody reads: what a prompt's rows give is keys and values, and nothing else needs computing.

A head of one layer hands nothing from row to row but the keys and values of its first depth. So the feed-forward part of depth 0,
and all of the later depths, are needed only at bases from which some counted token is drafted: the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn

# Rows between two stretches that are computed along: each stretch costs attention calls of its own.
_GAP = 64


@dataclass(frozen=True, kw_only=True)
class WantedRows:
    """``rows_M`` (int64, ascending) and the same as ``stretches`` from row to row, within samples.

    ``still``: asked before each depth behind the first for those of them that are read there or later (int64, ascending), all among
    those of the depth before; None: all of them, at every depth.
    """

    rows_M: torch.Tensor
    stretches: tuple[tuple[int, int], ...]
    still: Callable[[int], torch.Tensor] | None = None

    @classmethod
    def of(cls, rows: torch.Tensor, *, bounds: Sequence[int]) -> WantedRows | None:
        """Rows (int64, any order, with repeats) of a batch on the CPU, and what lies between close ones; None where there are none."""
        stretches: list[tuple[int, int]] = []
        ascending = rows.unique()
        for first, last in pairwise(bounds):
            low, high = torch.searchsorted(ascending, torch.tensor([first, last])).tolist()
            if low == high:
                continue
            own = ascending[low:high]
            cuts = (own.diff() > _GAP).nonzero(as_tuple=True)[0].tolist()
            begins = [0, *(cut + 1 for cut in cuts)]
            ends = [*cuts, len(own) - 1]
            stretches += [(int(own[begin]), int(own[end]) + 1) for begin, end in zip(begins, ends, strict=True)]
        if not stretches:
            return None
        return cls(rows_M=torch.cat([torch.arange(*stretch) for stretch in stretches]), stretches=tuple(stretches))

    def to(self, device: torch.device) -> WantedRows:
        return replace(self, rows_M=self.rows_M.to(device, non_blocking=True))


@contextmanager
def rows_only(modules: Sequence[nn.Module], rows_M: torch.Tensor | None) -> Iterator[None]:
    """Within, modules that treat each row by itself (second-last axis) compute these rows, and give zeros for the others.

    Their ``forward`` is another for that long, so that whatever hooks hang on them see all rows, as ever.
    """
    if rows_M is None:
        yield
        return
    with ExitStack() as stack:
        for module in modules:
            own = module.__dict__.get("forward")
            module.forward = partial(_some_rows, module.forward, rows_M)
            stack.callback(_put_back, module, own)
        yield


def _some_rows(forward: Callable[[torch.Tensor], torch.Tensor], rows_M: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = forward(x.index_select(-2, rows_M))
    return out.new_zeros((*out.shape[:-2], x.shape[-2], out.shape[-1])).index_copy(-2, rows_M, out)


def _put_back(module: nn.Module, own: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own
