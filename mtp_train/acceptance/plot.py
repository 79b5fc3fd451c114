"""The report's plots as inline SVG: drawn by matplotlib, coloured by the page's own variables, so that dark mode works."""

from __future__ import annotations

import hashlib
import html
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mtp_train.acceptance.interval import Interval
from mtp_train.acceptance.report_summary import Group
from mtp_train.acceptance.speedup import expected_tokens_per_pass
from mtp_train.faults import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that matplotlib draws with and that are then replaced by the page's CSS variables.
_INK, _FAINT = "#010203", "#020304"
NUM_COLOURS = 6
_HEADS = tuple(f"#0a0b{index:02x}" for index in range(NUM_COLOURS))
_VARIABLES = {_INK: "var(--ink)", _FAINT: "var(--line)", **{colour: f"var(--head-{index})" for index, colour in enumerate(_HEADS)}}
_MARKERS = ("o", "s", "D", "^", "v", "P")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))


class Series(NamedTuple):
    """A line of a plot: points (x, y), y None where there is none. ``colour`` is the head's number; None: a line to compare with,
    which is no head's."""

    label: str
    colour: int | None
    points: Sequence[tuple[float, float | None]]


def rates_plot(
    title: str, measured: Mapping[str, list[Interval]], estimates: Mapping[str, list[Interval]], *, colours: Mapping[str, int]
) -> str:
    """Acceptance rate at positions 1..K with error bars, one mark per head; estimates as hollow marks beside them.

    ``measured`` and ``estimates`` are by name; ``colours`` gives each name its number, which decides colour and marker.
    """
    with _drawing(title) as (figure, axes, found):
        names = list(dict.fromkeys([*measured, *estimates]))
        for index, name in enumerate(names):
            shift = (index - (len(names) - 1) / 2) * 0.16
            if name in measured:
                _error_bars(axes, [i + 1 + shift for i in range(len(measured[name]))], measured[name], index=colours[name], label=name)
            if name in estimates:
                _hollow(
                    axes,
                    [i + 1 + shift + 0.07 for i in range(len(estimates[name]))],
                    estimates[name],
                    index=index,
                    label=f"{name}, estimate",
                )
        positions = max((len(rates) for rates in (*measured.values(), *estimates.values())), default=0)
        axes.set_xticks(range(1, positions + 1))
        axes.set_xlim(0.5, positions + 0.5)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("draft position")
        axes.set_ylabel("accepted / drafts")
        _legend(axes)
        found.append(_svg(figure, title))
    return found[0]


def groups_plot(title: str, groups: Mapping[str, list[Group]], *, quantity: str, colours: Mapping[str, int], row_height: float) -> str:
    """First-position rate (``first_position``) or acceptance length per group, heads beside one another with error bars.

    ``row_height`` is the room for one group, in inches.
    """
    labels = list(dict.fromkeys(group.label for by_head in groups.values() for group in by_head))
    counts = {group.label: group.num_prompts for by_head in groups.values() for group in by_head}
    with _drawing(title, height=1.1 + row_height * max(len(labels), 4)) as (figure, axes, found):
        for index, (name, by_head) in enumerate(groups.items()):
            shift = (index - (len(groups) - 1) / 2) * 0.2
            rows = [labels.index(group.label) + shift for group in by_head]
            values = [group.rates[0] if quantity == "first_position" else group.length for group in by_head]
            _error_bars(axes, rows, values, index=colours[name], label=name, sideways=True)
        axes.set_yticks(range(len(labels)), [f"{_plain(label, longest=24)} ({counts[label]})" for label in labels])
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel("first position: accepted / drafts" if quantity == "first_position" else "acceptance length, tokens per pass")
        axes.set_xlim(left=0 if quantity == "first_position" else 1)
        _legend(axes)
        found.append(_svg(figure, title))
    return found[0]


class Point(NamedTuple):
    """A measured value at ``x`` with its interval, drawn onto curves."""

    label: str
    colour: int
    x: float
    y: Interval


def lines_plot(title: str, series: Sequence[Series], *, x: str, y: str, points: Sequence[Point] = (), level: float | None = None) -> str:
    """Lines over a common axis, measured points on them, and a level line where there is something to be above of."""
    with _drawing(title) as (figure, axes, found):
        if level is not None:
            axes.axhline(level, color=_INK, linewidth=0.8)
        for number, line in enumerate(series):
            known = [(a, b) for a, b in line.points if b is not None]
            few = len(known) < 20
            axes.plot(
                [a for a, _ in known],
                [b for _, b in known],
                color=_INK if line.colour is None else _HEADS[line.colour % NUM_COLOURS],
                linestyle=_DASHES[number % len(_DASHES)],
                marker=_MARKERS[(line.colour or 0) % len(_MARKERS)] if few and line.colour is not None else None,
                markersize=4,
                linewidth=1.6 if line.colour is not None else 1.0,
                label=_plain(line.label),
            )
        for point in points:
            _error_bars(axes, [point.x], [point.y], index=point.colour, label=point.label)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _legend(axes)
        found.append(_svg(figure, title))
    return found[0]


