"""The part of a report that sets acceptance against cost: speed-up by draft length and batch size, as curves and in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mtp_train.acceptance.costs import CostTable, chain_shape
from mtp_train.acceptance.expected import Best, Expected, best_for_acceptance, best_of, expected_lengths, single_token
from mtp_train.acceptance.interval import Interval
from mtp_train.acceptance.plot import NUM_COLOURS, Point, Series, lines_plot
from mtp_train.acceptance.report_data import ReportData
from mtp_train.acceptance.report_summary import Figures, Summary, interval_text
from mtp_train.acceptance.speedup import expected_tokens_per_pass, speedup

# Acceptance probabilities whose curves are drawn beside a head's own.
ACCEPTANCES = (0.5, 0.7, 0.9)
NONE = "–"


class Rows(NamedTuple):
    """A table in words: a title, the columns' names, the rows' cells."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class CostSection(NamedTuple):
    """One table of costs and what follows from it. ``plots`` are titles, SVG and captions."""

    label: str
    tables: list[Rows]
    said: list[str]
    plots: list[tuple[str, str, str]]


def cells_table(table: CostTable) -> Rows:
    """The medians in milliseconds, a row per batch size."""
    columns = ["sequences", *(f"target over {n}" if n > 1 else "plain pass" for n in table.verified_tokens)]
    rows = [[str(batch), *(_ms(table.verify_s(batch, n)) for n in table.verified_tokens)] for batch in table.batch_sizes]
    if table.drafting:
        columns += ["a draft step", "once a step"]
        for row, batch in zip(rows, table.batch_sizes, strict=True):
            costs = table.costs(batch, chain_shape(1))
            row += [_ms(costs.draft_step), _ms(costs.overhead)]
    return Rows("Milliseconds", columns, rows)


def cost_sections(data: ReportData, summary: Summary, *, draw: bool) -> list[CostSection]:
    """A section per table of costs; a head's figures are those of the report's first section that counted it in chains. ``draw``:
    whether plots are wanted, which take a second each."""
    colours = {head.name: index % NUM_COLOURS for index, head in enumerate(data.heads)}
    found = []
    for table in data.costs:
        figures = None if table.head is None else _figures_of(table, summary)
        said = [verify_text(table)] + ([] if figures is None else _said(table, figures))
        plots = _plots(table, figures, colour=colours.get(table.head or "", 0)) if draw else []
        found.append(CostSection(table.label, [cells_table(table), _best_table(table, figures)], said, plots))
    return found


def _figures_of(table: CostTable, summary: Summary) -> Figures | None:
    """Chains of the table's head: those that its own engine counted, else any engine's, never the estimate's."""
    for section in summary.sections:
        here = [figures for figures in section.measured if figures.head == table.head and section.way.decoding == "chain"]
        if here:
            return min(here, key=lambda figures: figures.measurement.acceptance.measured_by != table.engine)
    return None


def batch_size_of(figures: Figures) -> int | None:
    """The number of sequences decoded together, where the measurement states it."""
    found = figures.measurement.acceptance.notes.get("batch_size")
    return found if isinstance(found, int) else None


def _best_table(table: CostTable, figures: Figures | None) -> Rows:
    """The best draft length by batch size: for each acceptance, and for the head."""
    rows: list[list[str]] = []
    for a in ACCEPTANCES if table.drafting else ():
        rows.append([f"a = {a}", *(best_for_acceptance(a, table=table, batch_size=batch).text for batch in table.batch_sizes)])
    if figures is not None:
        acceptance = figures.measurement.acceptance
        at = {batch: _lengths(figures, table, batch) for batch in table.batch_sizes}
        rows.append([figures.head, *(best_of(at[batch]).text for batch in table.batch_sizes)])
        one = [next((item for item in at[batch] if item.num_speculative_tokens == 1), None) for batch in table.batch_sizes]
        rows.append([f"{figures.head}, K = 1", *(NONE if item is None else f"{item.speedup.value:.2f}×" for item in one)])
        first = Interval(acceptance.rate_per_position()[0], None, None)
        schedule = _each(table, lambda batch: f"{single_token(first, table=table, batch_size=batch).value:.2f}×")
        rows.append([f"{figures.head}, K = 1, over 2 × D rows without waiting", *schedule])
    columns = ["expected speed-up", *(f"{batch} sequence{'s' if batch > 1 else ''}" for batch in table.batch_sizes)]
    return Rows("The best K by batch size", columns, rows)


def _each(table: CostTable, say: Callable[[int], str]) -> list[str]:
    """Words per batch size; a dash where what they need was not timed."""
    found = []
    for batch in table.batch_sizes:
        try:
            found.append(say(batch))
        except ValueError:
            found.append(NONE)
    return found


def _lengths(figures: Figures, table: CostTable, batch_size: float) -> list[Expected]:
    try:
        return expected_lengths(figures.measurement.acceptance, table=table, batch_size=batch_size)
    except ValueError:  # beyond what was timed
        return []


