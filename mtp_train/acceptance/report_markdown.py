"""The report as Markdown, for a README or a review, and as a table in the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mtp_train.acceptance.certificate import GREEDY_COLUMNS, SAMPLED_COLUMNS, Certificate, greedy_rows, sampled_rows
from mtp_train.acceptance.report_costs import cost_sections, rows_markdown
from mtp_train.acceptance.report_data import ReportData
from mtp_train.acceptance.report_limits import limits
from mtp_train.acceptance.report_ranking import rankings
from mtp_train.acceptance.report_summary import Summary, comparison_text, identity_text
from mtp_train.acceptance.report_table import engines, estimate_note, section_table, serving, target_words


def markdown(data: ReportData, summary: Summary) -> str:
    """The whole report but its plots."""
    lines = [f"# {escape(data.title)}", "", f"Target: {escape(', '.join(target_words(data)))}", ""]
    for section in summary.sections:
        table = section_table(section)
        lines += [f"## {escape(section.prompt_set.label)}: {escape(section.way.text)}", ""]
        about = f"{section.prompt_set.description}: " if section.prompt_set.description else ""
        lines += [escape(f"{about}{section.about}. Engine: {engines(section)}."), ""]
        lines += ["| | " + " | ".join(map(escape, table.columns)) + " |", "|---|" + "---:|" * len(table.columns)]
        lines += [f"| {escape(row.label)} | " + " | ".join(map(escape, row.cells)) + " |" for row in table.rows]
        said = [comparison_text(comparison) for comparison in section.comparisons] + [found.text for found in section.left_out]
        said += estimate_note(section)
        said += [text for figures in section.proofs if (text := identity_text(figures)) is not None]
        lines += ["", *(f"- {escape(text)}" for text in said), ""]
        for about, command in serving(section):
            lines += [f"Served as {escape(about)}:", "", *fenced(command, "bash"), ""]
        for figures in section.proofs:
            identity = figures.measurement.identity
            for found in identity.differences if identity else ():
                lines.append(
                    escape(
                        f"- {figures.head}, {found.prompt_id}, token {found.index}: plain {found.plain_token}, with drafts "
                        f"{found.speculated_token}, gap of the target's two best logits {found.logit_gap:.2e}"
                    )
                )
        lines.append("")
    for ranking in rankings(summary):
        lines += [f"## The fastest first: {escape(ranking.title)}", "", *rows_markdown(ranking, escape), ""]
    for limit in limits(summary):
        lines += [f"## Where drafts stop being taken: {escape(limit.label)}", "", *rows_markdown(limit.table, escape), ""]
        lines += [*(f"- {escape(text)}" for text in limit.said), ""]
    for costs in cost_sections(data, summary, draw=False):
        lines += [f"## What a step costs: {escape(costs.label)}", ""]
        for cells in costs.tables:
            lines += [escape(cells.title), "", *rows_markdown(cells, escape), ""]
        lines += [*(f"- {escape(text)}" for text in costs.said), ""]
    if summary.verdicts:
        lines += ["## Aims", "", *(f"- {escape(verdict.text)}" for verdict in summary.verdicts), ""]
    if data.certificate is not None:
        lines += ["## Losslessness", "", escape(data.certificate.text), "", *certificate_markdown(data.certificate), ""]
    if data.notes:
        lines += ["## Notes", "", *(f"- {escape(note)}" for note in data.notes), ""]
    lines += ["## How to read this", "", *(f"- {text}" for text in LEGEND), ""]
    lines += ["## What produced it", "", *fenced(json.dumps(data.provenance, indent=2, ensure_ascii=False), "json"), ""]
    return "\n".join(lines)


def fenced(text: str, language: str) -> list[str]:
    """A block of code, behind three backticks, or more than it holds in a row."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", text, fence]


def certificate_markdown(certificate: Certificate) -> list[str]:
    """The certificate's tables, and each first difference of greedy texts."""
    tables = ((SAMPLED_COLUMNS, sampled_rows(certificate)), (GREEDY_COLUMNS, greedy_rows(certificate)))
    lines = []
    for columns, rows in tables:
        if rows:
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(map(escape, row)) + " |" for row in rows]
            lines.append("")
    for case in certificate.greedy:
        for found in case.identity.differences:
            lines.append(
                escape(
                    f"- {case.head}, {case.drafted}, {found.prompt_id}, token {found.index}: plain {found.plain_token}, with drafts "
                    f"{found.speculated_token}, gap of the target's two best logits {found.logit_gap:.2e}"
                )
            )
    lines.append(escape(f"Target: {certificate.target}. Engine: {certificate.engine}."))
    return lines


LEGEND = (
    "Rate at position i: accepted at i / drafts, unconditional, as vLLM counts. "
    "Acceptance length: 1 + accepted / drafts, the bonus token counted.",
    "[low, high]: 95% bootstrap interval over prompts (2000 resamples); differences are paired over the same prompts.",
    "The estimate unrolls the head over the target's own answers and walks over them as a decoder would, without decoding.",
)


def escape(text: str) -> str:
    """Text that Markdown and the HTML within it show as it stands."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def print_tables(summary: Summary, notes: Sequence[str]) -> None:
    """Print the tables, what is established, and what the reader must know to the terminal (stdout)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for section in summary.sections:
        found = section_table(section)
        title = Text(f"{section.prompt_set.label} ({section.about}): {section.way.text}")
        table = Table(title=title, title_justify="left", caption=Text(engines(section)), caption_justify="left")
        table.add_column("")
        for column in found.columns:
            table.add_column(Text(column), justify="right")
        for number, row in enumerate(found.rows):
            last = number + 1 == len(found.rows) or found.rows[number + 1].kind != row.kind
            table.add_row(Text(row.label), *map(Text, row.cells), style="bold" if row.kind == "length" else "", end_section=last)
        console.print(table)
        said = [comparison_text(comparison) for comparison in section.comparisons] + [item.text for item in section.left_out]
        for text in said + [text for figures in section.proofs if (text := identity_text(figures)) is not None]:
            console.print(Text(text))
        console.print()
    for verdict in summary.verdicts:
        console.print(Text(verdict.text, style="green" if verdict.established else "yellow"))
    for note in notes:
        console.print(Text(f"Note: {note}"))
