"""What is recommended follows from made-up figures by hand: a chain, plain decoding under load, nothing that is not established."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from mtp_train.acceptance.costs import CostTable
from mtp_train.advising.advice import Advice, advise, choose, to_json
from mtp_train.advising.options import find_options
from mtp_train.advising.workload import Workload

Make = Callable[..., Any]


@pytest.fixture
def ask(report: Make, table: Make, workload: Make) -> Make:
    def make(*acceptances: Any, costs: CostTable | None = None, heads: tuple[str, ...] = (), **asked: Any) -> Advice:
        found_for: Workload = workload(**asked)
        found = find_options({"run": report(*acceptances, heads=heads)}, found_for, table_of=lambda run, head: costs or table())
        return advise(found, found_for, target="tiny", hardware="2 x core", flags=[])

    return make


def test_one_sequence_gets_a_long_chain_and_a_crowd_none(ask: Make, acceptance: Make) -> None:
    alone = ask(acceptance(0.8))
    assert alone.recommended is not None and alone.recommended.num_speculative_tokens == 4
    assert alone.answer.startswith("mtp, chain, K = 4, greedy drafts: ") and alone.answer.endswith("× plain decoding expected.")
    crowd = ask(acceptance(0.3), concurrency=16)
    assert crowd.recommended is None and crowd.answer == "Plain decoding: no drafts."
    assert any("is below 1: it would be slower" in reason for reason in crowd.reasons)
    assert crowd.break_even is not None and crowd.break_even < 16


def test_by_batch_the_draft_shrinks_until_plain_decoding_takes_over(ask: Make, acceptance: Make) -> None:
    advice = ask(acceptance(0.4))
    assert [row[0] for row in advice.by_batch.rows] == ["1", "2", "4", "8", "16"]
    best = [0 if row[1] == "plain decoding" else int(row[1].removeprefix("K = ")) for row in advice.by_batch.rows]
    assert best == sorted(best, reverse=True) and best[0] > 0 and best[-1] == 0
    assert [row[0] for row in advice.by_length.rows] == ["1", "2", "3", "4"]
    assert any(reason.startswith(f"Break-even: {advice.break_even:.1f} sequences") for reason in advice.reasons)


def test_what_is_not_established_is_not_recommended(ask: Make, acceptance: Make) -> None:
    found = acceptance(0.8)
    few = dataclasses.replace(found, prompts=found.prompts[:1])
    advice = ask(few)
    assert advice.best is not None and advice.best.speedup.value > 1 and advice.recommended is None
    assert any("faster is not established" in reason for reason in advice.reasons)


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
