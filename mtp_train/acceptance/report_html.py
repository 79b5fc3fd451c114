"""The report as one HTML page: inline SVG and CSS, no script, no file or font from elsewhere, all text escaped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mtp_train.acceptance.certificate import GREEDY_COLUMNS, SAMPLED_COLUMNS, Certificate, greedy_rows, sampled_rows
from mtp_train.acceptance.interval import Interval
from mtp_train.acceptance.plot import NUM_COLOURS, groups_plot, rates_plot, tokens_plot
from mtp_train.acceptance.report_costs import cost_sections
from mtp_train.acceptance.report_curves import training_plots
from mtp_train.acceptance.report_data import MarkedAnswer, ReportData
from mtp_train.acceptance.report_limits import limits
from mtp_train.acceptance.report_markdown import LEGEND
from mtp_train.acceptance.report_ranking import rankings
from mtp_train.acceptance.report_summary import (
    Figures,
    Section,
    Summary,
    by_category,
    by_context,
    comparison_text,
    identity_text,
    interval_text,
    must_hold,
)
from mtp_train.acceptance.report_table import NONE, engines, estimate_note, section_table, serving, target_words
from mtp_train.faults import printable
from mtp_train.records import Acceptance

TEMPLATE = "report.html.j2"


def page(data: ReportData, summary: Summary) -> str:
    """The page's HTML; the same data give the same bytes."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_readable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    colours = {head.name: index % NUM_COLOURS for index, head in enumerate(data.heads)}
    costs = cost_sections(data, summary, draw=True)
    return environment.get_template(TEMPLATE).render(
        data=data,
        target=target_words(data),
        colours=colours,
        cards=_cards(summary, colours),
        headline=summary.sections[0] if summary.sections else None,
        sections=[_section(section, colours) for section in summary.sections],
        verdicts=summary.verdicts,
        certificate=_certificate(data.certificate),
        rankings=rankings(summary),
        limits=limits(summary),
        costs=[section._replace(plots=[(title, _markup(svg), said) for title, svg, said in section.plots]) for section in costs],
        breakdowns=_breakdowns(summary, colours),
        curves=[(title, _markup(svg)) for title, svg in training_plots(data)],
        answers=_answers(data),
        legend=LEGEND,
        short=_short_provenance(data.provenance),
        provenance={stage: json.dumps(value, indent=2, ensure_ascii=False) for stage, value in data.provenance.items()},
    )


def _certificate(certificate: Certificate | None) -> dict[str, Any] | None:
    if certificate is None:
        return None
    tables = [(SAMPLED_COLUMNS, sampled_rows(certificate)), (GREEDY_COLUMNS, greedy_rows(certificate))]
    return {"text": certificate.text, "holds": certificate.holds, "tables": [table for table in tables if table[1]], "about": certificate}


def _readable(value: Any) -> Any:
    """What comes into the page: text without what a browser cannot show, or what would turn a line around."""
    return printable(value) if type(value) is str else value


def _markup(svg: str) -> Any:
    """An SVG of ours (matplotlib escapes its text), to stand in the page as it is."""
    from markupsafe import Markup

    return Markup(svg)


def _cards(summary: Summary, colours: dict[str, int]) -> list[dict[str, Any]]:
    """The headline: one card per measurement of the first section."""
    if not summary.sections:
        return []
    section = summary.sections[0]
    return [
        {
            "head": figures.head,
            "colour": colours[figures.head],
            "length": f"{figures.length.value:.2f}",
            "length_range": _range(figures.length),
            "first": interval_text(figures.rates[0]),
            "speed": NONE if figures.speedup is None else f"{figures.speedup:.2f}×",
            "engine": figures.engine,
        }
        for figures in section.measured or section.estimates
    ]


def _range(found: Interval) -> str:
    return "" if found.low is None or found.high is None else f"{found.low:.2f} – {found.high:.2f}"


