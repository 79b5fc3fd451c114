"""Which rows of a pack count at each depth, worked out once before the pack goes to the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mtp_train.batch.shift import LossRows, loss_rows
from mtp_train.loss.vocabulary_sample import VocabularySample
from mtp_train.nn.wanted import WantedRows
from mtp_train.records import Batch, RowShare


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A batch with its loss rows per depth; ``base_M`` counts the rows that this process computes. ``top_M`` numbers the rows of
    ``batch.teacher`` that teach them, one tensor per depth; it is empty (no depths) where the cache has no top-k.
    ``teacher_hidden_TD`` are the target's hidden states as cached; those in ``batch``, which the head reads, may carry noise.
    ``wanted``: bases that count at some depth; None: compute all. ``vocabulary_sample``: what was drawn for a loss that asks for it."""

    batch: Batch
    teacher_hidden_TD: torch.Tensor
    rows: tuple[LossRows, ...]
    top_M: tuple[torch.Tensor, ...]
    wanted: WantedRows | None = None
    vocabulary_sample: VocabularySample | None = None

    @property
    def counts_K(self) -> torch.Tensor:
        """How many rows count at each depth, int64 (depths,), on the CPU."""
        return torch.tensor([rows.base_M.shape[0] for rows in self.rows])

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device."""
        batch = self.batch.to(device)
        same = self.teacher_hidden_TD is self.batch.hidden_TD
        return Pack(
            batch=batch,
            teacher_hidden_TD=batch.hidden_TD if same else self.teacher_hidden_TD.to(device, non_blocking=True),
            rows=tuple(LossRows(*(column.to(device, non_blocking=True) for column in rows)) for rows in self.rows),
            top_M=tuple(column.to(device, non_blocking=True) for column in self.top_M),
            wanted=None if self.wanted is None else self.wanted.to(device),
            vocabulary_sample=None if self.vocabulary_sample is None else self.vocabulary_sample.to(device),
        )

    def with_input(self, hidden_TD: torch.Tensor) -> Pack:
        """The same pack where the head reads ``hidden_TD`` instead; the teacher stays."""
        return replace(self, batch=replace(self.batch, hidden_TD=hidden_TD))

    def shared(self, share: RowShare) -> Pack:
        """The same pack where this process computes some of the rows, and counts those of them that count."""
        kept = [share.index_T[rows.base_M] >= 0 for rows in self.rows]
        rows = [
            LossRows(share.index_T[rows.base_M][keep], rows.teacher_M[keep], rows.label_M[keep])
            for rows, keep in zip(self.rows, kept, strict=True)
        ]
        top_M = tuple(column[keep] for column, keep in zip(self.top_M, kept, strict=bool(self.top_M)))
        return replace(self, batch=replace(self.batch, share=share), rows=tuple(rows), top_M=top_M, wanted=None)

    def silent(self) -> Pack:
        """The same pack where no row counts: what a process goes through that has fewer packs than another, so that all take
        part in every exchange."""
        return replace(
            self,
            rows=tuple(LossRows(*(column[:0] for column in rows)) for rows in self.rows),
            top_M=tuple(column[:0] for column in self.top_M),
        )


def align(batch: Batch, *, draft_steps: int, need_top: bool) -> Pack:
    """Find the rows that count at depths 0 .. draft_steps - 1; on the CPU, since counting rows waits for a GPU.

    Errors: ValueError where the cached top-k is needed and missing, or does not cover a row that counts.
    """
    rows = tuple(loss_rows(batch, ahead=depth + 2) for depth in range(draft_steps))
    wanted = WantedRows.of(torch.cat([depth_rows.base_M for depth_rows in rows]), bounds=batch.bounds)
    if batch.teacher is None and not need_top:
        return Pack(batch=batch, teacher_hidden_TD=batch.hidden_TD, rows=rows, top_M=(), wanted=wanted)
    if batch.teacher is None:
        raise ValueError(
            "losses: expected a cache with the teacher's most probable tokens, found none in this one; "
            "set precompute's top_k (64, say) and precompute again, or choose a loss with the exact teacher"
        )
    where_T = torch.full((batch.num_tokens,), -1, dtype=torch.int64)
    where_T[batch.teacher.row_M] = torch.arange(batch.teacher.row_M.shape[0])
    top_M = tuple(where_T[depth_rows.teacher_M] for depth_rows in rows)
    missing = sum(int((column < 0).sum()) for column in top_M)
    if missing:
        raise ValueError(
            f"cache: expected the teacher's most probable tokens at every row that counts, found {missing} rows without; precompute again"
        )
    return Pack(batch=batch, teacher_hidden_TD=batch.hidden_TD, rows=rows, top_M=top_M, wanted=wanted)
