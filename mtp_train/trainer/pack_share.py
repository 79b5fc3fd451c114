"""Which packs of a step this process works on, alone or together with others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from mtp_train.nn.context import ContextGroup
from mtp_train.records import Batch
from mtp_train.trainer.objective import Objective
from mtp_train.trainer.rows import Pack, align

if TYPE_CHECKING:
    from accelerate import Accelerator


class PackShare(NamedTuple):
    """The ``rank``-th of ``num_ranks`` equal shares of the packs. ``context``: the processes that compute this share's packs
    together, row by row; None: this one alone."""

    rank: int
    num_ranks: int
    context: ContextGroup | None

    def align(self, batch: Batch, objective: Objective, *, vocab_size: int, seed: str) -> Pack:
        """The batch with the rows that count, of those that this process computes, and what the objective draws for it: from
        ``seed`` and the samples alone, so that processes which share a pack draw the same."""
        pack = align(batch, draft_steps=objective.draft_steps, need_top=objective.needs("topk_teacher"))
        pack = replace(pack, vocabulary_sample=objective.draw(batch, vocab_size=vocab_size, seed=seed))
        return pack if self.context is None else pack.shared(self.context.share(batch.num_tokens))

    @property
    def speaks_for_tokens(self) -> bool:
        """True on one of the processes that compute a pack together."""
        return self.context is None or self.context.rank == 0


def share_packs(accelerator: Accelerator, *, context: int) -> PackShare:
    """Groups of ``context`` consecutive processes, each with a share of the packs. ValueError where they do not come out even."""
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    if num_processes % context:
        raise ValueError(
            f"parallel.context: expected a divisor of the {num_processes} processes, since as many compute each pack, found {context}"
        )
    if context == 1:
        return PackShare(rank, num_processes, None)
    import torch.distributed as dist

    # Every process takes part in making every group.
    groups = [dist.new_group(list(range(first, first + context))) for first in range(0, num_processes, context)]
    return PackShare(
        rank // context, num_processes // context, ContextGroup(group=groups[rank // context], rank=rank % context, size=context)
    )
