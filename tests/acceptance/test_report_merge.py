"""Reports of several runs come together over what all measured of one target; the rest is named, and refused where that is everything."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_train.acceptance.costs import CostTable
from mtp_train.acceptance.identity import Identity
from mtp_train.acceptance.report import read_report, write_report
from mtp_train.acceptance.report_data import Measurement, ReportData
from mtp_train.acceptance.report_merge import merge_reports
from mtp_train.acceptance.report_summary import summarise
from mtp_train.records import Acceptance

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def data(report_data: ReportData, cost_table: CostTable) -> ReportData:
    target = {**report_data.target, "fingerprint": "a" * 64}
    measurements = tuple(same_lengths(item) for item in report_data.measurements)
    return dataclasses.replace(report_data, target=target, measurements=measurements, costs=(cost_table,))


def same_lengths(measurement: Measurement) -> Measurement:
    """Prompts of one id have one length here, whatever head drafted for them."""
    prompts = tuple(
        dataclasses.replace(prompt, num_prompt_tokens=10 + number) for number, prompt in enumerate(measurement.acceptance.prompts)
    )
    notes = measurement.acceptance.notes | {"max_new_tokens": 48}
    return dataclasses.replace(
        measurement, acceptance=dataclasses.replace(measurement.acceptance, prompts=prompts, notes=notes), identity=None
    )


def only(data: ReportData, head: str, **changes: Any) -> ReportData:
    """A run that measured one of the two heads."""
    found = {
        "heads": tuple(item for item in data.heads if item.name == head),
        "measurements": tuple(item for item in data.measurements if item.head == head),
        "answers": tuple(item for item in data.answers if item.head == head),
        "aims": (),
    }
    return dataclasses.replace(data, **(found | changes))


def test_heads_of_two_runs_stand_side_by_side(data: ReportData) -> None:
    merged = merge_reports({"one": only(data, "mtp"), "two": only(data, "eagle", costs=())})
    assert [head.name for head in merged.heads] == ["mtp", "eagle"]
    assert merged.title == "Comparison of mtp, eagle on SmolLM2-135M-Instruct"
    first = summarise(merged).sections[0]
    (comparison,) = first.comparisons
    assert (comparison.first, comparison.second) == ("mtp", "eagle")
    assert summarise(dataclasses.replace(data, aims=())).sections[0].comparisons[0].length == comparison.length, "as if measured in one run"
    assert set(merged.provenance) == {"one: train", "two: train"} and merged.costs == data.costs
    assert not any("cannot be compared" in note for note in merged.notes)


def test_heads_of_one_name_get_their_run_s(data: ReportData) -> None:
    merged = merge_reports({"long": only(data, "mtp"), "short": only(data, "mtp"), "other": only(data, "eagle")})
    assert [head.name for head in merged.heads] == ["long: mtp", "short: mtp", "eagle"]
    assert {item.head for item in merged.measurements} == {"long: mtp", "short: mtp", "eagle"}
    assert [table.head for table in merged.costs] == ["long: mtp", "short: mtp", "other: mtp"]


def everywhere(change: Callable[[Acceptance], Acceptance], data: ReportData) -> ReportData:
    return dataclasses.replace(
        data, measurements=tuple(dataclasses.replace(item, acceptance=change(item.acceptance)) for item in data.measurements)
    )


def fewer(acceptance: Acceptance) -> Acceptance:
    return dataclasses.replace(acceptance, prompts=acceptance.prompts[1:])


def longer(acceptance: Acceptance) -> Acceptance:
    return dataclasses.replace(acceptance, notes={"max_new_tokens": 96})


def of_other_texts(acceptance: Acceptance) -> Acceptance:
    first = dataclasses.replace(acceptance.prompts[0], num_prompt_tokens=9)
    return dataclasses.replace(acceptance, prompts=(first, *acceptance.prompts[1:]))


def trial(data: ReportData, head: str = "mtp", **changes: Any) -> Measurement:
    """A few prompts, tried with another scheme."""
    item = next(item for item in data.measurements if item.head == head)
    found = {"decoding": "dynamic_tree", "scheme": "tree", "num_nodes": 20, "prompts": item.acceptance.prompts[:4]}
    return dataclasses.replace(item, acceptance=dataclasses.replace(item.acceptance, **(found | changes)))


def with_identity(data: ReportData) -> ReportData:
    """As a run in bfloat16 writes it, which compares the texts of the very measurement that counts."""
    found = Identity(num_prompts=39, num_identical=39, num_tokens=100, differences=())
    return dataclasses.replace(data, measurements=(dataclasses.replace(data.measurements[0], identity=found), *data.measurements[1:]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda data: dataclasses.replace(data, target={**data.target, "name": "tiny", "fingerprint": "b" * 64}),
            r"one target, found SmolLM2.*\(fingerprint a{16}\) in one and tiny \(b{16}\) in two",
        ),
        (
            lambda data: everywhere(fewer, data),
            r"the same prompts of a set in all runs, with answers of the same length at most, found heldout: 40 prompts, at most 48 new "
            r"tokens each \(project, held out\) in one; 39 prompts, at most 48 new tokens each \(project, held out\) in two; 1 of them not "
            "in all, such as prompt-0; gsm8k: .*; evaluate them with the same limit, max_new_tokens and prompts",
        ),
        (
            lambda data: everywhere(longer, data),
            r"40 prompts, at most 48 new tokens each \(.*\) in one; 40 prompts, at most 96 .* in two; gsm8k",
        ),
        (
            lambda data: everywhere(of_other_texts, data),
            "heldout: expected the same texts in all runs, found prompt-0 of 10 tokens in one and of 9 in two; evaluate both with the same",
        ),
        (
            lambda data: dataclasses.replace(
                data,
                prompt_sets=(dataclasses.replace(data.prompt_sets[0], name="mine"),),
                measurements=(),
                answers=(),
            ),
            "a prompt set that all runs were measured on, found one: gsm8k, heldout; two: mine",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(data: ReportData, change: Callable[[ReportData], ReportData], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        merge_reports({"one": only(data, "mtp"), "two": change(only(data, "eagle"))})


def test_a_trial_on_few_prompts_is_left_out_and_named(data: ReportData) -> None:
    """With its proof of identity, and with a head that measured nothing else."""
    one, two = only(data, "mtp"), only(data, "eagle")
    proof = with_identity(dataclasses.replace(one, measurements=(trial(data, prompts=trial(data).acceptance.prompts[:2]),))).measurements
    tried = dataclasses.replace(one, measurements=(*proof, trial(data), *one.measurements))
    lookup = dataclasses.replace(trial(data, decoding="prompt_lookup", scheme="chain", num_nodes=None), head="lookup")
    tried = dataclasses.replace(
        tried, heads=(*one.heads, dataclasses.replace(one.heads[0], name="lookup")), measurements=(lookup, *tried.measurements)
    )
    merged, plain = merge_reports({"one": tried, "two": two}), merge_reports({"one": one, "two": two})
    assert merged.notes[0] == (
        "Left out: one: lookup, chain (prompt_lookup), K = 5; mtp, tree (dynamic_tree), depth 5, 20 nodes: 4 prompts of heldout, at most "
        "48 new tokens each, where all runs share 40 prompts, at most 48 new tokens each."
    )
    assert dataclasses.replace(merged, notes=merged.notes[1:]) == plain


def test_what_all_runs_tried_stands_in_a_section_of_its_own(data: ReportData) -> None:
    runs = {name: only(data, head) for name, head in (("one", "mtp"), ("two", "eagle"))}
    tried = {name: dataclasses.replace(run, measurements=(*run.measurements, trial(data, run.heads[0].name))) for name, run in runs.items()}
    merged = merge_reports(tried)
    assert not any("Left out" in note for note in merged.notes)
    sections = [section for section in summarise(merged).sections if section.prompt_set.name == "heldout" and section.way.temperature == 0]
    assert [(section.way.decoding, section.num_prompts, len(section.measured)) for section in sections] == [
        ("chain", 40, 2),
        ("dynamic_tree", 4, 2),
    ]


@pytest.mark.parametrize(("change", "said"), [(fewer, "39 prompts, at most 48"), (longer, "40 prompts, at most 96")])
def test_a_set_without_shared_prompts_is_left_out_alone(data: ReportData, change: Callable[[Acceptance], Acceptance], said: str) -> None:
    other = only(data, "eagle")
    changed = everywhere(change, other).measurements
    kept = tuple(new if new.prompt_set == "heldout" else old for new, old in zip(changed, other.measurements, strict=True))
    merged = merge_reports({"one": only(data, "mtp"), "two": with_identity(dataclasses.replace(other, measurements=kept))})
    assert [prompt_set.name for prompt_set in merged.prompt_sets] == ["gsm8k"] and not merged.answers
    (note,) = (note for note in merged.notes if note.startswith("Left out"))
    assert "heldout, of which the runs share nothing: 40 prompts, at most 48" in note and said in note
    assert len(summarise(merged).sections[0].comparisons) == 1


def test_one_report_is_no_comparison(data: ReportData) -> None:
    with pytest.raises(ValueError, match="two runs or more, found 1"):
        merge_reports({"one": data})


def test_speeds_with_other_batch_sizes_are_named(data: ReportData) -> None:
    other = only(data, "eagle")
    changed = tuple(
        dataclasses.replace(item, acceptance=dataclasses.replace(item.acceptance, notes={"batch_size": 1})) for item in other.measurements
    )
    merged = merge_reports({"one": only(data, "mtp"), "two": dataclasses.replace(other, measurements=changed)})
    assert (
        "Speeds were taken with different numbers of sequences at once and cannot be compared; batch_size 1: eagle; 8: mtp." in merged.notes
    )


def test_the_tool_writes_one_page(data: ReportData, tmp_path: Path) -> None:
    for run, head in (("one", "mtp"), ("two", "eagle")):
        write_report(only(data, head, answers=(), costs=()), tmp_path / run / "report")
    command = [sys.executable, str(ROOT / "tools" / "compare_runs.py"), str(tmp_path / "one"), str(tmp_path / "two" / "report")]
    done = subprocess.run([*command, "--out", str(tmp_path / "both")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [head.name for head in read_report(tmp_path / "both").heads] == ["mtp", "eagle"]
    assert "The fastest first" in (tmp_path / "both" / "index.html").read_text(encoding="utf-8")
    (tmp_path / "one" / "report" / "report.json").unlink()
    done = subprocess.run([*command, "--out", str(tmp_path / "both")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "expected a file, found nothing there" in done.stderr and "Traceback" not in done.stderr
