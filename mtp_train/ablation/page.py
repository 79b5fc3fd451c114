"""The one page of a norm ablation: where stripped heads fail to train, where they are merely worse, where it makes no difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean

from mtp_train.ablation.grid import MIXTURES
from mtp_train.ablation.measure import Counted, Line, Measured
from mtp_train.acceptance.interval import Interval, paired_difference, rates_and_length
from mtp_train.acceptance.plot import Series, lines_plot
from mtp_train.records import PromptAcceptance
from mtp_train.runtime import atomic_write_text

BASELINE = "none"
COLUMNS = ("norms that are on", "heads", "ended early", "first position", "seeds, lowest to highest", "length", "less no norms, paired")
_CURVES = (
    ("grad_norm", "train", "gradient norm before clipping"),
    ("hidden_rms", "train", "root mean square of the state that the lm_head reads"),
    ("loss", "train", "training loss"),
    ("agreement", "validation", "held-out agreement at depth 0"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mixture on one target and one kind of prompts, its seeds put together. ``rate`` and ``length`` are None where no head ended;
    ``gain`` is against ``BASELINE`` over the same prompts and seeds, None for itself or where one of them has no head for a seed."""

    target: str
    prompts: str
    mixture: str
    num_heads: int
    num_stopped: int
    rate: Interval | None
    length: Interval | None
    by_seed: tuple[float, ...]
    gain: Interval | None


def rows(found: Sequence[Measured], *, long_tokens: int, num_speculative_tokens: int) -> list[Row]:
    """All rows, target by target, short prompts (fewer than ``long_tokens`` tokens) before long ones.

    Intervals are over prompts drawn with replacement, counts of the seeds added up: they say how sure the figure is for these
    seeds. How far seeds differ stands beside it.
    """
    made = []
    for target in dict.fromkeys(measured.cell.target for measured in found):
        for label, is_long in ((f"short (under {long_tokens} tokens)", False), (f"long ({long_tokens} tokens and more)", True)):
            kept = {
                mixture: {
                    measured.cell.seed: [prompt for prompt in measured.prompts if (prompt.num_prompt_tokens >= long_tokens) == is_long]
                    for measured in found
                    if measured.cell.target == target and measured.cell.mixture == mixture and measured.stopped is None
                }
                for mixture in MIXTURES
                if any(measured.cell.target == target and measured.cell.mixture == mixture for measured in found)
            }
            if not any(prompts for seeds in kept.values() for prompts in seeds.values()):
                continue
            stopped = {
                mixture: sum(m.stopped is not None for m in found if m.cell.target == target and m.cell.mixture == mixture)
                for mixture in kept
            }
            for mixture, seeds in kept.items():
                made.append(
                    _row(target, label, mixture, seeds, kept.get(BASELINE, {}), num_stopped=stopped[mixture], steps=num_speculative_tokens)
                )
    return made


def _row(
    target: str,
    label: str,
    mixture: str,
    seeds: Mapping[int, Sequence[Counted]],
    baseline: Mapping[int, Sequence[Counted]],
    *,
    num_stopped: int,
    steps: int,
) -> Row:
    rate, length, gain = None, None, None
    if seeds:
        rates, length = rates_and_length(_added(seeds.values()), steps)
        rate = rates[0]
    common = seeds.keys() & baseline.keys()
    if mixture != BASELINE and common and len(common) == len(baseline):
        gain = paired_difference(_added(seeds[s] for s in common), _added(baseline[s] for s in common), steps)[0][0]
    return Row(
        target=target,
        prompts=label,
        mixture=mixture,
        num_heads=len(seeds) + num_stopped,
        num_stopped=num_stopped,
        rate=rate,
        length=length,
        by_seed=tuple(rates_and_length(_added([seeds[seed]]), steps)[0][0].value for seed in sorted(seeds)),
        gain=gain,
    )


def _added(seeds: Iterable[Sequence[Counted]]) -> list[PromptAcceptance]:
    """Per prompt the counts of all seeds together."""
    by_prompt: dict[str, list[Counted]] = defaultdict(list)
    for prompts in seeds:
        for prompt in prompts:
            by_prompt[prompt.prompt_id].append(prompt)
    return [
        PromptAcceptance(
            prompt_id=name,
            category="",
            num_prompt_tokens=counted[0].num_prompt_tokens,
            token_ids=(),
            accepted=(),
            num_drafts=sum(one.num_drafts for one in counted),
            num_drafted_per_position=(),
            num_accepted_per_position=tuple(
                sum(column) for column in zip(*(one.num_accepted_per_position for one in counted), strict=True)
            ),
        )
        for name, counted in by_prompt.items()
    ]


