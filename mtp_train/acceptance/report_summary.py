"""The figures of a report, computed once from its data: the page, the Markdown and the terminal all show these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtp_train.acceptance.alike import engine_of, is_proof_alone, limit_of, prompts_of
from mtp_train.acceptance.interval import Interval, rates_and_length
from mtp_train.acceptance.report_data import Aim, Measurement, PromptSet, ReportData
from mtp_train.acceptance.report_pairs import MIN_PROMPTS, Comparison, LeftOut, pair
from mtp_train.acceptance.report_way import Way, way_of
from mtp_train.acceptance.tally import num_passes_without_drafts
from mtp_train.records import Acceptance, PromptAcceptance

# Bounds of context-length bins in prompt tokens: 0..127, 128..511, ...
CONTEXT_BOUNDS = (0, 128, 512, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One measurement's figures. Rates in 0..1 by position, length in tokens per verification, speeds in tokens per second."""

    measurement: Measurement
    rates: list[Interval]
    length: Interval
    tokens_per_s: float | None
    plain_tokens_per_s: float | None

    @property
    def head(self) -> str:
        return self.measurement.head

    @property
    def engine(self) -> str:
        """Who counted: engine, version and dtype."""
        return engine_of(self.measurement.acceptance)

    @property
    def speedup(self) -> float | None:
        """Tokens per second with drafts over without."""
        if self.tokens_per_s is None or self.plain_tokens_per_s is None:
            return None
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def num_passes_without_drafts(self) -> int:
        return num_passes_without_drafts(self.measurement.acceptance.prompts)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass of the target, the prefill and its token left out, passes without drafts counted."""
        prompts = self.measurement.acceptance.prompts
        num_passes = sum(prompt.num_drafts for prompt in prompts) + self.num_passes_without_drafts
        return sum(len(prompt.token_ids) - 1 for prompt in prompts) / num_passes


@dataclass(frozen=True, kw_only=True)
class Section:
    """All that was measured on the same prompts in one way, answers bounded alike: heads side by side, estimates beside them.

    ``proofs`` carry an identity. One that was made for that alone (another run of the same head by the same engine stands
    here) is no column of the table: it has fewer prompts or another dtype.
    """

    prompt_set: PromptSet
    way: Way
    measured: list[Figures]
    estimates: list[Figures]
    proofs: list[Figures]
    comparisons: list[Comparison]
    left_out: list[LeftOut]

    @property
    def num_prompts(self) -> int:
        return max(len(figures.measurement.acceptance.prompts) for figures in (*self.measured, *self.estimates))

    @property
    def max_new_tokens(self) -> int | None:
        return limit_of((self.measured or self.estimates)[0].measurement.acceptance)

    @property
    def size(self) -> str:
        """``80 prompts, at most 96 new tokens each``."""
        most = self.max_new_tokens
        return f"{self.num_prompts} prompt{'s' if self.num_prompts > 1 else ''}" + (
            "" if most is None else f", at most {most} new tokens each"
        )

    @property
    def few(self) -> bool:
        """Whether there are too few prompts to establish anything."""
        return self.num_prompts < MIN_PROMPTS

    @property
    def about(self) -> str:
        """The size, and with too few prompts what that means for each interval of the table."""
        return self.size + (f"; over fewer than {MIN_PROMPTS} prompts no interval establishes anything" if self.few else "")

    def estimate_of(self, head: str) -> Figures | None:
        return next((figures for figures in self.estimates if figures.head == head), None)


class Verdict(NamedTuple):
    """An aim and what came of it, measured on so many prompts; ``found`` None: not measured."""

    aim: Aim
    found: Interval | None
    num_prompts: int

    @property
    def reached(self) -> bool:
        return self.found is not None and self.found.value >= self.aim.at_least

    @property
    def established(self) -> bool:
        """Whether it is reached on prompts enough to say so."""
        return self.reached and self.num_prompts >= MIN_PROMPTS

    @property
    def text(self) -> str:
        what = {"first_position": "first-position rate", "acceptance_length": "acceptance length", "speedup": "speed-up"}[self.aim.quantity]
        start = f"{self.aim.head} on {self.aim.prompt_set}, {what}: aim {self.aim.at_least:.2f}; "
        if self.found is None:
            return start + "not measured: missed."
        few = f", over {self.num_prompts} prompts, of {MIN_PROMPTS} at least, which establish nothing"
        outcome = ("reached" if self.reached else "missed") + ("" if self.num_prompts >= MIN_PROMPTS else few)
        return start + f"measured {interval_text(self.found)}: {outcome}."


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a whole report; the first section is its headline."""

    sections: list[Section]
    verdicts: list[Verdict]


