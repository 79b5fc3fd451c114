"""What a verification judges: drafted tokens of one sequence, as a tree of which a chain is the simplest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# The parent of tokens that follow the last token known.
ROOT = -1


class Judged(NamedTuple):
    """The nodes accepted, one behind the other, and the target's own token that follows them."""

    path: list[int]
    next_token: int


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Tokens that may follow: node n is ``token_ids[n]`` behind node ``parents[n]`` (or ``ROOT``), parents before children,
    children of one node in the order in which they are tried, each token once.

    ``q_PV`` are the distributions that children were drawn from, without replacement, each node's in row ``q_rows[n]`` (the
    same for all children of a node); None where they were chosen by a rule, so that q is one-hot. Nodes from
    ``num_judged`` on are no candidates: the target reads them for the drafter's sake, who asks in ``observed`` for its
    argmax behind some of them (None: all nodes are candidates).
    """

    token_ids: list[int]
    parents: list[int]
    q_PV: torch.Tensor | None = None
    q_rows: list[int] = field(default_factory=list)
    num_judged: int | None = None
    observed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.parents), (len(self.token_ids), len(self.parents))
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), self.parents
        judged = list(zip(self.parents, self.token_ids, strict=True))[: self.num_candidates]
        assert len(set(judged)) == len(judged), "a token stands twice behind one node: the rule would judge it twice"
        assert self.q_PV is None or len(self.q_rows) >= self.num_candidates, (len(self.q_rows), self.num_candidates)

    @property
    def num_candidates(self) -> int:
        return len(self.token_ids) if self.num_judged is None else self.num_judged

    @property
    def is_chain(self) -> bool:
        """All its nodes are candidates and follow one another."""
        return self.num_candidates == len(self.parents) and self.parents == list(range(ROOT, len(self.parents) - 1))

    @property
    def depth(self) -> int:
        """The longest path of candidates."""
        depths: list[int] = []
        for parent in self.parents[: self.num_candidates]:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    def children(self) -> list[list[int]]:
        """The candidates behind ``ROOT`` (entry 0) and behind each candidate n (entry n + 1)."""
        found: list[list[int]] = [[] for _ in range(self.num_candidates + 1)]
        for node, parent in enumerate(self.parents[: self.num_candidates]):
            found[parent + 1].append(node)
        return found


def chain(token_ids: list[int], q_KV: torch.Tensor | None = None) -> Draft:
    """Tokens one behind the other; ``q_KV`` what each was drawn from."""
    count = len(token_ids)
    return Draft(token_ids=token_ids, parents=list(range(ROOT, count - 1)), q_PV=q_KV, q_rows=list(range(count)))