def verify_text(table: CostTable) -> str:
    """Whether verifying is free, from one sequence to the most that were timed."""
    most = table.verified_tokens[-1]
    said = [
        f"{table.verify_s(batch, most) / table.verify_s(batch, 1):.2f} plain passes with {batch} sequence{'s' if batch > 1 else ''}"
        for batch in table.batch_sizes
    ]
    return f"A pass of the target over {most} tokens of each sequence costs " + ", ".join(said) + f" ({table.label})."


def _said(table: CostTable, figures: Figures) -> list[str]:
    """The head's best length at both ends of the table, and whether the model meets what was measured."""
    said = []
    for batch in dict.fromkeys((table.batch_sizes[0], table.batch_sizes[-1])):
        found = _lengths(figures, table, batch)
        best: Best = best_of(found)
        chosen = next((item for item in found if item.num_speculative_tokens == best.num_speculative_tokens), None)
        text = (
            "plain decoding is expected to be the fastest"
            if chosen is None
            else f"K = {chosen.num_speculative_tokens} is expected to be the best, {interval_text(chosen.speedup)}×"
        )
        said.append(f"{figures.head}, {batch} sequence{'s' if batch > 1 else ''} at once: {text}.")
    batch_size, measured = batch_size_of(figures), figures.speedup
    same = figures.measurement.acceptance.measured_by == table.engine
    if batch_size is not None and measured is not None and same:
        found = _lengths(figures, table, batch_size)
        k = figures.measurement.acceptance.num_speculative_tokens
        if found and found[-1].num_speculative_tokens == k:
            expected = interval_text(found[-1].speedup)
            said.append(
                f"{figures.head}, K = {k}, {batch_size} sequences: expected {expected}×, measured {measured:.2f}× over the whole run, in "
                "which prompts are read too and the last sequences decode alone."
            )
    return said


def _plots(table: CostTable, figures: Figures | None, *, colour: int) -> list[tuple[str, str, str]]:
    """Speed-up by draft length for few and for many sequences, and what verifying costs by batch size."""
    plots = []
    sizes = [table.batch_sizes[0]]
    measured_at = None if figures is None else batch_size_of(figures)
    within = measured_at is not None and table.batch_sizes[0] < measured_at <= table.batch_sizes[-1]
    sizes.append(measured_at if within and measured_at is not None else table.batch_sizes[-1])
    for batch in dict.fromkeys(sizes) if table.drafting else ():
        title = f"Speed-up by draft length, {batch} sequence{'s' if batch > 1 else ''}"
        series = [Series(f"a = {a}", None, _curve(table, a, batch)) for a in ACCEPTANCES]
        points: list[Point] = []
        if figures is not None:
            found = _lengths(figures, table, batch)
            own = [(0.0, 1.0), *((float(item.num_speculative_tokens), item.speedup.value) for item in found)]
            series.append(Series(f"{figures.head}, its rates", colour, own))
            if batch == measured_at and figures.speedup is not None and figures.measurement.acceptance.measured_by == table.engine:
                k = figures.measurement.acceptance.num_speculative_tokens
                points.append(Point(f"{figures.head}, measured", colour, k, Interval(figures.speedup, None, None)))
        svg = lines_plot(f"{title}, {table.label}", series, x="K, drafted tokens per pass", y="× plain decoding", points=points, level=1.0)
        plots.append((title, svg, "Tokens per pass over the measured cost of a step. Lines of a: each token taken with probability a."))
    ratios = [
        Series(f"{n} tokens", index, [(float(batch), table.verify_s(batch, n) / table.verify_s(batch, 1)) for batch in table.batch_sizes])
        for index, n in enumerate(table.verified_tokens)
        if n > 1
    ]
    title = "What verifying costs, by batch size"
    svg = lines_plot(f"{title}, {table.label}", ratios, x="sequences decoded together", y="plain passes", level=1.0)
    plots.append((title, svg, "A pass over so many tokens of each sequence, over a plain pass of as many sequences: 1 is free."))
    return plots


def _curve(table: CostTable, acceptance: float, batch_size: float) -> list[tuple[float, float | None]]:
    points: list[tuple[float, float | None]] = [(0.0, 1.0)]
    for k in range(1, table.longest + 1):
        costs = table.costs(batch_size, chain_shape(k))
        points.append((float(k), speedup(tokens=expected_tokens_per_pass(acceptance, k), num_draft_steps=k, costs=costs)))
    return points


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def rows_markdown(found: Rows, escape: Callable[[str], str]) -> list[str]:
    """A table as Markdown."""
    lines = ["| " + " | ".join(map(escape, found.columns)) + " |", "|---|" + "---:|" * (len(found.columns) - 1)]
    return lines + [_line(row, escape) for row in found.rows]


def _line(cells: Sequence[str], escape: Callable[[str], str]) -> str:
    return "| " + " | ".join(map(escape, cells)) + " |"
