"""What is recommended follows from made-up figures by hand: a chain, plain decoding under load, nothing that is not established."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from mtp_train.advising.advice import choose, to_json

Make = Callable[..., Any]


def test_one_sequence_gets_a_long_chain_and_a_crowd_none(ask: Make, acceptance: Make) -> None:
    alone = ask(acceptance(0.8))
    assert alone.recommended is not None and alone.recommended.num_speculative_tokens == 4
    assert alone.answer.startswith("mtp, chain, K = 4, greedy drafts: ") and alone.answer.endswith("× plain decoding expected.")
    crowd = ask(acceptance(0.3), concurrency=16)
    assert crowd.recommended is None and crowd.answer == "Plain decoding: no drafts."
    assert any("is below 1: it would be slower" in reason for reason in crowd.reasons)
    assert crowd.faster is not None and crowd.faster.until is not None and crowd.faster.until < 16


def test_by_batch_the_draft_shrinks_until_plain_decoding_takes_over(ask: Make, acceptance: Make) -> None:
    advice = ask(acceptance(0.4))
    assert [row[0] for row in advice.by_batch.rows] == ["1", "2", "4", "8", "16"]
    best = [0 if row[1] == "plain decoding" else int(row[1].removeprefix("K = ")) for row in advice.by_batch.rows]
    assert best == sorted(best, reverse=True) and best[0] > 0 and best[-1] == 0
    assert [row[0] for row in advice.by_length.rows] == ["1", "2", "3", "4"]
    assert advice.faster is not None and advice.faster.until is not None and advice.faster_as_is is not None
    assert any(reason.startswith(f"Break-even: {advice.faster.until:.1f} sequences") for reason in advice.reasons)
    last = max(int(row[0]) for row, k in zip(advice.by_batch.rows, best, strict=True) if k)
    assert last <= advice.faster.until < 2 * last, "what is said is what the table shows"
    assert any(
        reason.startswith(f"With K = {best[0]} alone the break-even is {advice.faster_as_is.until:.1f}") for reason in advice.reasons
    )


def test_faster_under_load_alone_is_said_so(ask: Make, acceptance: Make, table: Make) -> None:
    """Where a step has a cost of its own that one sequence's plain pass is small beside."""
    verify = tuple(dataclasses.replace(c, **dict.fromkeys(("seconds", "low_s", "high_s"), float(c.batch_size))) for c in table().verify)
    drafting = tuple(dataclasses.replace(c, **dict.fromkeys(("seconds", "low_s", "high_s"), 2.0)) for c in table().drafting)
    advice = ask(acceptance(0.8), costs=table(verify=verify, drafting=drafting), concurrency=8)
    assert advice.recommended is not None and advice.faster == (2, None)
    assert any("faster than plain decoding from 2 sequences at once on, as far as was timed" in reason for reason in advice.reasons)
    alone = ask(acceptance(0.8), costs=table(verify=verify, drafting=drafting))
    assert alone.recommended is None and not any("every number of sequences" in reason for reason in alone.reasons)


def test_times_that_cannot_be_are_named(ask: Make, acceptance: Make, table: Make) -> None:
    verify = tuple(
        dataclasses.replace(c, **dict.fromkeys(("seconds", "low_s", "high_s"), 0.85)) if (c.batch_size, c.num_tokens) == (4, 2) else c
        for c in table().verify
    )
    advice = ask(acceptance(0.8), costs=table(verify=verify))
    assert any("2 tokens of 4 sequences took 0.85 of a plain pass, more work in less time" in reason for reason in advice.reasons)
    assert not any("more work in less time" in reason for reason in ask(acceptance(0.8)).reasons)


