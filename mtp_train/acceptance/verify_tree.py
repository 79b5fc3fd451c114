"""The exact rule for a tree of drafted tokens: the target's output distribution stays its own.

At each node its children are tried in their order. For children drawn from q without replacement this is recursive
rejection sampling (SpecInfer, Miao et al. 2023; without replacement: Jeon et al. 2024, Yang et al. 2024): x is accepted
with probability min(1, p(x) / q(x)); after a rejection p becomes (p - q)+ and q loses x, both normalised, and the next
child is tried; where all are rejected, the token is drawn from what p has become. It is exact since, given the tokens
rejected before, a child is a draw from the q it is judged by. For children chosen by a rule q is one-hot: x is accepted
with probability p(x), else p loses x.

Rows are those of one sequence: row 0 stands behind its last token, row n + 1 behind node n.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_train.acceptance.draft import ROOT, Draft, Judged
from mtp_train.acceptance.verify import draw


def verify_tree_greedy(*, best_R: Sequence[int], draft: Draft) -> Judged:
    """Temperature 0: walk to the child that is the target's argmax, while there is one. ``best_R``: the argmax at each row."""
    children = draft.children()
    assert len(best_R) == len(children), (len(best_R), len(children))
    path: list[int] = []
    node = ROOT
    while True:
        best = best_R[node + 1]
        hit = next((child for child in children[node + 1] if draft.token_ids[child] == best), None)
        if hit is None:
            return Judged(path, best)
        path.append(hit)
        node = hit


def verify_tree_sampled(*, p_RV: torch.Tensor, draft: Draft, uniform_R: torch.Tensor) -> Judged:
    """Walk down the tree by the rule above. ``uniform_R`` (float64): draw n judges node n, the last one draws the token."""
    children = draft.children()
    assert p_RV.shape[0] == uniform_R.shape[0] == len(children), (p_RV.shape, uniform_R.shape, len(children))
    uniforms = uniform_R.tolist()
    path: list[int] = []
    node = ROOT
    while True:
        left: _Chosen | _Drawn
        tried = children[node + 1]
        if draft.q_PV is None or not tried:
            left = _Chosen(p_RV[node + 1])
        else:
            left = _Drawn(p_RV[node + 1], draft.q_PV[draft.q_rows[tried[0]]])
        hit = next((child for child in tried if left.takes(draft.token_ids[child], uniforms[child])), None)
        if hit is None:
            return Judged(path, int(draw(left.weights_V()[None], uniform_R[-1:])))
        path.append(hit)
        node = hit


class _Chosen:
    """What is left of p while children that a rule chose are tried: p without those rejected."""

    def __init__(self, p_V: torch.Tensor) -> None:
        self.p_V, self.left, self.rejected = p_V, 1.0, list[int]()

    def takes(self, token: int, uniform: float) -> bool:
        p = float(self.p_V[token])
        if uniform * self.left < p:
            return True
        self.left -= p
        self.rejected.append(token)
        return False

    def weights_V(self) -> torch.Tensor:
        """What the next token is drawn from, not normalised. Where rounding leaves nothing of it, p itself."""
        left_V = self.p_V.clone()
        left_V[self.rejected] = 0.0
        return left_V if float(left_V.sum()) > 0 else self.p_V


class _Drawn:
    """What is left of p and q while children drawn from q are tried, neither normalised, with their sums."""

    def __init__(self, p_V: torch.Tensor, q_V: torch.Tensor) -> None:
        self.p_V, self.q_V, self.p_sum, self.q_sum = p_V, q_V, 1.0, 1.0

    def takes(self, token: int, uniform: float) -> bool:
        if uniform * float(self.q_V[token]) * self.p_sum < float(self.p_V[token]) * self.q_sum:
            return True
        left_V = (self.p_V / self.p_sum - self.q_V / self.q_sum).clamp(min=0.0)
        left_sum = float(left_V.sum(dtype=torch.float64))
        if left_sum > 0:  # else p and q are equal but for rounding
            self.p_V, self.p_sum = left_V, left_sum
        self.q_V = self.q_V.clone()
        self.q_V[token] = 0.0
        self.q_sum = float(self.q_V.sum(dtype=torch.float64))
        return False

    def weights_V(self) -> torch.Tensor:
        return self.p_V
