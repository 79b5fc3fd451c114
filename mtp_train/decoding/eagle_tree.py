"""``decoding=eagle_tree``: a tree of one shape for all drafts, as EAGLE-1 has it (Li et al. 2024a).

The shape says how many nodes each depth has. Which places they take is settled beforehand: with the places among their
siblings of the nodes down to a node counted from 1 and multiplied, those of the smallest product, so that likely tokens
have many descendants and unlikely ones few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mtp_train.decoding.base import Decoding, check_at_least
from mtp_train.decoding.growing_tree import GrowingTree
from mtp_train.decoding.tree_drafter import TreeDrafter
from mtp_train.head.base import Head


def places(nodes_per_depth: Sequence[int]) -> list[tuple[int, ...]]:
    """The nodes of the tree, each by its own and its ancestors' places among their siblings, counted from 0."""
    found: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for count in nodes_per_depth:
        # Before a child beyond this place come `count` others: the same and smaller places behind this node and those before it.
        candidates = [(*node, place) for index, node in enumerate(level) for place in range(count // (index + 1))]
        level = sorted(candidates, key=lambda node: (prod(place + 1 for place in node), node))[:count]
        found += level
    return found


@dataclass(frozen=True, kw_only=True)
class EagleTree(Decoding):
    """``nodes_per_depth``: drafted tokens at depth 1, 2, ...; all 1 is a chain. ``refresh``: as for a chain."""

    word = "eagle_tree"
    shape = "tree"
    needs_head = True
    draws = True

    nodes_per_depth: tuple[int, ...]
    refresh: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes_per_depth", tuple(self.nodes_per_depth))  # a list where it comes from a yaml
        if not self.nodes_per_depth:
            raise ValueError("decoding.nodes_per_depth: expected the number of nodes at each depth, such as [4, 8, 8, 4, 2], found none")
        check_at_least(1, {f"nodes_per_depth[{depth}]": count for depth, count in enumerate(self.nodes_per_depth)})

    @property
    def depth(self) -> int:
        return len(self.nodes_per_depth)

    @property
    def num_nodes(self) -> int:
        return sum(self.nodes_per_depth)

    def drafter(self, *, head: Head | None, num_slots: int, temperature: float, top_p: float) -> EagleTreeDrafter:
        assert head is not None
        return EagleTreeDrafter(
            head=head,
            num_slots=num_slots,
            nodes_per_depth=self.nodes_per_depth,
            temperature=temperature,
            top_p=top_p,
            refresh=self.refresh,
        )


class EagleTreeDrafter(TreeDrafter):
    """Grows every tree into the places of ``nodes_per_depth``."""

    def __init__(
        self, *, head: Head, num_slots: int, nodes_per_depth: Sequence[int], temperature: float, top_p: float, refresh: bool
    ) -> None:
        super().__init__(head=head, num_slots=num_slots, depth=len(nodes_per_depth), temperature=temperature, top_p=top_p, refresh=refresh)
        self._num_children: dict[tuple[int, ...], int] = {}
        for node in places(nodes_per_depth):
            self._num_children[node[:-1]] = self._num_children.get(node[:-1], 0) + 1

    def num_children(self, tree: GrowingTree, node: int) -> int:
        return self._num_children[() if node < 0 else tree.ranks[node]]

    def expand(self, tree: GrowingTree, nodes: Sequence[int]) -> list[int]:
        return [node for node in nodes if tree.ranks[node] in self._num_children]

    def keep(self, tree: GrowingTree) -> list[int]:
        return list(range(len(tree.token_ids)))
