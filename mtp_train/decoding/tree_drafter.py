"""Grows trees of drafts with a head, one forward of the head per depth for all sequences; schemes say where they grow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from mtp_train.acceptance.draft import ROOT, Draft
from mtp_train.decoding.base import Drafter, NewBases
from mtp_train.decoding.growing_tree import GrowingTree, drawn, most_probable
from mtp_train.decoding.head_rows import HeadRows, Reading
from mtp_train.head.base import Head
from mtp_train.nn.ragged import RaggedCache


class TreeDrafter(Drafter):
    """Drafts trees of up to ``depth`` tokens down for ``num_slots`` sequences. ``temperature`` above 0 draws children from q
    without replacement; 0 takes the most probable ones."""

    def __init__(self, *, head: Head, num_slots: int, depth: int, temperature: float, top_p: float, refresh: bool) -> None:
        self.depth, self.temperature, self.top_p = depth, temperature, top_p
        self.rows = HeadRows(head=head, num_slots=num_slots, refresh=refresh)
        self._kept: list[list[int]] = [[] for _ in range(num_slots)]  # of the slot's draft: its nodes' numbers while it grew

    @property
    def cache(self) -> RaggedCache:
        return self.rows.cache

    @abstractmethod
    def num_children(self, tree: GrowingTree, node: int) -> int:
        """How many children a node (or ``ROOT``) that is expanded gets; where they are drawn, decided before they are."""

    @abstractmethod
    def expand(self, tree: GrowingTree, nodes: Sequence[int]) -> list[int]:
        """Which of the nodes, all of one depth, get children, ascending."""

    @abstractmethod
    def keep(self, tree: GrowingTree) -> list[int]:
        """Which nodes the target judges, ascending."""

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self.rows.begin(slot, token_ids)
        self._kept[slot] = []

    def settle(self, slot: int, path: Sequence[int], observed: Sequence[int]) -> int:
        return self.rows.settle(slot, [self._kept[slot][node] for node in path])

    @torch.inference_mode()
    def propose(self, new: Sequence[NewBases]) -> list[Draft | None]:
        drafting, hidden_RD, feedback_RD = self.rows.enter(new)
        if not drafting:
            return [None] * len(new)
        trees = [GrowingTree(slot=new[index].slot, generator=new[index].generator) for index in drafting]
        expanded = [[ROOT] for _ in trees]  # the nodes that the rows of hidden_RD stand at, tree by tree
        for depth in range(1, self.depth + 1):
            made = self._grow(trees, expanded, hidden_RD)
            nodes = [self.expand(tree, own) for tree, own in zip(trees, made, strict=True)]
            if depth == self.depth or not any(nodes):
                break
            hidden_RD, feedback_RD = self._read(trees, nodes, feedback_RD, expanded)
            expanded = nodes
        drafts: list[Draft | None] = [None] * len(new)
        for index, tree in zip(drafting, trees, strict=True):
            self._kept[tree.slot] = self.keep(tree)
            drafts[index] = tree.draft(self._kept[tree.slot])
        return drafts

    def _grow(self, trees: Sequence[GrowingTree], expanded: Sequence[Sequence[int]], hidden_RD: torch.Tensor) -> list[list[int]]:
        """Give the expanded nodes their children; returns these, tree by tree."""
        logits_RV = self.rows.logits(hidden_RD)
        counts = [self.num_children(tree, node) for tree, nodes in zip(trees, expanded, strict=True) for node in nodes]
        if self.temperature == 0:
            found = most_probable(logits_RV, counts)
        else:
            generators = [tree.generator for tree, nodes in zip(trees, expanded, strict=True) for _ in nodes]
            found = drawn(logits_RV, counts, generators, temperature=self.temperature, top_p=self.top_p)
        children = iter(found)
        return [[made for node in nodes for made in tree.add(node, next(children))] for tree, nodes in zip(trees, expanded, strict=True)]

    def _read(
        self, trees: Sequence[GrowingTree], nodes: Sequence[list[int]], feedback_RD: torch.Tensor, before: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the head read nodes; ``feedback_RD`` is what it fed back at the nodes ``before``, which are their parents."""
        readings, rows, first = [], list[int](), 0
        for tree, own, parents in zip(trees, nodes, before, strict=True):
            at = {parent: first + row for row, parent in enumerate(parents)}
            rows += [at[tree.parents[node]] for node in own]
            first += len(parents)
            if own:
                readings.append(Reading(tree.slot, own, [tree.parents[node] for node in own], [tree.token_ids[node] for node in own]))
        return self.rows.read(readings, feedback_RD[torch.tensor(rows, device=feedback_RD.device)])
