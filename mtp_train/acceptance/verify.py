"""The exact rule that decides which drafted tokens the target takes, so that its output distribution stays its own.

Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2), for a chain. p are the target's probabilities, q
the draft's, both after temperature and top_p. Randomness comes in as uniform draws, so that every request can have a
generator of its own and every function here is pure. Rows of all sequences lie behind one another: a sequence with k
drafted tokens has k + 1 rows of p (one to judge each, one for the token that comes free) and k rows of q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Verified(NamedTuple):
    """Per sequence: how many of its drafted tokens are accepted, and the target's own token that follows them."""

    num_accepted: list[int]
    next_token: list[int]


def probabilities(logits_MV: torch.Tensor, *, temperature: float, top_p: float) -> torch.Tensor:
    """Probabilities that tokens are drawn from, float32 (M, V): temperature first, then the nucleus, renormalised.

    ``top_p`` keeps the smallest set of most probable tokens that holds at least this share (Holtzman et al. 2020).
    """
    assert temperature > 0, "greedy decoding takes the argmax and needs no probabilities"
    p_MV = (logits_MV.float() / temperature).softmax(-1)
    if top_p >= 1:
        return p_MV
    sorted_MV, order_MV = p_MV.sort(dim=-1, descending=True, stable=True)
    sorted_MV = sorted_MV.masked_fill(sorted_MV.cumsum(-1) - sorted_MV >= top_p, 0.0)
    kept_MV = torch.zeros_like(p_MV).scatter_(-1, order_MV, sorted_MV)
    return kept_MV / kept_MV.sum(-1, keepdim=True)


def check_finite(logits_MV: torch.Tensor, *, of: str) -> None:
    """ValueError where a row's largest logit is no number (NaN, or infinite): whatever were chosen or drawn by it would be counted as
    if it meant something. Single tokens of logit -inf are as they should be: never drawn."""
    num_bad = int((~logits_MV.amax(-1).isfinite()).sum())
    if num_bad:
        raise ValueError(
            f"{of}: expected finite logits, found NaN or infinite ones in {num_bad} of {len(logits_MV)} rows; its weights are damaged, its "
            "training broke, or the dtype cannot hold its numbers: try engine.dtype=float32, or choose another checkpoint"
        )


