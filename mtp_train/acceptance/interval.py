"""How sure a measured acceptance is: 95% bootstrap intervals over prompts, and paired differences between two heads.

Prompts, not tokens, are what is drawn: tokens of one answer resemble one another, and an interval over tokens would be
too narrow. Every statistic is a ratio of sums (accepted / drafts), resampled as a ratio (Efron and Tibshirani 1993,
chapter 13, percentile interval).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtp_train.records import PromptAcceptance

NUM_RESAMPLES = 2000
LEVEL = 0.95
SEED = 20250610


class Interval(NamedTuple):
    """A value and its 95% interval. ``low`` and ``high`` are None where fewer than two prompts leave nothing to draw from."""

    value: float
    low: float | None
    high: float | None

    @property
    def established(self) -> bool:
        """For a difference: the interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def rates_and_length(prompts: Sequence[PromptAcceptance], num_speculative_tokens: int) -> tuple[list[Interval], Interval]:
    """The acceptance rate at each position 1..K, and the acceptance length, each with its interval.

    All come from the same resamples. Errors: ValueError where no prompt was drafted for.
    """
    counts = _counts(prompts, num_speculative_tokens)
    values = _statistics(counts.sum(0)[None])[0]
    drawn = _statistics(_resampled_sums(counts)) if len(prompts) > 1 else None
    found = [_interval(values[i], None if drawn is None else drawn[:, i]) for i in range(num_speculative_tokens + 1)]
    return found[:-1], found[-1]


def paired_difference(
    first: Sequence[PromptAcceptance], second: Sequence[PromptAcceptance], num_speculative_tokens: int
) -> tuple[list[Interval], Interval]:
    """First less second, at each position and in acceptance length, over the same prompts drawn together; positions that one of
    them never drafted count as never accepted there.

    Errors: ValueError where the two were not measured on the same prompts.
    """
    ours, theirs = ({prompt.prompt_id: prompt for prompt in prompts} for prompts in (first, second))
    if set(ours) != set(theirs) or len(ours) != len(first) or len(theirs) != len(second):
        raise ValueError(
            f"paired difference: expected two measurements of the same prompts, found {len(first)} and {len(second)}, "
            f"{len(set(ours) ^ set(theirs))} of them in one only"
        )
    ids = list(ours)
    counts = np.stack([_counts([by_id[i] for i in ids], num_speculative_tokens) for by_id in (ours, theirs)])
    values = np.subtract(*(_statistics(side.sum(0)[None])[0] for side in counts))
    drawn = np.subtract(*(_statistics(_resampled_sums(side)) for side in counts)) if len(ids) > 1 else None
    found = [_interval(values[i], None if drawn is None else drawn[:, i]) for i in range(num_speculative_tokens + 1)]
    return found[:-1], found[-1]


def _counts(prompts: Sequence[PromptAcceptance], num_speculative_tokens: int) -> NDArray[np.float64]:
    """Per prompt: drafts, then accepted at each position, (prompts, 1 + K)."""
    if not any(prompt.num_drafts for prompt in prompts):
        raise ValueError(
            f"acceptance: expected at least one draft, found none in {len(prompts)} prompts; the answers are too short to draft for"
        )
    return np.array(
        [[prompt.num_drafts, *_padded(prompt.num_accepted_per_position, num_speculative_tokens)] for prompt in prompts], dtype=np.float64
    ).reshape(len(prompts), 1 + num_speculative_tokens)


def _padded(counts: Sequence[int], length: int) -> list[int]:
    return [*counts[:length], *[0] * (length - len(counts))]


def _statistics(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rates at each position, then 1 + their sum, (rows, K + 1); NaN where a resample holds no draft."""
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = sums[:, 1:] / sums[:, :1]
    return np.concatenate([rates, 1.0 + rates.sum(1, keepdims=True)], axis=1)


def _resampled_sums(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over prompts drawn with replacement, (resamples, 1 + K); the same seed draws the same prompts, hence pairs."""
    generator = np.random.default_rng(SEED)
    times = generator.multinomial(len(counts), np.full(len(counts), 1.0 / len(counts)), size=NUM_RESAMPLES)
    sums: NDArray[np.float64] = times.astype(np.float64) @ counts
    return sums


def _interval(value: float, drawn: NDArray[np.float64] | None) -> Interval:
    if drawn is None:
        return Interval(float(value), None, None)
    edge = (1.0 - LEVEL) / 2
    low, high = np.nanquantile(drawn, [edge, 1.0 - edge])
    return Interval(float(value), float(low), float(high))
