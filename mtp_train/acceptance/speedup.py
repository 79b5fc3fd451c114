"""What an acceptance is worth in time: tokens per pass of the target, the speed-up model, and the best draft length."""

from __future__ import annotations

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


def speedup(*, tokens: float, num_speculative_tokens: int, costs: Costs) -> float:
    """Time of plain decoding over that of speculation: tokens * plain / (K * draft_step + verify + overhead).

    Leviathan et al. 2023, theorem 3.8, is the case verify = plain, overhead = 0, with c = draft_step / plain.
    """
    if min(costs) < 0 or costs.plain == 0:
        raise ValueError(f"costs: expected times of 0 or more, and above 0 for a plain pass, found {costs}")
    step = num_speculative_tokens * costs.draft_step + costs.verify + costs.overhead
    if step <= 0:
        raise ValueError(f"costs: expected a speculative step to cost something, found {costs}")
    return tokens * costs.plain / step


def best_draft_length(*, acceptance: float, costs: Costs, longest: int) -> tuple[int, float]:
    """The K in 0..longest with the greatest speed-up, and that speed-up; K = 0, plain decoding, is 1."""
    best = (0, 1.0)
    for k in range(1, longest + 1):
        gain = speedup(tokens=expected_tokens_per_pass(acceptance, k), num_speculative_tokens=k, costs=costs)
        if gain > best[1]:
            best = (k, gain)
    return best


def _check(acceptance: float, num_speculative_tokens: int) -> None:
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance: expected a probability in [0, 1], found {acceptance}")
    if num_speculative_tokens < 0:
        raise ValueError(f"num_speculative_tokens: expected 0 or more, found {num_speculative_tokens}")
