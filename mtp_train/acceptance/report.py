"""Writes a report: report.json (all of it), report.md, and index.html, one page that needs nothing beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mtp_train.acceptance.certificate import Certificate
from mtp_train.acceptance.report_data import ReportData, from_json, part_from_json, to_json
from mtp_train.acceptance.report_html import page
from mtp_train.acceptance.report_markdown import certificate_markdown, escape, markdown, print_tables
from mtp_train.acceptance.report_summary import Section, Summary, summarise
from mtp_train.runtime import SEAL, atomic_write_json, atomic_write_text, check_seal, read_object, seal

JSON, MARKDOWN, HTML = "report.json", "report.md", "index.html"
CERTIFICATE_JSON, CERTIFICATE_MARKDOWN = "certificate.json", "certificate.md"


def write_report(data: ReportData, out: Path) -> Path:
    """Write the three files into ``out`` and return the page's path; report.json first, so that the rest can be made again.

    Errors: ValueError where a measurement holds no draft at all.
    """
    summary = summarise(data)
    document = {"summary": figures_json(summary), "data": to_json(data)}
    atomic_write_json(out / JSON, {**document, SEAL: seal(document)})
    atomic_write_text(out / MARKDOWN, markdown(data, summary))
    atomic_write_text(out / HTML, page(data, summary))
    return out / HTML


def stands(data: ReportData, out: Path) -> bool:
    """Whether the report of these very data is in ``out`` already."""
    if not all((out / name).is_file() for name in (JSON, MARKDOWN, HTML)):
        return False
    try:
        return bool(to_json(read_report(out)) == to_json(data))
    except ValueError:
        return False  # damaged: it is written again


def print_summary(data: ReportData, out: Path) -> None:
    """Print the tables, what is established and the page's path to the terminal (stdout)."""
    print_tables(summarise(data), data.notes)
    print(f"report: {out / HTML}")


def read_report(out: Path) -> ReportData:
    """Read a report's data back from the folder that ``write_report`` wrote."""
    remedy = "expected a report that evaluate wrote: run evaluate again"
    try:
        document = read_object(out / JSON, {"data": dict}, remedy=remedy)
        check_seal(document, where=out / JSON, remedy=remedy)
        return from_json(document["data"])
    except ValueError as fault:
        raise ValueError(str(fault) if str(out) in str(fault) else f"{out / JSON}: {fault}; {remedy}") from None


def write_certificate(certificate: Certificate, out: Path) -> Path:
    """Write certificate.json into ``out`` and return its path, and certificate.md beside it. Where ``out`` is a report's folder,
    ``evaluate`` puts it into the report."""
    lines = ["# Losslessness certificate", "", escape(certificate.text), "", *certificate_markdown(certificate)]
    atomic_write_text(out / CERTIFICATE_MARKDOWN, "\n".join(lines) + "\n")
    document = {"certificate": dataclasses.asdict(certificate)}
    atomic_write_json(out / CERTIFICATE_JSON, {**document, SEAL: seal(document)})
    return out / CERTIFICATE_JSON


def read_certificate(out: Path) -> Certificate | None:
    """The certificate that ``write_certificate`` wrote into ``out``; None where there is none. ValueError where it is damaged."""
    path, remedy = out / CERTIFICATE_JSON, "delete it, and run tools/certify.py again"
    if not path.is_file():
        return None
    document = read_object(path, {"certificate": dict}, remedy=remedy)
    check_seal(document, where=path, remedy=remedy)
    try:
        return part_from_json(Certificate, document["certificate"])
    except ValueError as fault:
        raise ValueError(f"{path}: {fault}; {remedy}") from None


def figures_json(summary: Summary) -> dict[str, Any]:
    """The computed figures as plain JSON, for programs that want numbers and not a page."""
    return {
        "sections": [_section_json(section) for section in summary.sections],
        "aims": [
            {
                **dataclasses.asdict(v.aim),
                "found": v.found._asdict() if v.found else None,
                "reached": v.reached,
                "established": v.established,
            }
            for v in summary.verdicts
        ],
    }


def _section_json(section: Section) -> dict[str, Any]:
    return {
        "prompt_set": section.prompt_set.name,
        "way": section.way._asdict(),
        "num_prompts": section.num_prompts,
        "max_new_tokens": section.max_new_tokens,
        "figures": [
            {
                "head": figures.head,
                "measured_by": figures.measurement.acceptance.measured_by,
                "engine_version": figures.measurement.acceptance.engine_version,
                "dtype": figures.measurement.acceptance.dtype,
                "num_drafts": figures.measurement.acceptance.num_drafts,
                "rate_per_position": [rate._asdict() for rate in figures.rates],
                "acceptance_length": figures.length._asdict(),
                "tokens_per_s": figures.tokens_per_s,
                "plain_tokens_per_s": figures.plain_tokens_per_s,
                "speedup": figures.speedup,
            }
            for figures in (*section.measured, *section.estimates)
        ],
        "comparisons": [
            {
                "first": comparison.first,
                "second": comparison.second,
                "engine": comparison.engine,
                "rate_per_position": [rate._asdict() for rate in comparison.rates],
                "acceptance_length": comparison.length._asdict(),
            }
            for comparison in section.comparisons
        ],
        "left_out": [dataclasses.asdict(found) for found in section.left_out],
    }