def test_the_fastest_that_is_established_is_recommended(ask: Make, acceptance: Make) -> None:
    """One head looks faster for a few prompts' sake, which establishes nothing."""
    sure, lucky = acceptance(0.15), acceptance(0.99)
    few = [p if n < 5 else dataclasses.replace(p, num_accepted_per_position=(0,) * 4) for n, p in enumerate(lucky.prompts)]
    advice = ask(sure, dataclasses.replace(lucky, prompts=tuple(few)), heads=("sure", "lucky"))
    assert advice.found.options[0].family.head == "lucky"
    assert advice.recommended is not None and advice.recommended.family.head == "sure"
    assert any(reason.startswith("lucky, chain") and "is not established" in reason for reason in advice.reasons)


def test_a_step_s_cost_is_that_of_its_own_number_of_sequences(ask: Make, acceptance: Make) -> None:
    """Where throughput is the goal the speed-up is over plain decoding at another number."""
    advice = ask(acceptance(0.8), concurrency=16, goal="throughput")
    best = advice.best
    assert best is not None
    costs = best.table.costs(best.batch_size, best.shape)
    step = (best.num_speculative_tokens * costs.draft_step + costs.verify + costs.overhead) / costs.plain
    assert f"a step costs {step:.2f} plain passes with {best.batch_size} sequence" in advice.reasons[0]


def test_what_is_not_established_is_not_recommended(ask: Make, acceptance: Make) -> None:
    found = acceptance(0.8)
    for count in (1, 9, 10):
        advice = ask(dataclasses.replace(found, prompts=found.prompts[:count]))
        assert advice.best is not None and advice.best.speedup.value > 1 and (advice.recommended is None) == (count < 10)
        assert any(f"rests on {count} prompts, of 10 at least: faster is not established" in said for said in advice.reasons) == (
            count < 10
        )


def test_the_better_head_is_chosen_and_reasons_say_from_what(ask: Make, acceptance: Make) -> None:
    advice = ask(acceptance(0.4), acceptance(0.7), heads=("eagle", "mtp"))
    assert advice.recommended is not None and advice.recommended.family.head == "mtp"
    assert "over 40 prompts" in advice.reasons[0] and "hf (transformers 5.19.0, float32)" in advice.reasons[0]
    option = advice.recommended
    assert f"a step costs {option.tokens.value / option.speedup.value:.2f} plain passes with 1 sequence" in advice.reasons[0]
    assert any(reason.startswith("Costs are those of hf; vllm's are others") for reason in advice.reasons)


def test_a_faster_scheme_that_the_engine_does_not_serve_is_named(ask: Make, acceptance: Make) -> None:
    settings = {"max_depth": 4, "width": 1, "max_nodes": 4, "min_confidence": 0.0, "refresh": True}
    tree = acceptance(0.95, scheme="tree", decoding="dynamic_tree", num_nodes=4, notes={"decoding": settings})
    advice = ask(tree, acceptance(0.5))
    assert advice.recommended is not None and advice.recommended.family.decoding == "chain"
    assert any("mtp, dynamic_tree, depth 4, 4 nodes" in reason and "vllm does not serve it" in reason for reason in advice.reasons)
    only = ask(tree)
    assert only.recommended is None and only.best is None
    assert any(reason == "vllm serves none of what was measured." for reason in only.reasons)
    assert choose(only.found) == (None, None)


def test_temperatures_between_are_said(ask: Make, acceptance: Make) -> None:
    advice = ask(acceptance(0.8), acceptance(0.6, temperature=1.0), temperature=0.7)
    assert any("Temperature 0.7 was not measured" in reason and "between 0 and 1" in reason for reason in advice.reasons)


def test_json_holds_it_all(ask: Make, acceptance: Make) -> None:
    advice = ask(acceptance(0.8))
    found = json.loads(json.dumps(to_json(advice)))
    assert found["recommended"]["num_speculative_tokens"] == 4 and found["recommended"]["established"]
    assert found["recommended"]["speedup"]["value"] == pytest.approx(advice.found.options[0].speedup.value)
    assert len(found["options"]) == 4 and found["workload"]["concurrency"] == 1 and found["answer"] == advice.answer
    assert json.loads(json.dumps(to_json(ask(acceptance(0.1), concurrency=16))))["recommended"] is None
