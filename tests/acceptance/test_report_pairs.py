"""Only what was measured alike stands in one table and is held against each other; what is left out is named, with both values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mtp_train.acceptance.report import print_summary, write_report
from mtp_train.acceptance.report_data import Measurement, ReportData
from mtp_train.acceptance.report_limits import limits
from mtp_train.acceptance.report_ranking import rankings
from mtp_train.acceptance.report_summary import Summary, comparison_text, summarise


def changed(item: Measurement, *, prompts: int = 40, tree: bool = False, head: str | None = None, **notes: Any) -> Measurement:
    kinds = {"scheme": "tree", "decoding": "dynamic_tree", "num_nodes": 9} if tree else {}
    acceptance = dataclasses.replace(
        item.acceptance, prompts=item.acceptance.prompts[:prompts], notes=item.acceptance.notes | notes, **kinds
    )
    return dataclasses.replace(item, acceptance=acceptance, identity=None, head=head or item.head)


def of(data: ReportData, *measurements: Measurement) -> ReportData:
    return dataclasses.replace(data, measurements=measurements, answers=(), aims=())


def texts(summary: Summary) -> list[str]:
    return [found.text for section in summary.sections for found in section.left_out]


def test_schemes_measured_with_other_limits_are_not_paired(report_data: ReportData, tmp_path: Path, capsys: Any) -> None:
    chain = report_data.measurements[0]
    data = of(report_data, changed(chain, max_new_tokens=12), changed(chain, tree=True, max_new_tokens=24))
    summary = summarise(data)
    assert not any(section.comparisons for section in summary.sections)
    (said,) = texts(summary)
    assert said == (
        "mtp, tree (dynamic_tree), depth 5, 9 nodes less mtp, chain, K = 5: left out, since they were not measured alike: "
        "max_new_tokens 24 and 12."
    )
    assert [section.size for section in summary.sections] == [f"40 prompts, at most {most} new tokens each" for most in (12, 24)]
    assert rankings(summary) == [], "one alone is not ranked"
    page = write_report(data, tmp_path).read_text(encoding="utf-8")
    assert "max_new_tokens 24 and 12" in page and "at most 12 new tokens each" in page
    assert "max\\_new\\_tokens 24 and 12" in (tmp_path / "report.md").read_text(encoding="utf-8")
    print_summary(dataclasses.replace(data, notes=("know this",)), tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    assert "max_new_tokens 24 and 12" in shown and "Note: know this" in shown


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_new_tokens": 24}, ["max_new_tokens 12 and 24"]),
        ({"prompts": 15}, ["prompts 40 and 15, 15 of them the same"]),
        ({"seed": 1}, ["seed 0 and 1"]),
        ({"top_p": 0.9}, ["top_p 1.0 and 0.9"]),
    ],
)
def test_heads_measured_otherwise_are_not_paired(report_data: ReportData, changes: dict[str, Any], why: list[str]) -> None:
    sampled = report_data.measurements[2]
    stated = {"max_new_tokens": 12, "top_p": 1.0, "seed": 0}
    mine, other = changed(sampled, **stated), changed(sampled, head="eagle", **(stated | changes))
    summary = summarise(of(report_data, mine, other))
    assert [(item.first, item.second, item.why) for section in summary.sections for item in section.left_out] == [("mtp", "eagle", why)]
    assert not any(section.comparisons for section in summary.sections)
    together = not {"max_new_tokens", "prompts"} & changes.keys()
    assert len(summary.sections) == (1 if together else 2), "a table's columns are over the same prompts, with answers bounded alike"
    greedy = report_data.measurements[0]
    pair = changed(greedy, **stated), changed(greedy, head="eagle", **(stated | changes))
    assert bool(summarise(of(report_data, *pair)).sections[0].comparisons) == together, "what draws nothing depends on no seed and top_p"


def test_an_estimate_stands_with_its_head_s_table(report_data: ReportData) -> None:
    data = report_data.measurements
    mtp, eagle = [changed(data[index], max_new_tokens=most) for index, most in ((0, 12), (6, 24))]
    first, second = summarise(of(report_data, mtp, data[1], eagle, data[7])).sections[:2]
    assert [found.head for found in (*first.measured, *first.estimates)] == ["mtp", "mtp"]
    assert [found.head for found in (*second.measured, *second.estimates)] == ["eagle", "eagle"]


def test_temperatures_measured_with_other_limits_are_not_paired(report_data: ReportData) -> None:
    greedy, _, hot = (changed(item, max_new_tokens=12 + 12 * index) for index, item in enumerate(report_data.measurements[:3]))
    (found,) = limits(summarise(of(report_data, greedy, hot)))
    (said,) = [text for text in found.said if "less" in text]
    assert said.endswith("not measured alike: 40 prompts, at most 36 new tokens each and 40 prompts, at most 12 new tokens each.")


def test_few_prompts_establish_nothing(report_data: ReportData, tmp_path: Path) -> None:
    greedy = report_data.measurements[0]
    worse = dataclasses.replace(report_data.measurements[6], identity=None)
    for prompts, state in ((40, "established (the interval leaves out 0)"), (9, "so few prompts (9, of 10 at least) establish nothing")):
        other = [dataclasses.replace(p, num_accepted_per_position=(0,) * 5) for p in worse.acceptance.prompts]
        none = dataclasses.replace(worse, acceptance=dataclasses.replace(worse.acceptance, prompts=tuple(other)))
        data = of(report_data, changed(greedy, prompts=prompts), changed(none, prompts=prompts))
        (comparison,) = summarise(data).sections[0].comparisons
        assert comparison.rates[0].established and comparison.establishes(comparison.rates[0]) == (prompts == 40)
        assert comparison_text(comparison).count(state) == 2
        page = write_report(data, tmp_path).read_text(encoding="utf-8")
        assert ('<li class="good">mtp less eagle' in page) == (prompts == 40)
        (ranking,) = rankings(summarise(data))
        assert ("establishes anything" in ranking.title) == (prompts == 9)
        for text in (page, (tmp_path / "report.md").read_text(encoding="utf-8")):
            assert ("; over fewer than 10 prompts no interval establishes anything" in text) == (prompts == 9)
