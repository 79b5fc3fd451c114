"""A head's KV cache while it drafts: settled bases, and behind them what it made of its own guesses, along a tree.

The cache of a sequence holds one entry per base: entry i is (h_i, x_{i+1}) at rotary position i (DESIGN.md, section 4).
Drafted tokens that the head reads to draft further get entries behind the bases, each from the head's own hidden state of
the entry before it; they see the bases and their ancestors. Once the target has judged they are forgotten, and the
accepted tokens are entered again with the *target's* hidden states.

A head that reads no hidden states (a draft model of its own) reads the sequence's first token too, and what it made of
accepted tokens is exact and stays, moved together along the accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mtp_train.acceptance.draft import ROOT
from mtp_train.acceptance.verify import check_finite
from mtp_train.decoding.base import NewBases
from mtp_train.head.base import Drafted, Head, ParallelHead
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.nn.tree import Tree


class Entered(NamedTuple):
    """``drafting`` are the numbers of those that asked for drafts; of each the head's row at its last base, (B, D)."""

    drafting: list[int]
    hidden_BD: torch.Tensor
    feedback_BD: torch.Tensor


class Reading(NamedTuple):
    """Drafted nodes of one slot that the head shall read: their tokens, and the nodes before them (read already, or ``ROOT``)."""

    slot: int
    nodes: list[int]
    parents: list[int]
    token_ids: list[int]


class HeadRows:
    """A head over ``num_slots`` sequences.

    ``refresh=False`` keeps the entries of accepted drafts as the head made them from its own guesses, to measure what
    running it again over the target's hidden states is worth.
    """

    def __init__(self, *, head: Head, num_slots: int, refresh: bool) -> None:
        if isinstance(head, ParallelHead):
            raise ValueError(
                f"decoding: expected a head that drafts behind its own drafts, found {head.word}, which speaks about all tokens at once; "
                "it drafts with decoding=medusa_tree or chain"
            )
        if not refresh and head.num_blocks > 1:
            raise ValueError(
                f"decoding.refresh: expected true for a head of {head.num_blocks} blocks, whose first block makes nothing of drafted "
                "tokens that could be kept, found false"
            )
        self.head, self.refresh = head, refresh and head.reads_hidden
        self.cache = RaggedCache(num_slots=num_slots)
        self._num_bases = [0] * num_slots
        self._first_token = [0] * num_slots
        self._entry: list[dict[int, int]] = [{} for _ in range(num_slots)]  # of a drafted node that was read, its entry
        self._follows: list[list[int]] = [[] for _ in range(num_slots)]  # of each such entry, the one that it follows

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """Give the slot to a sequence with this prompt."""
        self.cache.clear(slot)
        self._num_bases[slot], self._first_token[slot] = 0, token_ids[0]
        self._forget(slot)

    def settle(self, slot: int, path: Sequence[int]) -> int:
        """Forget what was drafted beyond the accepted nodes ``path``; returns how many of the bases that these make are held
        already: none with ``refresh``."""
        kept: list[int] = []
        for node in () if self.refresh else path:
            if node not in self._entry[slot]:
                break
            kept.append(self._entry[slot][node])
        self.cache.keep(slot, self._num_bases[slot], kept)
        self._num_bases[slot] += len(kept)
        self._forget(slot)
        return len(kept)

    def _forget(self, slot: int) -> None:
        self._entry[slot], self._follows[slot] = {}, []

    def enter(self, new: Sequence[NewBases]) -> Entered:
        """Read bases; slots must be settled."""
        assert all(self.cache.lengths[bases.slot] == self._num_bases[bases.slot] for bases in new), "bases before settle"
        counts, token_ids, hidden = [], list[int](), []
        for bases in new:
            first = [] if self.head.reads_hidden or self._num_bases[bases.slot] else [self._first_token[bases.slot]]
            counts.append(len(first) + len(bases.token_ids))
            token_ids += [*first, *bases.token_ids]
            hidden += [bases.hidden_BD.new_zeros((len(first), bases.hidden_BD.shape[1])), bases.hidden_BD]
        drafted = self._run([bases.slot for bases in new], counts, token_ids, torch.cat(hidden), trees=None, depth=0)
        for bases, count in zip(new, counts, strict=True):
            self._num_bases[bases.slot] += count
        drafting = [index for index, bases in enumerate(new) if bases.drafts]
        last_B = torch.tensor(counts).cumsum(0)[torch.tensor(drafting, dtype=torch.int64)].to(drafted.hidden_TD.device) - 1
        return Entered(drafting, drafted.hidden_TD[last_B], drafted.feedback_TD[last_B])

    def read(self, readings: Sequence[Reading], feedback_RD: torch.Tensor) -> Drafted:
        """Read drafted nodes of one depth, behind one another; ``feedback_RD`` is what the head fed back at the node before each."""
        trees: list[Tree | None] = []
        depths = set[int]()
        for reading in readings:
            entry, follows = self._entry[reading.slot], self._follows[reading.slot]
            for node, parent in zip(reading.nodes, reading.parents, strict=True):
                follows.append(ROOT if parent == ROOT else entry[parent])
                entry[node] = len(follows) - 1
            tree = Tree(follows)
            depths.update(tree.depth[-len(reading.nodes) :])
            trees.append(None if tree.is_chain else tree)
        token_ids = [token for reading in readings for token in reading.token_ids]
        counts = [len(reading.nodes) for reading in readings]
        (depth,) = depths
        return self._run([reading.slot for reading in readings], counts, token_ids, feedback_RD, trees=trees, depth=depth + 1)

    def _run(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        token_ids: Sequence[int],
        hidden_TD: torch.Tensor,
        *,
        trees: Sequence[Tree | None] | None,
        depth: int,
    ) -> Drafted:
        device = hidden_TD.device
        context = RaggedAttention(cache=self.cache, slots=slots, counts=counts, trees=trees, depth=depth)
        drafted = self.head.draft(
            token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
            hidden_TD=hidden_TD,
            position_T=context.positions(device),
            context=context,
        )
        context.commit()
        return drafted

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """What the head says at rows, (R, V), over the target's vocabulary. ValueError where it says nothing finite."""
        logits_RV = self.head.over_target(self.head.project(hidden_RD))
        check_finite(logits_RV, of=f"head {self.head.word}")
        return logits_RV
