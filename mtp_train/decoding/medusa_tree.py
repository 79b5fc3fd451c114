"""``decoding=medusa_tree``: the tree of what parallel heads say about the next tokens, cut to its best nodes (Medusa, Cai et al. 2024).

Head k speaks about the k-th token without knowing those before, so that the tree is the product of the heads' ``top_k``
tokens; of it the ``max_nodes`` nodes of the largest joint confidence are judged. (The paper cuts it to one shape for all
drafts, from the heads' hit rates on a calibration set; the heads' own confidence needs no such set.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_train.acceptance.draft import ROOT, Draft
from mtp_train.decoding.base import Decoding, NewBases, check_at_least
from mtp_train.decoding.growing_tree import Children, GrowingTree, drawn, most_probable
from mtp_train.decoding.parallel_drafter import ParallelDrafter
from mtp_train.head.base import Head, ParallelHead


@dataclass(frozen=True, kw_only=True)
class MedusaTree(Decoding):
    """``max_depth``: how many of the heads are used; ``top_k``: children of a node; ``max_nodes``: drafted tokens judged."""

    word = "medusa_tree"
    shape = "tree"
    needs_head = True
    draws = True

    max_depth: int
    top_k: int
    max_nodes: int

    def __post_init__(self) -> None:
        check_at_least(1, {"max_depth": self.max_depth, "top_k": self.top_k, "max_nodes": self.max_nodes})

    @property
    def depth(self) -> int:
        return self.max_depth

    @property
    def num_nodes(self) -> int:
        return self.max_nodes

    def drafter(self, *, head: Head | None, num_slots: int, temperature: float, top_p: float) -> MedusaTreeDrafter:
        if not isinstance(head, ParallelHead):
            found = "none" if head is None else head.word
            raise ValueError(
                f"decoding=medusa_tree: expected a head that speaks about several tokens at once (head=medusa), found {found}; "
                "other heads draft with decoding=chain, eagle_tree or dynamic_tree"
            )
        if head.num_ahead < self.max_depth:
            raise ValueError(
                f"decoding.max_depth: expected at most {head.num_ahead}, which this head speaks about at once, found {self.max_depth}"
            )
        return MedusaTreeDrafter(settings=self, head=head, temperature=temperature, top_p=top_p)


class MedusaTreeDrafter(ParallelDrafter):
    """The best nodes of the product, for each sequence a tree of its own."""

    def __init__(self, *, settings: MedusaTree, head: ParallelHead, temperature: float, top_p: float) -> None:
        super().__init__(head=head, temperature=temperature, top_p=top_p)
        self.settings = settings

    def _form(self, logits_KBV: torch.Tensor, new: Sequence[NewBases]) -> list[Draft]:
        drafts = []
        for row, bases in enumerate(new):
            tree = GrowingTree(slot=bases.slot, generator=bases.generator)
            self._grow(tree, logits_KBV[: self.settings.max_depth, row])
            drafts.append(tree.draft(tree.best(self.settings.max_nodes)))
        return drafts

    def _grow(self, tree: GrowingTree, logits_KV: torch.Tensor) -> None:
        """The product, but for nodes that cannot be among the best: of each depth as many are continued as are judged in all."""
        nodes = [ROOT]
        for logits_V in logits_KV:
            children = self._children(logits_V, len(nodes), tree.generator)
            made = [node for parent, own in zip(nodes, children, strict=True) for node in tree.add(parent, own)]
            nodes = tree.most_confident(made, width=self.settings.max_nodes, at_least=0.0)

    def _children(self, logits_V: torch.Tensor, num_nodes: int, generator: torch.Generator | None) -> list[Children]:
        top_k = self.settings.top_k
        if self.temperature == 0:
            return most_probable(logits_V[None], [top_k]) * num_nodes
        logits_RV = logits_V.expand(num_nodes, -1)
        return drawn(logits_RV, [top_k] * num_nodes, [generator] * num_nodes, temperature=self.temperature, top_p=self.top_p)
