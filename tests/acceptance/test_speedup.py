"""Expected tokens per pass and the speed-up that follows, against the sources' numbers and a simulation."""

from __future__ import annotations

import random

import pytest

from mtp_train.acceptance.speedup import (
    BLOCK_ROWS,
    Costs,
    best_draft_length,
    expected_tokens_per_pass,
    padded_rows,
    single_token_schedule,
    speedup,
    tokens_per_pass,
)


def test_expected_tokens_per_pass() -> None:
    assert expected_tokens_per_pass(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens_per_pass(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_tokens_per_pass(0.0, 5) == 1
    assert expected_tokens_per_pass(1.0, 5) == 6
    assert expected_tokens_per_pass(0.7, 0) == 1


def test_expected_tokens_per_pass_is_what_drafting_gives() -> None:
    generator = random.Random(0)
    total = 0
    for _ in range(20000):
        taken = 0
        while taken < 3 and generator.random() < 0.6:
            taken += 1
        total += taken + 1
    assert total / 20000 == pytest.approx(expected_tokens_per_pass(0.6, 3), rel=0.01)


def test_tokens_per_pass_from_rates() -> None:
    assert tokens_per_pass([0.5, 0.25]) == 1.75


def test_speedup() -> None:
    free = Costs(plain=1.0, draft_step=0.0, verify=1.0, overhead=0.0)
    assert speedup(tokens=3.3616, num_draft_steps=4, costs=free) == pytest.approx(3.3616)
    leviathan = Costs(plain=2.0, draft_step=0.2, verify=2.0, overhead=0.0)  # c = 0.1
    assert speedup(tokens=3.3616, num_draft_steps=4, costs=leviathan) == pytest.approx(3.3616 / (4 * 0.1 + 1))
    slow = Costs(plain=1.0, draft_step=0.5, verify=1.5, overhead=0.5)
    assert speedup(tokens=1.2, num_draft_steps=2, costs=slow) < 1


def test_best_draft_length_grows_with_acceptance() -> None:
    costs = [Costs(plain=1.0, draft_step=0.1, verify=1.05, overhead=0.0)] * 12

    def best(acceptance: float) -> tuple[int, float]:
        return best_draft_length(tokens=[expected_tokens_per_pass(acceptance, k) for k in range(1, 13)], costs=costs)

    lengths = [best(a)[0] for a in (0.5, 0.7, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert best(0.05) == (0, 1.0), "drafts that are never taken: decode plainly"


def test_best_draft_length_sees_what_each_verification_costs() -> None:
    tokens = [expected_tokens_per_pass(0.9, k) for k in (1, 2, 3)]
    dear = [Costs(plain=1.0, draft_step=0.0, verify=verify, overhead=0.0) for verify in (1.0, 1.1, 9.0)]
    assert best_draft_length(tokens=tokens, costs=dear) == (2, pytest.approx(2.71 / 1.1))
    with pytest.raises(ValueError, match="zip"):
        best_draft_length(tokens=tokens, costs=dear[:2])


def test_padded_rows() -> None:
    assert [padded_rows(rows, block=BLOCK_ROWS) for rows in (0, 1, 64, 65, 128)] == [0, 64, 64, 128, 128]
    assert padded_rows(7.5, block=1) == 8
    with pytest.raises(ValueError, match="blocks of at least 1"):
        padded_rows(3, block=0)


def test_the_single_token_schedule_pays_while_it_adds_no_block() -> None:
    """Up to 32 sequences, two rows each fill no more blocks of 64 than one: what it saves is the wait; beyond, they may."""

    def cost(rows: int) -> float:
        return max(1.0, padded_rows(rows, block=BLOCK_ROWS) / 64)

    for sequences, faster in ((32, True), (64, False)):
        ordinary = Costs(plain=cost(sequences), draft_step=0.05 * cost(sequences), verify=cost(2 * sequences), overhead=0.02)
        schedule = single_token_schedule(ordinary, draft_both=0.05 * cost(2 * sequences))
        gains = [speedup(tokens=1.8, num_draft_steps=1, costs=costs) for costs in (schedule, ordinary)]
        assert (gains[0] > gains[1]) == faster, (sequences, gains)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        expected_tokens_per_pass(1.2, 3)
    with pytest.raises(ValueError, match="0 or more"):
        expected_tokens_per_pass(0.5, -1)
    with pytest.raises(ValueError, match="costs"):
        speedup(tokens=1.0, num_draft_steps=1, costs=Costs(plain=0.0, draft_step=0.1, verify=1.0, overhead=0.0))
