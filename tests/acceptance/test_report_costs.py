"""The report's curves, tables and sentences about cost say what the model says, for the head and beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_train.acceptance.costs import CostTable, chain_shape
from mtp_train.acceptance.expected import best_for_acceptance, expected_lengths
from mtp_train.acceptance.report import read_report, write_report
from mtp_train.acceptance.report_costs import ACCEPTANCES, cells_table, cost_sections, verify_text
from mtp_train.acceptance.report_data import ReportData
from mtp_train.acceptance.report_summary import summarise


@pytest.fixture
def data(report_data: ReportData, cheap_table: CostTable, make_cost_table: Callable[..., CostTable]) -> ReportData:
    alone = make_cost_table(head=None, drafting=(), engine="vllm")
    return dataclasses.replace(report_data, costs=(cheap_table, alone))


def test_cells_are_the_table_s(cost_table: CostTable) -> None:
    title, columns, rows = cells_table(cost_table)
    assert title == "Milliseconds"
    assert columns == ["sequences", "plain pass", "target over 2", "target over 4", "target over 6", "a draft step", "once a step"]
    assert rows[1] == ["2", "6000.00", "8000.00", "12000.00", "16000.00", "100.00", "200.00"]


def test_the_best_k_stands_by_batch_size_for_each_a_and_for_the_head(data: ReportData) -> None:
    first, alone = cost_sections(data, summarise(data), draw=False)
    table = data.costs[0]
    best = {row[0]: row[1:] for row in first.tables[1].rows}
    assert list(best) == ["a = 0.5", "a = 0.7", "a = 0.9", "mtp", "mtp, K = 1", "mtp, K = 1, over 2 × D rows without waiting"]
    for a in ACCEPTANCES:
        assert best[f"a = {a}"] == [best_for_acceptance(a, table=table, batch_size=b).text for b in table.batch_sizes]
    acceptance = data.measurements[0].acceptance
    one = [expected_lengths(acceptance, table=table, batch_size=b)[0].speedup.value for b in table.batch_sizes]
    assert best["mtp, K = 1"] == [f"{gain:.2f}×" for gain in one]
    assert best["mtp, K = 1, over 2 × D rows without waiting"][-1] == "–", "twice eight was not timed"
    assert alone.tables[1].rows == [] and len(alone.said) == 1, "the target alone drafts nothing"


def test_expected_stands_beside_measured(data: ReportData) -> None:
    (first, _) = cost_sections(data, summarise(data), draw=False)
    acceptance = data.measurements[0].acceptance
    expected = expected_lengths(acceptance, table=data.costs[0], batch_size=8)[-1].speedup
    measured = summarise(data).sections[0].measured[0].speedup
    (said,) = [text for text in first.said if "measured" in text and "expected" in text]
    assert f"K = 5, 8 sequences: expected {expected.value:.2f} [" in said and f"measured {measured:.2f}×" in said
    assert any(text.startswith("mtp, 1 sequence at once: K = ") for text in first.said)


def test_verifying_in_words(cost_table: CostTable) -> None:
    text = verify_text(cost_table)
    ratio = cost_table.verify_s(4, 6) / cost_table.verify_s(4, 1)
    assert f"{ratio:.2f} plain passes with 4 sequences" in text and "over 6 tokens" in text and cost_table.label in text


def test_costs_of_another_engine_use_the_head_s_acceptance_and_no_measured_point(data: ReportData) -> None:
    served = dataclasses.replace(data.costs[0], engine="vllm")
    (section,) = cost_sections(dataclasses.replace(data, costs=(served,)), summarise(data), draw=False)
    assert any(row[0] == "mtp" for row in section.tables[1].rows)
    assert not any("measured" in text and "expected" in text for text in section.said)
    strangers = dataclasses.replace(data, costs=(dataclasses.replace(served, head="not evaluated"),))
    (section,) = cost_sections(strangers, summarise(data), draw=False)
    assert [row[0] for row in section.tables[1].rows] == ["a = 0.5", "a = 0.7", "a = 0.9"]


def test_curves_are_in_the_page_and_come_back(data: ReportData, tmp_path: Path) -> None:
    page = write_report(data, tmp_path).read_text(encoding="utf-8")
    (first, alone) = cost_sections(data, summarise(data), draw=True)
    assert [title for title, _, _ in first.plots] == [
        "Speed-up by draft length, 1 sequence",
        "Speed-up by draft length, 8 sequences",
        "What verifying costs, by batch size",
    ]
    assert [title for title, _, _ in alone.plots] == ["What verifying costs, by batch size"]
    assert "mtp, measured" in first.plots[1][1] and "mtp, measured" not in first.plots[0][1], "measured with 8 sequences"
    for title, svg, _ in first.plots:
        assert title in page and svg in page
    for text in first.said:
        assert text.split("×")[0].split("[")[0][:60] in page
    assert read_report(tmp_path) == data
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## What a step costs" in markdown and "a = 0.7" in markdown
    best = data.costs[0].costs(1, chain_shape(1))
    assert f"{1000 * best.verify:.2f}" in markdown
