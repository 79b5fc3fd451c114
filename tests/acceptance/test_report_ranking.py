"""The table of all heads and schemes begins with the fastest, and without a speed with the longest accepted drafts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mtp_train.acceptance.report import write_report
from mtp_train.acceptance.report_data import Plain, ReportData
from mtp_train.acceptance.report_ranking import rankings
from mtp_train.acceptance.report_summary import summarise


def test_the_fastest_stands_first(report_data: ReportData) -> None:
    greedy = [m for m in report_data.measurements if m.prompt_set == "heldout" and m.acceptance.temperature == 0 and not m.is_estimate]
    mtp, eagle = (dataclasses.replace(item, identity=None) for item in greedy)
    slow = dataclasses.replace(mtp, plain=Plain(num_tokens=9000, wall_s=1.0))
    for measurements, order in (((slow, eagle), ["eagle", "mtp"]), ((mtp, dataclasses.replace(eagle, plain=None)), ["mtp", "eagle"])):
        (found,) = rankings(summarise(dataclasses.replace(report_data, measurements=measurements, aims=())))
        assert [row[0] for row in found.rows] == order
        assert found.title == "project, held out, temperature 0"
        figures = summarise(dataclasses.replace(report_data, measurements=measurements, aims=())).sections[0].measured
        assert {row[0]: row[2] for row in found.rows} == {f.head: f"{f.speedup:.2f}×" if f.speedup else "–" for f in figures}
    without = tuple(dataclasses.replace(item, plain=None) for item in (eagle, mtp))
    (found,) = rankings(summarise(dataclasses.replace(report_data, measurements=without, aims=())))
    assert [row[0] for row in found.rows] == ["mtp", "eagle"], "by length, where no speed was measured"
    assert rankings(summarise(dataclasses.replace(report_data, measurements=(mtp,), aims=()))) == []


def test_the_page_shows_it_escaped(report_data: ReportData, tmp_path: Path) -> None:
    page = write_report(report_data, tmp_path).read_text(encoding="utf-8")
    assert "The fastest first" in page and "<script" not in page
