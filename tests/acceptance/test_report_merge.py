"""Reports of several runs come together where target and prompts are the same, and are refused with both values where not."""

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


def fewer_prompts(data: ReportData) -> ReportData:
    first = data.measurements[0]
    fewer = dataclasses.replace(first, acceptance=dataclasses.replace(first.acceptance, prompts=first.acceptance.prompts[1:]))
    return dataclasses.replace(data, measurements=(fewer, *data.measurements[1:]))


def longer_answers(data: ReportData) -> ReportData:
    first = data.measurements[0]
    longer = dataclasses.replace(first, acceptance=dataclasses.replace(first.acceptance, notes={"max_new_tokens": 96}))
    return dataclasses.replace(data, measurements=(longer, *data.measurements[1:]))


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
            fewer_prompts,
            r"heldout: expected the same prompts in all runs, found 40 \(project, held out\) in one and 39 \(project, held out\) in "
            "two, 1 of them in one only, such as prompt-0",
        ),
        (
            lambda data: with_identity(fewer_prompts(data)),
            r"heldout: expected the same prompts in all runs, found 40 .* in one and 39 .* in two, 1 of them in one only",
        ),
        (
            longer_answers,
            r"heldout: expected answers of the same length at most in all runs, found max_new_tokens 48 \(mtp, one\) and 96 "
            r"\(eagle, two\); evaluate both with the same max_new_tokens",
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
