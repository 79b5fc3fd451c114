"""Expected speed-ups against a simulation that drafts, verifies and counts seconds, and against what they are made of."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest

from mtp_train.acceptance.costs import CostTable, Timing, chain_shape
from mtp_train.acceptance.expected import (
    best_for_acceptance,
    best_of,
    cuts,
    expected,
    expected_lengths,
    faster_range,
    shape_of,
    single_token,
)
from mtp_train.acceptance.interval import Interval
from mtp_train.records import Acceptance, PromptAcceptance

AcceptanceOf = Callable[..., Acceptance]


def chains(acceptance_of: AcceptanceOf, rate: float) -> Acceptance:
    return acceptance_of(rate=rate, num_prompts=20, temperature=0.0, measured_by="hf", seed=4)


def with_spread(table: CostTable, share: float) -> CostTable:
    """The table with quartiles ``share`` apart around each median, over 25 repeats."""

    def spread(cells: tuple[Timing, ...]) -> tuple[Timing, ...]:
        low, high = 1 - share / 2, 1 + share / 2
        return tuple(dataclasses.replace(c, low_s=low * c.seconds, high_s=high * c.seconds, num_repeats=25) for c in cells)

    return dataclasses.replace(table, verify=spread(table.verify), drafting=spread(table.drafting))


def test_expected_is_what_a_clock_would_show(cost_table: CostTable) -> None:
    """Drafts of three tokens, each taken with 0.6; one pass in five has nothing to draft."""
    cost_table = with_spread(cost_table, 0.0)
    generator, batch_size = random.Random(1), 2
    costs = cost_table.costs(batch_size, chain_shape(3))
    prompts, clock, num_tokens = [], 0.0, 0
    for index in range(40):
        flags, accepted, num_drafts = [False], [0, 0, 0], 0
        for _ in range(200):
            if generator.random() < 0.2:
                flags.append(False)
                clock += costs.plain
                num_tokens += 1
                continue
            taken = 0
            while taken < 3 and generator.random() < 0.6:
                accepted[taken] += 1
                taken += 1
            flags += [True] * taken + [False]
            clock += 3 * costs.draft_step + costs.overhead + costs.verify
            num_drafts, num_tokens = num_drafts + 1, num_tokens + taken + 1
        prompts.append(
            PromptAcceptance(
                prompt_id=str(index),
                category="c",
                num_prompt_tokens=5,
                token_ids=tuple(range(len(flags))),
                accepted=tuple(flags),
                num_drafts=num_drafts,
                num_drafted_per_position=(num_drafts,) * 3,
                num_accepted_per_position=tuple(accepted),
            )
        )
    found = expected(prompts, shape=chain_shape(3), depth=3, table=cost_table, batch_size=batch_size)
    assert found.tokens.value == pytest.approx(num_tokens / (40 * 200))
    assert found.speedup.value == pytest.approx(num_tokens * costs.plain / clock)
    assert found.tokens.value == pytest.approx(0.2 + 0.8 * (1 - 0.6**4) / 0.4, rel=0.02), "Leviathan et al., equation 1"
    assert found.speedup.low is not None and found.speedup.high is not None
    assert found.speedup.low < found.speedup.value < found.speedup.high
    assert found.speedup.low / found.speedup.value == pytest.approx((found.tokens.low or 0) / found.tokens.value)


def test_every_cut_of_a_chain_is_the_measured_rates_up_to_there(acceptance_of: AcceptanceOf, cost_table: CostTable) -> None:
    acceptance = chains(acceptance_of, 0.5)
    found = expected_lengths(acceptance, table=cost_table, batch_size=1)
    rates = acceptance.rate_per_position()
    assert [item.num_speculative_tokens for item in found] == [1, 2, 3, 4, 5]
    assert [item.tokens.value for item in found] == pytest.approx([1 + sum(rates[:k]) for k in range(1, 6)])
    shorter = dataclasses.replace(cost_table, verify=tuple(cell for cell in cost_table.verify if cell.num_tokens <= 4))
    assert len(expected_lengths(acceptance, table=shorter, batch_size=1)) == 3, "as far as was timed"
    some = expected_lengths(acceptance, table=cost_table, batch_size=1, prompts=acceptance.prompts[:3])
    assert some[-1].tokens.value == pytest.approx(dataclasses.replace(acceptance, prompts=acceptance.prompts[:3]).acceptance_length())
    with pytest.raises(ValueError, match="batch sizes from 1 to 8"):
        expected_lengths(acceptance, table=cost_table, batch_size=99)


def test_shapes_of_all_schemes(acceptance_of: AcceptanceOf) -> None:
    chain = chains(acceptance_of, 0.5)

    def of(word: str, nodes: int, depth: int = 5, **settings: object) -> Acceptance:
        shape = "chain" if word == "prompt_lookup" else "tree"
        return dataclasses.replace(
            chain, scheme=shape, decoding=word, num_nodes=nodes, num_speculative_tokens=depth, notes={"decoding": settings}
        )

    assert shape_of(chain, 4) == (4, 1, 5)
    assert shape_of(of("prompt_lookup", 5), 3) == (0, 0, 4)
    tree = of("eagle_tree", 26, nodes_per_depth=[4, 8, 8, 4, 2])
    assert shape_of(tree, 5) == (5, 8, 27) and shape_of(tree, 1) == (1, 1, 5)
    dynamic = of("dynamic_tree", 60, depth=6, width=10)
    assert shape_of(dynamic, 6) == (6, 10, 61)
    assert list(cuts(dynamic)) == [6] and list(cuts(tree)) == [1, 2, 3, 4, 5]
    assert shape_of(of("medusa_tree", 63, depth=4), 4) == (1, 1, 64)
    assert shape_of(of("lookahead", 28, depth=4, window=7, ngram=5, max_candidates=7), 4) == (0, 0, 7 * 4 + 7 * 4), (
        "G (N - 1) + W (N - 1) - 1, and its own"
    )
    with pytest.raises(ValueError, match="expected a depth in"):
        shape_of(dynamic, 3)
    with pytest.raises(ValueError, match="a scheme whose cost is known"):
        shape_of(of("another", 3), 5)


def test_the_best_length_grows_with_acceptance_and_shrinks_with_the_batch(cheap_table: CostTable) -> None:
    """Verifying is free for one sequence there, and costs by the token for eight."""
    for batch_size in (1, 8):
        best = [best_for_acceptance(a, table=cheap_table, batch_size=batch_size).num_speculative_tokens for a in (0.05, 0.5, 0.7, 0.9)]
        assert best == sorted(best), best
        assert best[-1] > best[0]
    alone, crowded = (best_for_acceptance(0.7, table=cheap_table, batch_size=b) for b in (1, 8))
    assert alone.num_speculative_tokens > crowded.num_speculative_tokens and alone.speedup > crowded.speedup
    assert best_for_acceptance(0.0, table=cheap_table, batch_size=8) == (0, 1.0)
    assert (
        alone.text.startswith(f"K = {alone.num_speculative_tokens}: ")
        and best_for_acceptance(0.0, table=cheap_table, batch_size=8).text == "plain"
    )


def test_best_of_what_was_worked_out(acceptance_of: AcceptanceOf, cheap_table: CostTable) -> None:
    found = expected_lengths(chains(acceptance_of, 0.7), table=cheap_table, batch_size=1)
    best = best_of(found)
    assert best.speedup == max(item.speedup.value for item in found) > 1
    never = expected_lengths(chains(acceptance_of, 0.01), table=cheap_table, batch_size=8)
    assert best_of(never) == (0, 1.0) and best_of([]) == (0, 1.0)


def test_break_even_is_where_the_line_crosses_one() -> None:
    gains = [(1, 1.5), (2, 1.4), (4, 1.2), (8, 0.8), (16, 0.5)]
    assert faster_range(gains, around=1) == (1, pytest.approx(4 + 4 * 0.2 / 0.4))
    assert faster_range(gains[:3], around=1) == (1, None)
    assert faster_range([(1, 0.9), (2, 1.0)], around=1) is None
    assert faster_range(gains, around=16) == (1, pytest.approx(6.0)), "none holds it: the first"
    late = [(1, 0.9), (2, 1.1), (4, 0.9), (8, 1.2)]
    assert faster_range(late, around=1) == faster_range(late, around=2) == (2, pytest.approx(3.0))
    assert faster_range(late, around=8) == (8, None), "what is asked about, not what comes first"


def test_an_interval_holds_how_sure_the_times_are(acceptance_of: AcceptanceOf, cost_table: CostTable) -> None:
    """Quartiles a tenth apart over 25 repeats: each median is sure to 1.57 x 0.1 / 5, three of them make a step's time over a plain one."""
    prompts, shape = chains(acceptance_of, 0.6).prompts, chain_shape(3)

    sure, noisy = with_spread(cost_table, 0.0), with_spread(cost_table, 0.1)
    costs = cost_table.costs(2, shape)
    drafting = costs.overhead + 3 * costs.draft_step
    half = 1.57 * 0.1 / 5
    unsure = noisy.unsureness(2, shape)
    assert unsure == pytest.approx(half * math.hypot(1, costs.verify / (costs.verify + drafting), drafting / (costs.verify + drafting)))
    quiet, found = (expected(prompts, shape=shape, depth=3, table=table, batch_size=2).speedup for table in (sure, noisy))
    assert found.value == quiet.value and quiet.low is not None and quiet.high is not None
    assert found.low == pytest.approx(found.value - math.hypot(quiet.value - quiet.low, unsure * quiet.value))
    assert found.high == pytest.approx(found.value + math.hypot(quiet.high - quiet.value, unsure * quiet.value))
    assert sure.unsureness(2, shape) == 0


