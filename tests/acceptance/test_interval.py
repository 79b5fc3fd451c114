"""Intervals over prompts cover the truth as often as they say, and differences are paired."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mtp_train.acceptance.interval import NUM_RESAMPLES, paired_difference, rates_and_length
from mtp_train.records import Acceptance, PromptAcceptance


def prompt(index: int, *, drafts: int, accepted: tuple[int, ...]) -> PromptAcceptance:
    return PromptAcceptance(
        prompt_id=str(index),
        category="",
        num_prompt_tokens=1,
        token_ids=(),
        accepted=(),
        num_drafts=drafts,
        num_drafted_per_position=(drafts,) * len(accepted),
        num_accepted_per_position=accepted,
    )


def test_values_are_those_of_the_record(acceptance_of: Callable[..., Acceptance]) -> None:
    acceptance = acceptance_of(rate=0.4, num_prompts=20, temperature=0.0, measured_by="hf", seed=1)
    rates, length = rates_and_length(acceptance.prompts, 5)
    assert [rate.value for rate in rates] == pytest.approx(acceptance.rate_per_position(), abs=1e-12)
    assert length.value == pytest.approx(acceptance.acceptance_length(), abs=1e-12)
    for found in (*rates, length):
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high
    assert rates_and_length(acceptance.prompts, 5) == (rates, length), "the same prompts give the same interval"


def test_a_ratio_weighs_prompts_by_their_drafts() -> None:
    rates, _ = rates_and_length([prompt(0, drafts=90, accepted=(90,)), prompt(1, drafts=10, accepted=(0,))], 1)
    assert rates[0].value == 0.9


def test_interval_agrees_with_its_formula() -> None:
    """With equal drafts per prompt the ratio is a mean, whose standard error is known."""
    generator = np.random.default_rng(3)
    taken = generator.integers(10, 31, size=200)
    rates, _ = rates_and_length([prompt(i, drafts=40, accepted=(int(n),)) for i, n in enumerate(taken)], 1)
    error = float(np.std(taken / 40)) / 200**0.5
    assert rates[0].low == pytest.approx(rates[0].value - 1.96 * error, abs=0.15 * error)
    assert rates[0].high == pytest.approx(rates[0].value + 1.96 * error, abs=0.15 * error)


def test_intervals_cover_the_truth() -> None:
    """150 data sets of 60 prompts, whose rates differ from prompt to prompt (mean 0.3): near 95% of the intervals hold it."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(150):
        own = generator.beta(3, 7, size=60)
        prompts = [prompt(i, drafts=30, accepted=(int(generator.binomial(30, rate)),)) for i, rate in enumerate(own)]
        (found,), _ = rates_and_length(prompts, 1)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.3 <= found.high
    assert 0.89 <= covered / 150 <= 0.99


def test_pairing_sees_what_two_intervals_would_not() -> None:
    """Prompts differ far more than the heads do: each head's interval holds the other's value, the paired one leaves out 0."""
    generator = np.random.default_rng(1)
    base = generator.integers(5, 95, size=60)
    worse = [prompt(i, drafts=100, accepted=(int(n),)) for i, n in enumerate(base)]
    better = [prompt(i, drafts=100, accepted=(int(n) + 3,)) for i, n in enumerate(base)]
    (difference,), length = paired_difference(better, worse, 1)
    (alone,), _ = rates_and_length(worse, 1)
    assert difference.value == pytest.approx(0.03)
    assert length.value == pytest.approx(0.03)
    assert difference.established
    assert alone.high is not None
    assert alone.high > alone.value + 0.03
    (backwards,), _ = paired_difference(list(reversed(worse)), better, 1)
    assert backwards.value == pytest.approx(-0.03)
    assert backwards.established


def test_no_difference_is_not_established(acceptance_of: Callable[..., Acceptance]) -> None:
    first, second = (acceptance_of(rate=0.3, num_prompts=40, temperature=0.0, measured_by="hf", seed=seed) for seed in (1, 2))
    assert not paired_difference(first.prompts, second.prompts, 5)[1].established
    same = paired_difference(first.prompts, first.prompts, 5)[1]
    assert same == (0.0, 0.0, 0.0)
    assert not same.established


def test_edges() -> None:
    (alone,), _ = rates_and_length([prompt(0, drafts=4, accepted=(1,))], 1)
    assert alone == (0.25, None, None)
    assert not alone.established
    with_empty, _ = rates_and_length([prompt(0, drafts=4, accepted=(1,)), prompt(1, drafts=0, accepted=(0,))], 1)
    assert with_empty[0].value == 0.25, "an answer too short to draft for weighs nothing"
    assert with_empty[0].low == with_empty[0].high == 0.25
    with pytest.raises(ValueError, match="at least one draft"):
        rates_and_length([prompt(0, drafts=0, accepted=(0,))], 1)
    with pytest.raises(ValueError, match="same prompts"):
        paired_difference([prompt(0, drafts=4, accepted=(1,))], [prompt(1, drafts=4, accepted=(1,))], 1)
    assert NUM_RESAMPLES == 2000
