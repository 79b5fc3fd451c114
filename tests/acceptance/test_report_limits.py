"""What falls with the temperature, and by how much, is said with its interval, for greedy and for probabilistic drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_train.acceptance.interval import paired_difference
from mtp_train.acceptance.report import write_report
from mtp_train.acceptance.report_data import Measurement, Plain, ReportData
from mtp_train.acceptance.report_limits import limits
from mtp_train.acceptance.report_summary import interval_text, summarise
from mtp_train.records import Acceptance


@pytest.fixture
def data(report_data: ReportData, acceptance_of: Callable[..., Acceptance]) -> ReportData:
    """One head: greedy drafts fall from 0.5 to 0.1, probabilistic ones from 0.45 (at 1.0) to 0.4."""
    found = []
    for temperature, sampling, rate in (
        (0.0, "greedy", 0.5),
        (1.0, "probabilistic", 0.45),
        (1.5, "greedy", 0.1),
        (1.5, "probabilistic", 0.4),
    ):
        counted = acceptance_of(rate=rate, num_prompts=40, temperature=temperature, measured_by="hf", seed=3)
        prompts = tuple(
            dataclasses.replace(prompt, category="roleplay" if index % 4 == 0 else prompt.category)
            for index, prompt in enumerate(counted.prompts)
        )
        acceptance = dataclasses.replace(counted, draft_sampling=sampling, prompts=prompts)
        wall_s = 20.0 if temperature == 1.5 and sampling == "greedy" else 1.0
        plain = Plain(num_tokens=sum(len(p.token_ids) for p in prompts), wall_s=12.5 / wall_s * (2 if wall_s == 1.0 else 1))
        found.append(Measurement(head="mtp", prompt_set="heldout", acceptance=acceptance, plain=plain, identity=None))
    return dataclasses.replace(report_data, measurements=tuple(found), aims=())


def test_rows_and_falls(data: ReportData) -> None:
    (found,) = limits(summarise(data))
    assert found.label.startswith("mtp on project, held out: chain, K = 5")
    assert [row[0] for row in found.table.rows if row[1] == "all"] == ["0, greedy", "1, probabilistic", "1.5, greedy", "1.5, probabilistic"]
    assert [row[1] for row in found.table.rows[:3]] == ["all", "free writing (writing, roleplay)", "others"]
    assert [int(row[2]) for row in found.table.rows[:3]] == [40, 20, 20]
    cold, _, hot, drawn = (item.acceptance for item in data.measurements)
    rates, length = paired_difference(hot.prompts, cold.prompts, 5)
    assert rates[0].established
    expected = (
        f"greedy drafts, temperature 1.5 less 0: first position {interval_text(rates[0], digits=3, signed=True)}, acceptance length "
        f"{interval_text(length, digits=3, signed=True)}."
    )
    assert expected in found.said
    rates, _ = paired_difference(drawn.prompts, hot.prompts, 5)
    assert any(
        text.startswith(f"temperature 1.5, probabilistic less greedy drafts: first position {rates[0].value:+.3f}") for text in found.said
    )
    assert any(text.startswith("probabilistic drafts, temperature 1.5 less 1: ") for text in found.said)
    assert len(found.said) == 4
    assert found.said[-1].startswith("mtp was slower than plain decoding at temperature 1.5, greedy (0.05×)")


def test_one_temperature_is_no_comparison(data: ReportData) -> None:
    assert limits(summarise(dataclasses.replace(data, measurements=data.measurements[:1]))) == []


def test_other_prompts_are_not_paired(data: ReportData) -> None:
    hot = data.measurements[2]
    fewer = dataclasses.replace(hot, acceptance=dataclasses.replace(hot.acceptance, prompts=hot.acceptance.prompts[:9]))
    (found,) = limits(summarise(dataclasses.replace(data, measurements=(data.measurements[0], fewer))))
    (said,) = [text for text in found.said if "less" in text]
    assert said.endswith("left out, since they were not measured alike: 9 prompts and 40 prompts.")


def test_the_page_and_the_markdown_show_it(data: ReportData, tmp_path: Path) -> None:
    page = write_report(data, tmp_path).read_text(encoding="utf-8")
    assert "Where drafts stop being taken" in page and "greedy drafts, temperature 1.5 less 0" in page
    assert "Where drafts stop being taken" in (tmp_path / "report.md").read_text(encoding="utf-8")
