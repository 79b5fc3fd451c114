"""One pack's rows over several processes: which rows each computes, and how all see the keys and values of all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class ContextShare:
    """``records.RowShare`` of one process. ``stretches``: the rows that it computes, ascending; ``rows_T`` (int64) the same one
    by one; ``index_T`` (int64) each row's place among them, -1 for rows of others; ``order_T`` (int64) where each row of the
    pack lies when the processes' rows are put behind one another."""

    group: Any
    stretches: tuple[tuple[int, int], ...]
    rows_T: torch.Tensor
    index_T: torch.Tensor
    order_T: torch.Tensor
    counts: tuple[int, ...]

    def own(self, column_T: torch.Tensor) -> torch.Tensor:
        """This process' rows of a column of the whole pack."""
        return column_T[self.rows_T]

    def gather(self, own_NTH: torch.Tensor) -> torch.Tensor:
        """The rows of all processes, (N, T, H) in the pack's order; the gradient comes back from all of them."""
        whole_NTH: torch.Tensor = _Gather.apply(self, own_NTH)
        return whole_NTH

    def to(self, device: torch.device | str) -> ContextShare:
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in ("rows_T", "index_T", "order_T")})


class ContextGroup:
    """Processes that compute each pack together. A pack's rows are cut into twice as many stretches as processes, and process r
    takes the r-th and the r-th from the end: attention looks back only, so that each has as much of it to do.

    Keys and values of all rows are gathered on every process (their heads are few), queries are not: the way of Llama 3's
    context parallelism (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2).
    """

    def __init__(self, *, group: Any, rank: int, size: int) -> None:
        assert 0 <= rank < size, (rank, size)
        self.group, self.rank, self.size = group, rank, size

    def share(self, num_tokens: int) -> ContextShare:
        """What this process computes of a pack."""
        cuts = [num_tokens * number // (2 * self.size) for number in range(2 * self.size + 1)]
        pieces = list(pairwise(cuts))
        held = [[pieces[rank], pieces[2 * self.size - 1 - rank]] for rank in range(self.size)]
        rows = [torch.cat([torch.arange(*stretch) for stretch in stretches]) for stretches in held]
        index_T = torch.full((num_tokens,), -1)
        index_T[rows[self.rank]] = torch.arange(len(rows[self.rank]))
        return ContextShare(
            group=self.group,
            stretches=tuple(held[self.rank]),
            rows_T=rows[self.rank],
            index_T=index_T,
            order_T=torch.cat(rows).argsort(),
            counts=tuple(map(len, rows)),
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: ContextShare, own_NTH: torch.Tensor) -> torch.Tensor:
        ctx.share = share
        most = max(share.counts)
        padded = torch.nn.functional.pad(own_NTH, (0, 0, 0, most - own_NTH.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in share.counts]
        dist.all_gather(parts, padded, group=share.group)
        return torch.cat([part[:, :count] for part, count in zip(parts, share.counts, strict=True)], 1)[:, share.order_T]

    @staticmethod
    def backward(ctx: Any, grad_NTH: torch.Tensor) -> tuple[None, torch.Tensor]:
        total = grad_NTH.float() if grad_NTH.dtype != torch.float64 else grad_NTH.clone()
        total = total.contiguous()
        dist.all_reduce(total, group=ctx.share.group)
        return None, total[:, ctx.share.rows_T].to(grad_NTH.dtype)