def summarise(data: ReportData) -> Summary:
    """Compute all figures, in the order of the data's prompt sets and heads; measurements without a draft are refused."""
    order = [head.name for head in data.heads]
    sections: list[Section] = []
    for prompt_set in data.prompt_sets:
        here = [item for item in data.measurements if item.prompt_set == prompt_set.name]
        for way in sorted({way_of(item.acceptance) for item in here}, key=lambda way: (way.temperature, way.decoding != "chain", way)):
            figures = [_figures(item) for item in here if way_of(item.acceptance) == way]
            figures.sort(key=lambda found: order.index(found.head))
            sections += _sections(prompt_set, way, figures)
    _hold_against_each_other(sections)
    return Summary(sections=sections, verdicts=[_judge(aim, sections) for aim in data.aims])


def _sections(prompt_set: PromptSet, way: Way, figures: Sequence[Figures]) -> list[Section]:
    """One for all that was measured on the same prompts with answers bounded alike; a head's estimate and proofs stand with its count."""
    decoded = [found for found in figures if not found.measurement.is_estimate]
    measured = [found for found in decoded if not is_proof_alone(found.measurement, [other.measurement for other in decoded])]
    shown = measured or [found for found in figures if found.measurement.is_estimate]
    tables: dict[object, list[Figures]] = {}
    place: dict[str, object] = {}
    for found in shown:
        acceptance = found.measurement.acceptance
        key = limit_of(acceptance), prompts_of(acceptance)
        tables.setdefault(key, []).append(found)
        place.setdefault(found.head, key)
    first = next(iter(tables))
    return [
        Section(
            prompt_set=prompt_set,
            way=way,
            measured=here if measured else [],
            estimates=[found for found in figures if found.measurement.is_estimate and place.get(found.head, first) == key],
            proofs=[found for found in decoded if found.measurement.identity is not None and place.get(found.head, first) == key],
            comparisons=[],
            left_out=[],
        )
        for key, here in tables.items()
    ]


def _figures(measurement: Measurement) -> Figures:
    acceptance = measurement.acceptance
    rates, length = rates_and_length(acceptance.prompts, acceptance.num_speculative_tokens)
    plain = measurement.plain.tokens_per_s if measurement.plain is not None else None
    return Figures(measurement=measurement, rates=rates, length=length, tokens_per_s=measurement.tokens_per_s, plain_tokens_per_s=plain)


def _hold_against_each_other(sections: Sequence[Section]) -> None:
    """Heads of one way, and schemes of one head, at one temperature: each section gets what parts it from itself and from those before."""
    for before, section in itertools.combinations_with_replacement(sections, 2):
        if before.prompt_set != section.prompt_set or before.way.temperature != section.way.temperature:
            continue
        heads = before.way == section.way
        if not heads and before.way.drafted == section.way.drafted:
            continue
        pairs: Iterable[tuple[Figures, Figures]] = itertools.product(section.measured, before.measured)
        if heads:
            pairs = itertools.product(before.measured, section.measured)
        if before is section:
            pairs = itertools.combinations(section.measured, 2)
        found = []
        for first, second in pairs:
            if (first.head == second.head) == heads:
                continue
            names = (first.head, second.head) if heads else (f"{first.head}, {section.way.drafted}", f"{second.head}, {before.way.drafted}")
            positions = max(section.way.num_speculative_tokens, before.way.num_speculative_tokens)
            found.append(pair(first.measurement, second.measurement, names=names, num_positions=positions))
        section.comparisons.extend(item for item in found if isinstance(item, Comparison))
        told = {(item.first, item.second) for item in section.comparisons}
        section.left_out.extend(item for item in found if isinstance(item, LeftOut) and (item.first, item.second) not in told)


