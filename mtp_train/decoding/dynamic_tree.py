"""``decoding=dynamic_tree``: a tree that grows where the head is sure, as EAGLE-2 has it (Li et al. 2024b, section 4).

Depth by depth the ``width`` nodes of the largest joint confidence (q of all tokens down to the node, multiplied) get
``width`` children each; nodes below ``min_confidence`` get none, so that the tree stops early where there are no others.
Then all nodes are ranked by joint confidence, and the best ``max_nodes`` are judged. What takes its place where tokens
are drawn and not chosen, so that the output's distribution stays the target's, says ``growing_tree.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_train.decoding.base import Decoding, check_at_least
from mtp_train.decoding.growing_tree import GrowingTree
from mtp_train.decoding.tree_drafter import TreeDrafter
from mtp_train.head.base import Head


@dataclass(frozen=True, kw_only=True)
class DynamicTree(Decoding):
    """``max_depth``: tokens down at the most; ``max_nodes``: drafted tokens that the target judges. ``refresh``: as for a chain."""

    word = "dynamic_tree"
    shape = "tree"
    needs_head = True
    draws = True

    max_depth: int
    width: int
    max_nodes: int
    min_confidence: float
    refresh: bool

    def __post_init__(self) -> None:
        check_at_least(1, {"max_depth": self.max_depth, "width": self.width, "max_nodes": self.max_nodes})
        if not 0 <= self.min_confidence < 1:
            raise ValueError(f"decoding.min_confidence: expected a probability from 0 to below 1, found {self.min_confidence}")

    @property
    def depth(self) -> int:
        return self.max_depth

    @property
    def num_nodes(self) -> int:
        return self.max_nodes

    def drafter(self, *, head: Head | None, num_slots: int, temperature: float, top_p: float) -> DynamicTreeDrafter:
        assert head is not None
        return DynamicTreeDrafter(settings=self, head=head, num_slots=num_slots, temperature=temperature, top_p=top_p)


class DynamicTreeDrafter(TreeDrafter):
    """Grows each tree by its own confidence."""

    def __init__(self, *, settings: DynamicTree, head: Head, num_slots: int, temperature: float, top_p: float) -> None:
        super().__init__(
            head=head, num_slots=num_slots, depth=settings.max_depth, temperature=temperature, top_p=top_p, refresh=settings.refresh
        )
        self.settings = settings

    def num_children(self, tree: GrowingTree, node: int) -> int:
        return self.settings.width

    def expand(self, tree: GrowingTree, nodes: Sequence[int]) -> list[int]:
        return tree.most_confident(nodes, width=self.settings.width, at_least=self.settings.min_confidence)

    def keep(self, tree: GrowingTree) -> list[int]:
        return tree.best(self.settings.max_nodes)