def draw(weights_MV: torch.Tensor, uniform_M: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverting the cumulative sum, int64 (M,).

    ``weights_MV`` need not sum to 1; tokens of weight 0 are never drawn. ``uniform_M`` is float64 in [0, 1).
    """
    cumulative_MV = weights_MV.cumsum(-1, dtype=torch.float64)
    total_M = cumulative_MV[:, -1]
    # u * total can round up to total, behind which only tokens of weight 0 may lie.
    threshold_M = torch.minimum(uniform_M.to(total_M.device) * total_M, torch.nextafter(total_M, torch.zeros_like(total_M)))
    return torch.searchsorted(cumulative_MV, threshold_M[:, None], right=True)[:, 0]


def verify_greedy(*, best_R: Sequence[int], drafts: Sequence[Sequence[int]]) -> Verified:
    """Temperature 0: accept while the target's argmax is the drafted token; the next token is the argmax that follows.

    ``best_R``: the target's argmax at each row of p.
    """
    assert len(best_R) == sum(len(tokens) + 1 for tokens in drafts), (len(best_R), drafts)
    result = Verified([], [])
    first = 0
    for tokens in drafts:
        num_accepted = 0
        while num_accepted < len(tokens) and best_R[first + num_accepted] == tokens[num_accepted]:
            num_accepted += 1
        result.num_accepted.append(num_accepted)
        result.next_token.append(best_R[first + num_accepted])
        first += len(tokens) + 1
    return result


def verify_sampled(*, p_RV: torch.Tensor, q_QV: torch.Tensor | None, drafts: Sequence[Sequence[int]], uniform_R: torch.Tensor) -> Verified:
    """Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from (p - q)+; if all are accepted, from p.

    ``q_QV`` is None for greedy drafts: q is one-hot, so that x is accepted with probability p(x) and the residual is p
    without x. ``uniform_R`` (float64): of a sequence's k + 1 draws the first k judge, the last draws the next token.
    """
    judge_rows = [row for first, tokens in _firsts(drafts) for row in range(first, first + len(tokens))]
    assert p_RV.shape[0] == uniform_R.shape[0] == len(judge_rows) + len(drafts), (p_RV.shape, uniform_R.shape, len(drafts))
    assert q_QV is None or q_QV.shape[0] == len(judge_rows), (q_QV.shape, len(judge_rows))
    device = p_RV.device
    rows_Q = torch.tensor(judge_rows, dtype=torch.int64, device=device)
    token_Q = torch.tensor([token for tokens in drafts for token in tokens], dtype=torch.int64, device=device)
    p_Q = p_RV[rows_Q, token_Q].double()
    q_Q = torch.ones_like(p_Q) if q_QV is None else q_QV.gather(1, token_Q[:, None])[:, 0].double()
    taken = (uniform_R.to(device)[rows_Q] * q_Q < p_Q).tolist()

    num_accepted, last_rows, rejected, q_rows = [], [], [], []
    for index, (first, tokens) in enumerate(_firsts(drafts)):
        flags = taken[first - index : first - index + len(tokens)]
        count = flags.index(False) if False in flags else len(tokens)
        num_accepted.append(count)
        last_rows.append(first + count)
        if count < len(tokens):
            rejected.append(index)
            q_rows.append(first - index + count)
    weights_BV = p_RV[torch.tensor(last_rows, dtype=torch.int64, device=device)]
    if rejected:
        where, which = torch.tensor(rejected, device=device), torch.tensor(q_rows, device=device)
        weights_BV[where] = _residual(weights_BV[where], None if q_QV is None else q_QV[which], token_Q[which])
    final = torch.tensor([first + len(tokens) for first, tokens in _firsts(drafts)], dtype=torch.int64)
    return Verified(num_accepted, draw(weights_BV, uniform_R[final]).tolist())


def _firsts(drafts: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int]]]:
    """Each sequence's first row of p, with its drafted tokens."""
    firsts, first = [], 0
    for tokens in drafts:
        firsts.append((first, tokens))
        first += len(tokens) + 1
    return firsts


def _residual(p_MV: torch.Tensor, q_MV: torch.Tensor | None, token_M: torch.Tensor) -> torch.Tensor:
    """(p - q)+, not normalised. Where rounding leaves nothing of it (p and q equal but for 1e-7), p itself."""
    if q_MV is None:
        left_MV = p_MV.scatter(1, token_M[:, None], 0.0)
    else:
        left_MV = (p_MV - q_MV).clamp(min=0.0)
    return torch.where(left_MV.sum(-1, keepdim=True) > 0, left_MV, p_MV)


def uniforms(generators: Sequence[torch.Generator], counts: Sequence[int]) -> torch.Tensor:
    """Draw ``counts[j]`` numbers in [0, 1) from ``generators[j]``, behind one another, float64 on the CPU."""
    draws = [torch.rand(count, generator=generator, dtype=torch.float64) for generator, count in zip(generators, counts, strict=True)]
    return torch.cat(draws) if draws else torch.zeros(0, dtype=torch.float64)


def request_generator(*, seed: int, request_id: str) -> torch.Generator:
    """A request's own generator: the same draws whatever else is decoded beside it, on every machine."""
    import hashlib

    digest = hashlib.sha256(f"{seed}\n{request_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def expected_distance(p_V: Sequence[float], num_draws: int) -> float:
    """Upper bound on the mean total variation distance between p and the frequencies of ``num_draws`` draws from it.

    By Jensen, E|f_v - p_v| <= sqrt(p_v (1 - p_v) / n); a correct sampler stays near it, a wrong one does not.
    """
    return 0.5 * sum(math.sqrt(p * (1 - p) / num_draws) for p in p_V)