def not_shown(found: Sequence[Measured], made: Sequence[Row]) -> list[str]:
    """What this ablation does not say, in sentences."""
    seeds = {measured.cell.seed for measured in found}
    lines = []
    if len(seeds) < 3:
        lines.append(f"{len(seeds)} seeds: expected at least three before a difference between mixtures is more than chance.")
    if not any(measured.stopped for measured in found):
        lines.append("No head here fails to train: no loss or gradient ceased to be finite, with norms or without.")
    if open_rows := [row for row in made if row.gain is not None and not row.gain.established]:
        named = ", ".join(f"{row.mixture} ({row.target}, {row.prompts})" for row in open_rows)
        lines.append(f"Not established, the interval of the difference to no norms holds 0: {named}.")
    lines.append(
        "The acceptance is the estimate from the target's own answers, not a count of decoding; the size, data and steps are those "
        "of this run, and nothing is said about others."
    )
    return lines


def write_page(
    found: Sequence[Measured], *, out: Path, about: Mapping[str, str], long_tokens: int, num_speculative_tokens: int
) -> tuple[Path, list[Row]]:
    """Write ``norms.md`` and ``norms.html``; returns the page's path and the rows of its table. ``about``: facts by name."""
    made = rows(found, long_tokens=long_tokens, num_speculative_tokens=num_speculative_tokens)
    gaps = not_shown(found, made)
    stopped = [f"{measured.cell.name}: {measured.stopped}" for measured in found if measured.stopped is not None]
    table = [_cells(row) for row in made]
    heads = [(row.target, row.prompts) for row in made]
    atomic_write_text(out / "norms.md", _markdown(heads, table, about, stopped, gaps))
    atomic_write_text(out / "norms.html", _html(heads, table, about, stopped, gaps, _plots(found)))
    return out / "norms.html", made


def _cells(row: Row) -> tuple[str, ...]:
    spread = "–" if not row.by_seed else f"{min(row.by_seed):.3f} to {max(row.by_seed):.3f}"
    return (
        row.mixture,
        str(row.num_heads),
        str(row.num_stopped),
        _shown(row.rate),
        spread,
        _shown(row.length),
        "–" if row.gain is None else _shown(row.gain, signed=True) + (" *" if row.gain.established else ""),
    )


def _shown(value: Interval | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    form = "+.3f" if signed else ".3f"
    low_high = "" if value.low is None or value.high is None else f" [{value.low:{form}}, {value.high:{form}}]"
    return f"{value.value:{form}}{low_high}"


def _markdown(
    heads: Sequence[tuple[str, str]],
    table: Sequence[tuple[str, ...]],
    about: Mapping[str, str],
    stopped: Sequence[str],
    gaps: Sequence[str],
) -> str:
    lines = ["# What each norm of the head is worth", ""]
    lines += [f"- {name}: {_inline(text)}" for name, text in about.items()]
    for head in dict.fromkeys(heads):
        lines += ["", f"## Target {head[0]}, {head[1]}", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(cells) + " |" for own, cells in zip(heads, table, strict=True) if own == head]
    lines += ["", "`*`: the interval leaves out 0.", "", "## Trainings that ended early", ""]
    lines += [f"- {_inline(line)}" for line in stopped] or ["None."]
    return "\n".join([*lines, "", "## What is not shown", "", *(f"- {line}" for line in gaps), ""])


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _plots(found: Sequence[Measured]) -> list[tuple[str, str]]:
    """Title and SVG: each quantity, per target, one line per mixture (the mean over its seeds)."""
    made = []
    for target in dict.fromkeys(measured.cell.target for measured in found):
        for key, split, label in _CURVES:
            series = []
            for colour, mixture in enumerate(MIXTURES):
                runs = [m.lines for m in found if m.cell.target == target and m.cell.mixture == mixture]
                points = _mean_curve(runs, key, split)
                if points:
                    series.append(Series(mixture, colour, points))
            if series:
                title = f"{target}: {label}"
                made.append((title, lines_plot(title, series, x="training step", y=label)))
    return made


def _mean_curve(runs: Sequence[Sequence[Line]], key: str, split: str) -> list[tuple[float, float | None]]:
    by_step: dict[int, list[float]] = defaultdict(list)
    for lines in runs:
        for line in lines:
            value: float | None = getattr(line, key)
            if line.split == split and value is not None:
                by_step[line.step].append(value)
    return [(float(step), mean(values)) for step, values in sorted(by_step.items())]


def _html(
    heads: Sequence[tuple[str, str]],
    table: Sequence[tuple[str, ...]],
    about: Mapping[str, str],
    stopped: Sequence[str],
    gaps: Sequence[str],
    plots: Sequence[tuple[str, str]],
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("norms.html.j2").render(
        about=about,
        columns=COLUMNS,
        tables=[
            (f"Target {head[0]}, {head[1]}", [cells for own, cells in zip(heads, table, strict=True) if own == head])
            for head in dict.fromkeys(heads)
        ],
        stopped=stopped,
        gaps=gaps,
        plots=[(escape(title), Markup(svg)) for title, svg in plots],  # matplotlib escapes its text
    )
