"""What an acceptance is worth in time: tokens per pass of the target, the speed-up model, and the best draft length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


def expected_tokens_per_pass(acceptance: float, num_speculative_tokens: int) -> float:
    """Mean tokens emitted per pass of the target: (1 - a^(K+1)) / (1 - a), K + 1 at a = 1.

    Leviathan et al. 2023, equation 1: each drafted token is taken with the same probability a, given those before it.
    """
    _check(acceptance, num_speculative_tokens)
    return sum(acceptance**i for i in range(num_speculative_tokens + 1))


def tokens_per_pass(rate_per_position: Sequence[float]) -> float:
    """The same from measured unconditional rates, without assuming them geometric: 1 + their sum = acceptance length."""
    return 1.0 + sum(rate_per_position)


class Costs(NamedTuple):
    """Seconds, or anything proportional to them: one plain pass of the target over one token per sequence; one draft step
    of the head; one verifying pass over K + 1 tokens per sequence; whatever else comes once per step (sampling,
    scheduling)."""

    plain: float
    draft_step: float
    verify: float
    overhead: float


def speedup(*, tokens: float, num_draft_steps: int, costs: Costs) -> float:
    """Time of plain decoding over that of speculation: tokens * plain / (steps * draft_step + verify + overhead).

    ``num_draft_steps`` is K for a chain, the depth of a tree, 0 without a head. Leviathan et al. 2023, theorem 3.8, is the case
    verify = plain, overhead = 0, with c = draft_step / plain.
    """
    if min(costs) < 0 or costs.plain == 0:
        raise ValueError(f"costs: expected times of 0 or more, and above 0 for a plain pass, found {costs}")
    step = num_draft_steps * costs.draft_step + costs.verify + costs.overhead
    if step <= 0:
        raise ValueError(f"costs: expected a speculative step to cost something, found {costs}")
    return tokens * costs.plain / step


def best_draft_length(*, tokens: Sequence[float], costs: Sequence[Costs]) -> tuple[int, float]:
    """The K in 0..longest with the greatest speed-up, and that speed-up; K = 0, plain decoding, is 1.

    ``tokens[k - 1]`` are the tokens per pass with K = k, ``costs[k - 1]`` what a step with it costs: verifying more tokens
    may cost more.
    """
    best = (0, 1.0)
    for k, (per_pass, cost) in enumerate(zip(tokens, costs, strict=True), 1):
        gain = speedup(tokens=per_pass, num_draft_steps=k, costs=cost)
        if gain > best[1]:
            best = (k, gain)
    return best


# Rows that a GPU's matrix products are padded to (Perplexity 2025, "Accelerating Sonar through speculation").
BLOCK_ROWS = 64


def padded_rows(num_rows: float, *, block: int) -> int:
    """Rows that a matrix product computes where it works in blocks of ``block`` of them: 65 cost as much as 128."""
    if num_rows < 0 or block < 1:
        raise ValueError(f"rows: expected 0 or more in blocks of at least 1, found {num_rows} in blocks of {block}")
    return math.ceil(num_rows / block) * block


def single_token_schedule(costs: Costs, *, draft_both: float) -> Costs:
    """The costs of drafting one token where nobody waits for what was accepted.

    The target verifies 2 x D tokens for D sequences, and the head runs with that very layout over all of them, the
    rejected ones included (``draft_both`` seconds for 2 x D rows in place of ``draft_step`` for D). Which rows were accepted
    need not come to the host before the draft is launched, so that ``overhead`` is hidden behind the work: this counts it
    as hidden whole, which is the most that the schedule can be worth. The extra rows cost nothing while they add no block
    (``padded_rows``). ``costs`` are those of K = 1. Source: Perplexity 2025, as above.
    """
    return costs._replace(draft_step=draft_both, overhead=0.0)


def _check(acceptance: float, num_speculative_tokens: int) -> None:
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance: expected a probability in [0, 1], found {acceptance}")
    if num_speculative_tokens < 0:
        raise ValueError(f"num_speculative_tokens: expected 0 or more, found {num_speculative_tokens}")