def tokens_plot(title: str, rates: Mapping[str, list[Interval]], *, colours: Mapping[str, int]) -> str:
    """Tokens per pass of the target when drafting is cut at K = 0, 1, ...: as measured, and as (1 - a^(K+1)) / (1 - a)
    would have it with a = the first-position rate (dashed)."""
    with _drawing(title) as (figure, axes, found):
        for name, by_position in rates.items():
            index = colours[name]
            values = [rate.value for rate in by_position]
            ks = range(len(values) + 1)
            style: dict[str, Any] = {"color": _HEADS[index % NUM_COLOURS], "marker": _MARKERS[index % len(_MARKERS)], "markersize": 5}
            axes.plot(ks, [1 + sum(values[:k]) for k in ks], label=_plain(f"{name}, measured"), **style)
            expected = [expected_tokens_per_pass(values[0], k) for k in ks]
            axes.plot(ks, expected, label=_plain(f"{name}, (1 − a^(K+1)) / (1 − a)"), linestyle="--", fillstyle="none", **style)
        axes.set_xticks(range(max((len(by_position) for by_position in rates.values()), default=0) + 1))
        axes.set_xlabel("K, drafted tokens per pass")
        axes.set_ylabel("tokens per pass")
        _legend(axes)
        found.append(_svg(figure, title))
    return found[0]


def _error_bars(axes: Axes, at: Sequence[float], values: Sequence[Interval], *, index: int, label: str, sideways: bool = False) -> None:
    centre = [value.value for value in values]
    below = [0.0 if value.low is None else max(value.value - value.low, 0.0) for value in values]
    above = [0.0 if value.high is None else max(value.high - value.value, 0.0) for value in values]
    style: dict[str, Any] = {
        "fmt": _MARKERS[index % len(_MARKERS)],
        "color": _HEADS[index % NUM_COLOURS],
        "capsize": 3,
        "clip_on": False,
        "markersize": 6,
        "linewidth": 1.5,
        "label": _plain(label),
    }
    if sideways:
        axes.errorbar(centre, at, xerr=[below, above], **style)
    else:
        axes.errorbar(at, centre, yerr=[below, above], **style)


def _hollow(axes: Axes, at: Sequence[float], values: Sequence[Interval], *, index: int, label: str) -> None:
    axes.plot(
        at,
        [value.value for value in values],
        linestyle="none",
        marker=_MARKERS[index % len(_MARKERS)],
        color=_HEADS[index % NUM_COLOURS],
        fillstyle="none",
        markersize=6,
        label=_plain(label),
    )


def _plain(text: str, *, longest: int = 36) -> str:
    """Text that matplotlib draws as it stands, on one line and cut where it is too long for a plot: no formulas, and no
    leading underscore, which would hide a legend's entry."""
    text = printable(" ".join(text.split()))
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return ("\u200b" + text if text.startswith("_") else text).replace("$", r"\$")


def _legend(axes: Axes) -> None:
    found = axes.get_legend_handles_labels()
    pairs = sorted(zip(*found, strict=True), key=lambda pair: not hasattr(pair[0], "has_yerr"))  # error bars first, else as drawn
    if pairs:
        handles, labels = zip(*pairs, strict=True)
        axes.figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=2, fontsize=9, labelcolor=_INK)


@contextmanager
def _drawing(title: str, *, height: float = 3.4) -> Iterator[tuple[Figure, Axes, list[str]]]:
    """A figure with axes in the page's style; the caller puts its SVG into the list."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "mtp-train",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": _FAINT,
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": _FAINT,
        "ytick.color": _FAINT,
        "xtick.labelcolor": _INK,
        "ytick.labelcolor": _INK,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(5.0, height), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        yield figure, axes, []


def _svg(figure: Figure, title: str) -> str:
    """The figure as an SVG element for a page: coloured by variables, its ids its own, sized by its column."""
    written = io.StringIO()
    with warnings.catch_warnings():
        # Text stays text in the SVG: that matplotlib's own font lacks a letter makes no difference.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    prefix = "p" + hashlib.sha256((title + text).encode()).hexdigest()[:8] + "-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'xlink:href="#', f'xlink:href="#{prefix}', text)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would hold for the whole page
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, head
    label = html.escape(title, quote=True)
    opened = f'<svg role="img" aria-label="{label}" {box.group(0)} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return opened + rest.replace("<metadata/>", "").strip()