def _judge(aim: Aim, sections: Sequence[Section]) -> Verdict:
    """An aim speaks of greedy decoding, as measured (never of the estimate)."""
    for section in sections:
        if section.prompt_set.name != aim.prompt_set or section.way.temperature != 0:
            continue
        for figures in section.measured:
            if figures.head == aim.head:
                ratio = figures.speedup
                speed = None if ratio is None else Interval(ratio, None, None)
                values = {"first_position": figures.rates[0], "acceptance_length": figures.length, "speedup": speed}
                return Verdict(aim, values[aim.quantity], len(figures.measurement.acceptance.prompts))
    return Verdict(aim, None, 0)


class Group(NamedTuple):
    """One bar of a plot by category or context length."""

    label: str
    num_prompts: int
    rates: list[Interval]
    length: Interval


def by_category(acceptance: Acceptance) -> list[Group]:
    """Acceptance per category, in alphabetical order; categories in which nothing was drafted are left out."""
    return _grouped(acceptance, sorted({prompt.category for prompt in acceptance.prompts}), lambda prompt: prompt.category)


def by_context(acceptance: Acceptance) -> list[Group]:
    """Acceptance per bin of prompt length, from short to long; empty bins are left out."""
    labels = [f"{low}–{high - 1}" for low, high in itertools.pairwise(CONTEXT_BOUNDS)] + [f"{CONTEXT_BOUNDS[-1]}+"]

    def label(prompt: PromptAcceptance) -> str:
        return labels[sum(prompt.num_prompt_tokens >= bound for bound in CONTEXT_BOUNDS) - 1]

    return _grouped(acceptance, labels, label)


def _grouped(acceptance: Acceptance, labels: Sequence[str], label_of: Callable[[PromptAcceptance], str]) -> list[Group]:
    found = []
    for label in labels:
        prompts = [prompt for prompt in acceptance.prompts if label_of(prompt) == label]
        if any(prompt.num_drafts for prompt in prompts):
            found.append(Group(label, len(prompts), *rates_and_length(prompts, acceptance.num_speculative_tokens)))
    return found


def interval_text(found: Interval, *, digits: int = 2, signed: bool = False) -> str:
    """``0.29 [0.27, 0.31]``; without the brackets where there is no interval."""
    sign = "+" if signed else ""
    if found.low is None or found.high is None:
        return f"{found.value:{sign}.{digits}f}"
    return f"{found.value:{sign}.{digits}f} [{found.low:{sign}.{digits}f}, {found.high:{sign}.{digits}f}]"


def comparison_text(comparison: Comparison) -> str:
    """In words whether one head is better than the other at the first position and in length."""

    def say(what: str, difference: Interval, digits: int) -> str:
        if difference.low is None:
            state = "one prompt alone establishes nothing"
        elif comparison.num_prompts < MIN_PROMPTS:
            state = f"so few prompts ({comparison.num_prompts}, of {MIN_PROMPTS} at least) establish nothing"
        elif difference.established:
            state = "established (the interval leaves out 0)"
        else:
            state = "not established (the interval holds 0)"
        return f"{what} {interval_text(difference, digits=digits, signed=True)}: {state}"

    return (
        f"{comparison.first} less {comparison.second}, paired over the same prompts: "
        f"{say('first position', comparison.rates[0], 3)}; {say('acceptance length', comparison.length, 3)}."
    )


def must_hold(figures: Figures) -> bool:
    """Whether texts may differ at ties only: in float32. Coarser numbers choose otherwise between near tokens by their rounding alone."""
    return figures.measurement.acceptance.dtype == "float32"


def identity_text(figures: Figures) -> str | None:
    """In words whether greedy speculation wrote what plain decoding writes; None where it was not compared."""
    identity = figures.measurement.identity
    if identity is None:
        return None
    start = (
        f"{figures.head}: token for token the same as plain greedy decoding on {identity.num_identical} of {identity.num_prompts} prompts "
        f"({identity.num_tokens} tokens compared, {figures.engine})"
    )
    if not identity.differences:
        return start + "."
    ties = sum(difference.is_tie for difference in identity.differences)
    others = len(identity.differences) - ties
    if identity.holds:
        return start + f"; at the first difference of the other {ties}, the target's two best logits tie."
    said = f"; of the first differences, {ties} are ties of the target's two best logits, and {others} are not"
    if must_hold(figures):
        return start + said + "."
    widest = max(difference.logit_gap for difference in identity.differences)
    dtype = figures.measurement.acceptance.dtype
    return (
        start + said + f" (largest gap {widest:.2g}): {dtype} rounds otherwise in other batch shapes; float32 is where texts must not part."
    )
