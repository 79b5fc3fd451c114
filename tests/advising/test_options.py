"""Options are every family at every length, over the costs at the workload's load; between temperatures, within both intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mtp_train.acceptance.costs import CostTable
from mtp_train.acceptance.expected import expected_lengths
from mtp_train.acceptance.report_data import ReportData
from mtp_train.advising.options import Found, faster_ranges_of, find_options, lengths_at
from mtp_train.advising.workload import Workload
from mtp_train.records import Acceptance

Make = Callable[..., Any]


def find(reports: Mapping[str, ReportData], asked: Workload, table: CostTable) -> Found:
    return find_options(reports, asked, table_of=lambda run, head: table)


def test_each_length_of_each_family_with_the_workload_s_load(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    measured: Acceptance = acceptance(0.7)
    asked = workload(concurrency=4)
    found = find({"run": report(measured)}, asked, table())
    assert found.left_out == [] and len(found.options) == 4
    assert [option.speedup.value for option in found.options] == sorted((o.speedup.value for o in found.options), reverse=True)
    expected = {item.num_speculative_tokens: item for item in expected_lengths(measured, table=table(), batch_size=4)}
    for option in found.options:
        item = expected[option.num_speculative_tokens]
        assert (option.speedup, option.tokens, option.shape, option.batch_size) == (item.speedup, item.tokens, item.shape, 4)
        assert option.served and option.text == f"mtp, chain, K = {option.num_speculative_tokens}, greedy drafts"
    assert lengths_at(found.options[0], asked, 4) == list(expected.values())


def test_categories_change_the_answer(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    """Writing is drafted half as well as coding there."""
    best = {
        category: find({"run": report(acceptance(0.8))}, workload(categories=(category,)), table()).options[0]
        for category in ("coding", "writing")
    }
    assert best["coding"].num_speculative_tokens > best["writing"].num_speculative_tokens
    assert best["coding"].speedup.value > best["writing"].speedup.value > 1


def test_between_two_temperatures(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    data = report(acceptance(0.8), acceptance(0.4, temperature=1.0))
    cold, middle, hot = (
        {o.num_speculative_tokens: o for o in find({"run": data}, workload(temperature=t), table()).options} for t in (0.0, 0.25, 1.0)
    )
    for k, option in middle.items():
        assert option.speedup.value == pytest.approx(0.75 * cold[k].speedup.value + 0.25 * hot[k].speedup.value)
        assert (option.speedup.low, option.speedup.high) == (hot[k].speedup.low, cold[k].speedup.high)
        assert len(option.measured) == 2
    with pytest.raises(ValueError, match=r"measured at temperature 0, 1, which does not reach 1.2; .*failure_mode"):
        find({"run": data}, workload(temperature=1.2), table())


def test_probabilistic_drafts_begin_where_greedy_ones_do(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    data = report(acceptance(0.8), acceptance(0.6, temperature=1.0, sampling="probabilistic"))
    found = find({"run": data}, workload(temperature=0.5), table())
    assert {option.family.draft_sampling for option in found.options} == {"probabilistic"}
    assert len(found.left_out) == 1 and "measured at temperature 0, which does not reach 0.5" in found.left_out[0]
    found = find({"run": data}, workload(temperature=0.0), table())
    assert {option.family.draft_sampling for option in found.options} == {"greedy"}
    assert "at temperature 0 they are greedy drafts" in found.left_out[0]


def test_throughput_chooses_its_own_number_of_sequences(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    """There 16 sequences are decoded plainly as fast as one, so that plain decoding gives 16 tokens a pass, and speculation with
    few sequences can never catch up with it."""
    data, costs = report(acceptance(0.7)), table()
    at_sixteen = find({"run": data}, workload(concurrency=16), costs).options
    free = find({"run": data}, workload(concurrency=16, goal="throughput"), costs).options
    for option in free:
        k = option.num_speculative_tokens
        alone = [
            batch / 16 * next(item for item in lengths_at(option, workload(), batch) if item.num_speculative_tokens == k).speedup.value
            for batch in costs.batch_sizes
        ]
        assert option.speedup.value == pytest.approx(max(alone))
        assert option.speedup.value >= next(o for o in at_sixteen if o.num_speculative_tokens == k).speedup.value - 1e-9


def test_a_tree_is_an_option_that_vllm_does_not_serve(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    settings = {"max_depth": 3, "width": 2, "max_nodes": 8, "min_confidence": 0.0, "refresh": True}
    tree = acceptance(0.9, depth=3, scheme="tree", decoding="dynamic_tree", num_nodes=8, notes={"decoding": settings})
    data = report(acceptance(0.3), tree)
    (option,) = [o for o in find({"run": data}, workload(), table()).options if o.family.decoding == "dynamic_tree"]
    assert not option.served and option.text == "mtp, dynamic_tree, depth 3, 8 nodes, greedy drafts"
    (option,) = [o for o in find({"run": data}, workload(serve="sglang"), table()).options if o.family.decoding == "dynamic_tree"]
    assert option.served
    found = find({"run": data}, workload(concurrency=16), table())
    assert "dynamic_tree" in found.left_out[0] and "batch sizes from 1 to 16, which were timed, found 32" in found.left_out[0]


def test_what_is_missing_is_said_for_each(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    def nothing(run: str, head: str | None) -> CostTable:
        raise ValueError("no costs here")

    with pytest.raises(ValueError, match=r"found nothing:\n  mtp, chain, K = 4, greedy drafts \(run\): no costs here"):
        find_options({"run": report(acceptance(0.5))}, workload(), table_of=nothing)
    with pytest.raises(ValueError, match=r"does not reach 0.7; run .*; and no costs here") as told:  # all of it, at the first try
        find_options({"a run": report(acceptance(0.5))}, workload(temperature=0.7), table_of=nothing)
    way = "{temperature: 0.7, top_p: 1.0, draft_sampling: greedy, prompt_sets: [project], plain: false, estimate: false}"
    command = (
        "python -m mtp_train.evaluate 'run=a run' decoding.num_speculative_tokens=4 name=mtp "
        f"'+ways.t0_7_greedy={way}' 'ways.greedy.prompt_sets=[]' 'ways.sampled.prompt_sets=[]' identity.num_prompts=0 with the target's"
    )
    assert command in str(told.value)
    with pytest.raises(ValueError, match="expected batch sizes from 1 to 16, which were timed, found 24; measure more of them") as told:
        find({"a run": report(acceptance(0.5))}, workload(concurrency=24), table())
    command = "python tools/measure_costs.py --run 'a run' --name mtp --engine hf --batch-sizes 1 2 4 8 16 24"
    as_timed = "--num-tokens 1 2 5 9 --draft-lengths 1 4 --context-tokens 64"  # the table is written anew
    assert str(told.value).endswith(f": {command} {as_timed}")
    with pytest.raises(ValueError, match=r"measure more of them$"):  # a table that no tool measured
        find({"a run": report(acceptance(0.5))}, workload(concurrency=24), table(source="modelled"))
    with pytest.raises(ValueError, match=r"workload.prompt_set: expected one that run measured \(project\), found 'mine'"):
        find({"run": report(acceptance(0.5))}, workload(prompt_set="mine"), table())


def test_the_family_stays_faster_for_longer_than_one_length(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    data = report(acceptance(0.9), acceptance(0.6, temperature=1.0))

    def at(temperature: float) -> tuple[Any, Any]:
        asked = workload(temperature=temperature)
        option = next(o for o in find({"run": data}, asked, table()).options if o.num_speculative_tokens == 4)
        return faster_ranges_of(option, asked)

    best, own = at(1.0)
    assert own.first == best.first == 1 and own.until is not None and (best.until is None or best.until > own.until)
    between, _ = at(0.5)
    assert best.until is None or between.until is None or between.until > best.until, "between two temperatures it lies between"


def test_runs_on_other_prompts_are_no_competition(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    """The one with the easier prompts would win."""
    hard, easy = acceptance(0.5), acceptance(0.9)
    few = dataclasses.replace(easy, prompts=easy.prompts[:30])
    with pytest.raises(
        ValueError, match=r"runs: expected heads measured on the same prompts, found 40 .* in hard and 30 in easy, 10 of them"
    ):
        find({"hard": report(hard), "easy": report(few)}, workload(), table())
    found = find({"hard": report(hard), "easy": report(few)}, workload(max_prompt_tokens=200), table())
    assert {option.family.run for option in found.options} == {"hard", "easy"}, "of the workload's kind they are the same"
    found = find({"run": report(hard, few, heads=("hard", "easy"))}, workload(), table())
    assert {option.family.head for option in found.options} == {"hard"}
    assert found.left_out == [
        "easy, chain, K = 4, greedy drafts (run) at temperature 0: measured on 30 prompts of the workload's kind, where others were on 40; "
        "evaluate it on the same"
    ]


def test_what_an_engine_does_not_draft_so_is_not_served_there(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    """vLLM takes each Medusa head's most probable token; SGLang has no such heads, and draws no drafts."""
    drawn = acceptance(0.6, temperature=1.0, sampling="probabilistic")
    for word, serve, sampling, served in (
        ("medusa", "vllm", "greedy", True),
        ("medusa", "vllm", "probabilistic", False),
        ("medusa", "sglang", "greedy", False),
        ("medusa", "hf", "probabilistic", True),
        ("mtp", "vllm", "probabilistic", True),
        ("mtp", "sglang", "probabilistic", False),
    ):
        measured = drawn if sampling == "probabilistic" else dataclasses.replace(drawn, draft_sampling="greedy")
        options = find({"run": report(measured, heads=(word,))}, workload(temperature=1.0, serve=serve), table()).options
        assert {option.served for option in options} == {served}, (word, serve, sampling)