def _section(section: Section, colours: dict[str, int]) -> dict[str, Any]:
    table = section_table(section)
    shown = section.measured or section.estimates
    # One head measured by several engines: columns differ by colour, and the estimate takes that of the head's first.
    several = len({figures.head for figures in shown}) < len(shown)
    by_column = {
        column: index if several else colours[figures.head]
        for index, (column, figures) in enumerate(zip(table.columns, shown, strict=True))
    }
    by_head = {figures.head: by_column[column] % NUM_COLOURS for column, figures in reversed(list(zip(table.columns, shown, strict=True)))}
    measured = {column: figures.rates for column, figures in zip(table.columns, shown, strict=True) if not figures.measurement.is_estimate}
    estimates = {figures.head: figures.rates for figures in section.estimates}
    return {
        "set": section.prompt_set,
        "way": section.way.text,
        "about": section.about,
        "engines": engines(section),
        "table": table,
        "colours": [index % NUM_COLOURS for index in by_column.values()],
        "plot": _markup(
            rates_plot(
                f"{section.prompt_set.label}: acceptance by draft position",
                measured,
                estimates,
                colours={**colours, **by_head, **by_column},
            )
        ),
        "comparisons": [(comparison_text(found), found.establishes(found.rates[0])) for found in section.comparisons],
        "left_out": [found.text for found in section.left_out],
        "estimate_notes": estimate_note(section),
        "identities": [_identity(figures) for figures in section.proofs],
        "serving": serving(section),
        "measured_notes": [
            (figures.head, _notes(figures.measurement.acceptance)) for figures in shown if figures.measurement.acceptance.notes
        ],
    }


def _identity(figures: Figures) -> dict[str, Any]:
    identity = figures.measurement.identity
    assert identity is not None
    fails = must_hold(figures) and not identity.holds
    return {
        "text": identity_text(figures),
        "holds": identity.holds,
        "fails": fails,
        "head": figures.head,
        "differences": identity.differences,
    }


def _notes(acceptance: Acceptance) -> list[tuple[str, str]]:
    return [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2))
        for key, value in acceptance.notes.items()
    ]


def _breakdowns(summary: Summary, colours: dict[str, int]) -> list[dict[str, Any]]:
    """Plots behind the headline: by category, by context length over all sets decoded the same way, by draft length."""
    if not summary.sections:
        return []
    headline = summary.sections[0]
    shown = headline.measured or headline.estimates
    engine = shown[0].engine
    shown = [figures for figures in shown if figures.engine == engine]
    label = headline.prompt_set.label
    pooled: dict[str, Acceptance] = {}
    for section in summary.sections:
        for figures in section.measured or section.estimates:
            alike = section.way == headline.way and section.max_new_tokens == headline.max_new_tokens
            if alike and figures.engine == engine:
                acceptance = figures.measurement.acceptance
                before = pooled[figures.head].prompts if figures.head in pooled else ()
                pooled[figures.head] = dataclasses.replace(acceptance, prompts=before + acceptance.prompts)
    categories = {figures.head: by_category(figures.measurement.acceptance) for figures in shown}
    contexts = {head: by_context(acceptance) for head, acceptance in pooled.items()}
    return [
        {
            "plot": _markup(
                groups_plot(f"{label}: first position by category", categories, quantity="first_position", colours=colours, row_height=0.75)
            ),
            "title": "By category",
            "caption": f"First-position rate on {label}; in brackets the number of prompts. Few prompts make wide intervals.",
        },
        {
            "plot": _markup(
                groups_plot("acceptance length by context length", contexts, quantity="acceptance_length", colours=colours, row_height=0.5)
            ),
            "title": "By context length",
            "caption": "Acceptance length by the prompt's length in tokens, over all prompt sets decoded this way: what kind of text "
            "fills a bin differs too.",
        },
        {
            "plot": _markup(tokens_plot(f"{label}: tokens per pass by draft length", {f.head: f.rates for f in shown}, colours=colours)),
            "title": "By draft length",
            "caption": "Tokens per pass of the target if drafting were cut at K. Dashed: (1 − a^(K+1)) / (1 − a) with a the "
            "first-position rate, as if every position were like the first.",
        },
    ]


def _answers(data: ReportData) -> list[dict[str, Any]]:
    """The marked answers, those to one prompt side by side."""
    grouped: dict[tuple[str, str], list[MarkedAnswer]] = {}
    for answer in data.answers:
        grouped.setdefault((answer.prompt_set, answer.prompt_id), []).append(answer)
    return [
        {
            "prompt_id": prompt_id,
            "category": found[0].category,
            "question": found[0].question,
            "heads": [
                {
                    "head": answer.head,
                    "tokens": list(zip(answer.token_texts, answer.accepted, strict=True)),
                    "num_accepted": sum(answer.accepted),
                    "num_tokens": len(answer.accepted),
                }
                for answer in found
            ],
        }
        for (_, prompt_id), found in grouped.items()
    ]


def _short_provenance(provenance: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Stage, commit and versions at a glance, where a stage states them as ``runtime.provenance`` does."""
    rows = []
    for stage, document in provenance.items():
        made = document.get("provenance", document) if isinstance(document, dict) else {}
        packages = made.get("packages", {}) if isinstance(made, dict) else {}
        if packages or "git_commit" in made:
            versions = ", ".join(f"{name} {version}" for name, version in packages.items())
            rows.append((stage, str(made.get("git_commit") or "not in git"), versions))
    return rows
