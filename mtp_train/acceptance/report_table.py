"""The headline table of a section as rows of words: the page, the Markdown and the terminal lay them out."""

from __future__ import annotations

from typing import NamedTuple

from mtp_train.acceptance.report_data import ReportData
from mtp_train.acceptance.report_pairs import MIN_PROMPTS
from mtp_train.acceptance.report_summary import Figures, Section, interval_text

NONE = "–"


class Row(NamedTuple):
    """``kind``: ``rate``, ``length``, ``estimate`` or ``speed``, for those who lay rows out differently."""

    kind: str
    label: str
    cells: list[str]


class Table(NamedTuple):
    """``columns``: one per measurement, the head's name with its engine where one head was measured by several."""

    columns: list[str]
    rows: list[Row]


def section_table(section: Section) -> Table:
    """Heads side by side. Without a measurement by an engine, the estimates alone are shown."""
    shown = section.measured or section.estimates
    several = len({figures.head for figures in shown}) < len(shown)
    columns = _distinct([f"{figures.head} · {figures.engine}" if several else figures.head for figures in shown])
    positions = section.way.num_speculative_tokens
    place = "position" if section.way.scheme == "chain" else "depth"
    rows = [Row("rate", f"{place} {i + 1}", [interval_text(figures.rates[i]) for figures in shown]) for i in range(positions)]
    rows.append(Row("length", "acceptance length", [interval_text(figures.length) for figures in shown]))
    if any(figures.num_passes_without_drafts > 0 for figures in shown):
        rows.append(Row("length", "tokens per pass, with those without drafts", [f"{figures.tokens_per_pass:.2f}" for figures in shown]))
    if section.measured and section.estimates:
        estimates = [section.estimate_of(figures.head) for figures in shown]
        rows.append(Row("estimate", "estimate, position 1", [NONE if e is None else interval_text(e.rates[0]) for e in estimates]))
        rows.append(Row("estimate", "estimate, length", [NONE if e is None else interval_text(e.length) for e in estimates]))
    if any(figures.tokens_per_s is not None for figures in shown):
        rows.append(Row("speed", "tokens/s with drafts", [_number(figures.tokens_per_s, 1) for figures in shown]))
        rows.append(Row("speed", "tokens/s without", [_number(figures.plain_tokens_per_s, 1) for figures in shown]))
        rows.append(Row("speed", "with / without", [_ratio(figures) for figures in shown]))
    return Table(columns, rows)


def _distinct(names: list[str]) -> list[str]:
    """Names with a number behind those that came before."""
    return [name if name not in names[:index] else f"{name} ({names[:index].count(name) + 1})" for index, name in enumerate(names)]


def target_words(data: ReportData) -> list[str]:
    """What is known of the target. Its dtype is that of its files: what it ran in stands with each engine."""
    names = {"name": "", "dtype": "stored as "}
    return [f"{names.get(key, f'{key} ')}{value}" for key, value in data.target.items()]


def engines(section: Section) -> str:
    """The engines that measured this section, each once."""
    return "; ".join(dict.fromkeys(figures.engine for figures in section.measured)) or "no engine: the estimate alone"


class Serving(NamedTuple):
    """What an engine served a measurement with: ``about`` in words, ``command`` ready to paste."""

    about: str
    command: str


def serving(section: Section) -> list[Serving]:
    """One for each measurement whose engine states how its server is started (in the notes, ``serve``)."""
    found = []
    for figures in section.measured:
        notes = figures.measurement.acceptance.notes
        if isinstance(notes.get("serve"), str):
            plugin = f"needs the package {notes['plugin']}" if notes.get("plugin") else "stock, no plugin"
            attention = ", ".join(map(str, notes.get("attention", ["not stated"])))
            about = f"{figures.head}, {figures.engine}: {notes.get('class')} ({plugin}), attention {attention}"
            found.append(Serving(about, notes["serve"]))
    return found


def estimate_note(section: Section) -> list[str]:
    """For each head whether the estimate lies within the measured interval at the first position."""
    notes = []
    for figures in section.measured:
        estimate = section.estimate_of(figures.head)
        rate = figures.rates[0]
        if estimate is None or rate.low is None or rate.high is None:
            continue
        inside, num_prompts = rate.low <= estimate.rates[0].value <= rate.high, len(figures.measurement.acceptance.prompts)
        few = f", which {num_prompts} prompts, of {MIN_PROMPTS} at least, make too narrow" if num_prompts < MIN_PROMPTS else ""
        notes.append(
            f"{figures.head}: the estimate of the first position, {estimate.rates[0].value:.3f}, lies "
            f"{'within' if inside else 'outside'} the measured interval [{rate.low:.3f}, {rate.high:.3f}] ({figures.engine}){few}."
        )
    return notes


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _ratio(figures: Figures) -> str:
    return NONE if figures.speedup is None else f"{figures.speedup:.2f}×"
