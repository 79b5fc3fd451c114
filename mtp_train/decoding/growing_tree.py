"""A tree of drafted tokens while it grows, and the children that a distribution gives to a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mtp_train.acceptance.draft import ROOT, Draft
from mtp_train.acceptance.verify import draw, probabilities, uniforms


class Children(NamedTuple):
    """Of one node: tokens in the order in which they will be tried, and q of each. ``bounds`` is what was known of that before
    the token was drawn: the largest q among the tokens not drawn yet; for tokens that were not drawn, q itself.
    ``q_V``: what they were drawn from, None where they were not."""

    token_ids: list[int]
    shares: list[float]
    bounds: list[float]
    q_V: torch.Tensor | None


def most_probable(logits_RV: torch.Tensor, counts: Sequence[int]) -> list[Children]:
    """The ``counts[r]`` most probable tokens of each row, never one of probability 0."""
    most = min(max(counts), logits_RV.shape[1])
    # One alone is torch's argmax, which of equal logits takes the same as a chain and the estimate.
    top = logits_RV.max(-1, keepdim=True) if most == 1 else logits_RV.topk(most)
    share_RC = logits_RV.float().softmax(-1).gather(1, top.indices)
    found = []
    for tokens, shares, count in zip(top.indices.tolist(), share_RC.tolist(), counts, strict=True):
        kept = [min(share, 1.0) for share in shares[:count] if share > 0]
        found.append(Children(tokens[: len(kept)], kept, kept, None))
    return found


def drawn(
    logits_RV: torch.Tensor, counts: Sequence[int], generators: Sequence[torch.Generator | None], *, temperature: float, top_p: float
) -> list[Children]:
    """``counts[r]`` tokens of each row drawn from q one after the other without replacement; fewer where q has fewer."""
    own = [generator for generator in generators if generator is not None]
    assert len(own) == len(generators), "drafts that are drawn need each request's generator"
    counts = [min(count, logits_RV.shape[1]) for count in counts]
    q_RV = probabilities(logits_RV, temperature=temperature, top_p=top_p)
    most = max(counts)
    uniform_RC = torch.zeros((len(counts), most), dtype=torch.float64)
    for row, part in enumerate(uniforms(own, counts).split(list(counts))):
        uniform_RC[row, : counts[row]] = part
    left_RV = q_RV.clone()
    columns = []
    for column in range(most):
        bounds = left_RV.max(-1).values
        # Where nothing is left, any token may stand here: its bound of 0 says that it is none.
        token_R = draw(left_RV, uniform_RC[:, column]).clamp(max=left_RV.shape[1] - 1)
        columns.append((token_R.tolist(), q_RV.gather(1, token_R[:, None])[:, 0].tolist(), bounds.tolist()))
        left_RV.scatter_(1, token_R[:, None], 0.0)
    found = []
    for row, count in enumerate(counts):
        tokens, shares, bounds_of_row = ([column[part][row] for column in columns[:count]] for part in range(3))
        num_left = sum(bound > 0 for bound in bounds_of_row)
        found.append(Children(tokens[:num_left], shares[:num_left], bounds_of_row[:num_left], q_RV[row]))
    return found


class GrowingTree:
    """Nodes in the order in which they came; ``ranks[n]`` are the places among their siblings of the nodes down to n.

    ``confidence`` is q of all tokens down to the node, multiplied. ``bound`` is the same with the node's own token not
    looked at. Which nodes are kept may hang on their confidence where tokens were chosen by a rule; where they were drawn,
    only on the bound: keeping drawn tokens for what they are would make them no draws from q any more. Bounds never grow
    from a node to its children or its later siblings, nor is a node's bound below its confidence; so the nodes of the
    largest bounds are a tree, and whether a node is among them does not hang on its own token: whatever its token brings
    about (its descendants, who takes whose place when few nodes are expanded) has smaller bounds than its own.
    """

    def __init__(self, *, slot: int, generator: torch.Generator | None) -> None:
        self.slot, self.generator = slot, generator
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.ranks: list[tuple[int, ...]] = []
        self.confidence: list[float] = []
        self.bound: list[float] = []
        self._q_of: dict[int, torch.Tensor] = {}

    def add(self, parent: int, children: Children) -> list[int]:
        """Children of a node (or ``ROOT``); returns their numbers."""
        above, ranks = (1.0, ()) if parent == ROOT else (self.confidence[parent], self.ranks[parent])
        first = len(self.token_ids)
        self.token_ids += children.token_ids
        self.parents += [parent] * len(children.token_ids)
        self.ranks += [(*ranks, rank) for rank in range(len(children.token_ids))]
        self.confidence += [above * share for share in children.shares]
        self.bound += [above * bound for bound in children.bounds]
        if children.q_V is not None:
            self._q_of[parent] = children.q_V
        return list(range(first, len(self.token_ids)))

    def most_confident(self, nodes: Sequence[int], *, width: int, at_least: float) -> list[int]:
        """Up to ``width`` of the nodes, those of the largest confidence (of equals the earlier), none below ``at_least``, in
        the order in which they came."""
        found = [node for node in nodes if self.confidence[node] >= at_least]
        return sorted(sorted(found, key=lambda node: -self.confidence[node])[:width])

    def best(self, num_nodes: int) -> list[int]:
        """The ``num_nodes`` nodes of the largest bounds (of equals the earlier), in the order in which they came."""
        order = sorted(range(len(self.token_ids)), key=lambda node: -self.bound[node])
        return sorted(order[:num_nodes])

    def draft(self, kept: Sequence[int]) -> Draft:
        """The nodes ``kept`` (ascending, a tree) as a draft, numbered anew in their order."""
        number = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
        parents = [self.parents[node] for node in kept]
        q_rows = {parent: row for row, parent in enumerate(dict.fromkeys(parents))} if self._q_of else {}
        return Draft(
            token_ids=[self.token_ids[node] for node in kept],
            parents=[number[parent] for parent in parents],
            q_PV=torch.stack([self._q_of[parent] for parent in q_rows]) if q_rows else None,
            q_rows=[q_rows[parent] for parent in parents] if q_rows else [],
        )