@pytest.mark.parametrize("steps", [1, 5])
def test_the_further_from_the_lengths_that_were_timed_the_less_sure(cost_table: CostTable, steps: int) -> None:
    """A line through two points is moved by each of them, by its weight there: 5 steps from 2 and 3 are three times the second less
    twice the first."""
    timed = dataclasses.replace(
        with_spread(cost_table, 0.0),
        drafting=tuple(
            Timing(batch_size=b, num_tokens=k, seconds=b * (1 + 0.5 * k) / 10, low_s=0.0, high_s=1.0 * b, num_repeats=25)
            for b in (1, 8)
            for k in (2, 3)
        ),
    )
    costs = timed.costs(2, chain_shape(steps))
    half = 1.57 * 2.0 / 5 / (costs.verify + costs.overhead + steps * costs.draft_step)
    part = steps - 2
    assert timed.unsureness(2, chain_shape(steps)) == pytest.approx(half * math.hypot(1 - part, part))


def test_single_token_schedule_runs_the_head_over_both_rows(cost_table: CostTable) -> None:
    found = single_token(Interval(0.5, 0.4, 0.6), table=cost_table, batch_size=2)
    # Verify 2 x 2 rows: 8; the head over 4 sequences' rows: 0.2; nothing waits. Plain: 6.
    assert found == pytest.approx((1.5 * 6 / 8.2, 1.4 * 6 / 8.2, 1.6 * 6 / 8.2))
    with pytest.raises(ValueError, match="found 16"):
        single_token(Interval(0.5, None, None), table=cost_table, batch_size=8)
