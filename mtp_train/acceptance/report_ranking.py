"""All that was measured on one prompt set at one temperature as one table, the fastest first."""

from __future__ import annotations

from collections import Counter

from mtp_train.acceptance.report_costs import NONE, Rows
from mtp_train.acceptance.report_summary import Figures, Section, Summary, interval_text


def rankings(summary: Summary) -> list[Rows]:
    """A table per prompt set, bound of answers and temperature at which there is something to choose between: sorted by measured
    speed-up, and by acceptance length where no speed was measured or two are equal."""
    grouped: dict[tuple[str, str, float], list[tuple[Section, Figures]]] = {}
    for section in summary.sections:
        key = section.prompt_set.label, section.about, section.way.temperature
        grouped.setdefault(key, []).extend((section, figures) for figures in section.measured)
    titles = Counter((label, temperature) for label, _, temperature in grouped)
    return [
        _ranking(f"{label} ({about})" if titles[label, temperature] > 1 or found[0][0].few else label, temperature, found)
        for (label, about, temperature), found in grouped.items()
        if len(found) > 1
    ]


def _ranking(label: str, temperature: float, found: list[tuple[Section, Figures]]) -> Rows:
    found = sorted(found, key=lambda pair: (-(pair[1].speedup or 0.0), -pair[1].tokens_per_pass))
    rows = [
        [
            figures.head,
            f"{section.way.drafted}, {section.way.draft_sampling} drafts",
            "" if figures.speedup is None else f"{figures.speedup:.2f}×",
            NONE if figures.tokens_per_s is None else f"{figures.tokens_per_s:.1f}",
            f"{figures.tokens_per_pass:.2f}",
            interval_text(figures.length),
            interval_text(figures.rates[0]),
            figures.engine,
        ]
        for section, figures in found
    ]
    columns = ["head", "drafts", "with / without", "tokens/s", "tokens per pass", "acceptance length", "first position", "engine"]
    return Rows(f"{label}, temperature {temperature:g}", columns, [[cell or NONE for cell in row] for row in rows])
