"""Turns rows of a training run's metrics.jsonl into the curves that a report draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtp_train.acceptance.plot import Series, lines_plot
from mtp_train.acceptance.report_data import ReportData, TrainedHead

# Keys of a metrics row that a reader of a report wants to see, with their axis. A key whose value is a list holds one
# number per depth of the unroll, of which the first two are drawn.
QUANTITIES = (
    ("loss", "loss, as weighted in training", "loss"),
    ("agreement", "agreement with the target, validation", "share of positions"),
    ("expected_acceptance", "sum of min(p, q), validation", "probability"),
    ("acceptance_length", "acceptance length during training", "tokens per pass"),
)
_MOST_POINTS = 300
_DEPTHS = 2


def training_plots(data: ReportData) -> list[tuple[str, str]]:
    """Title and SVG per quantity that any head's metrics hold, all heads in it."""
    plots = []
    for key, title, unit in QUANTITIES:
        series: list[Series] = []
        for colour, head in enumerate(data.heads):
            series += _series(head, key, colour)
        if series:
            plots.append((title, lines_plot(title, series, x="training step", y=unit)))
    return plots


def _series(head: TrainedHead, key: str, colour: int) -> list[Series]:
    rows = [row for row in head.metrics if row.get(key) is not None and "step" in row]
    splits = list(dict.fromkeys(str(row.get("split", "train")) for row in rows))
    if key != "loss" and len(splits) > 1:
        splits = [split for split in splits if split != "train"]
    found = []
    for split in splits:
        here = [row for row in rows if str(row.get("split", "train")) == split]
        depths = max(len(row[key]) if isinstance(row[key], list) else 1 for row in here)
        for depth in range(min(depths, _DEPTHS)):
            points = [(float(row["step"]), _value(row[key], depth)) for row in here]
            name = f"{head.name}, {split}" if key == "loss" or len(splits) > 1 else head.name
            label = name if depths == 1 else f"{name}, depth {depth}"
            if any(y is not None for _, y in points):
                found.append(Series(label, colour, _averaged(points)))
    return found


def _value(entry: Any, depth: int) -> float | None:
    """A number of a row at a depth; None where it was not finite or not measured."""
    if isinstance(entry, list):
        entry = entry[depth] if depth < len(entry) else None
    return float(entry) if isinstance(entry, (int, float)) and not isinstance(entry, bool) else None


def _averaged(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most ``_MOST_POINTS`` points: means over neighbours, where there are more."""
    known = [(x, y) for x, y in points if y is not None]
    size = -(-len(known) // _MOST_POINTS) or 1
    chunks = [known[i : i + size] for i in range(0, len(known), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
