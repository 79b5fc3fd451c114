"""The part of a report on where drafts stop being taken: temperature, free writing, and which way of drafting falls how far."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from mtp_train.acceptance.alike import prompts_of
from mtp_train.acceptance.interval import Interval, paired_difference, rates_and_length
from mtp_train.acceptance.report_costs import NONE, Rows
from mtp_train.acceptance.report_summary import Figures, Section, Summary, interval_text
from mtp_train.records import PromptAcceptance

# Categories of prompts that ask for free writing, in the project's sets as in MT-Bench.
CREATIVE = ("writing", "roleplay")


class Limits(NamedTuple):
    """One head with one scheme on one prompt set, by one engine, at every temperature that was measured."""

    label: str
    table: Rows
    said: list[str]


class _Key(NamedTuple):
    prompt_set: str
    head: str
    drafted: str
    engine: str


def limits(summary: Summary) -> list[Limits]:
    """All that was measured at more than one temperature, sampling of drafts beside sampling of drafts."""
    grouped: dict[_Key, list[tuple[Section, Figures]]] = {}
    for section in summary.sections:
        for figures in section.measured:
            key = _Key(section.prompt_set.label, figures.head, section.way.drafted, figures.engine)
            grouped.setdefault(key, []).append((section, figures))
    return [_limits(key, found) for key, found in grouped.items() if len({section.way.temperature for section, _ in found}) > 1]


def _limits(key: _Key, found: Sequence[tuple[Section, Figures]]) -> Limits:
    columns = ["temperature, drafts", "prompts", "number", "first position", "acceptance length", "with / without drafts"]
    rows: list[list[str]] = []
    for section, figures in found:
        for kind, prompts in _kinds(figures.measurement.acceptance.prompts).items():
            if not any(prompt.num_drafts for prompt in prompts):
                continue
            rates, length = rates_and_length(prompts, section.way.num_speculative_tokens)
            speed = f"{figures.speedup:.2f}×" if kind == "all" and figures.speedup is not None else NONE
            rows.append([_way(section), kind, str(len(prompts)), interval_text(rates[0], digits=3), interval_text(length), speed])
    table = Rows(f"{key.head} on {key.prompt_set}", columns, rows)
    return Limits(f"{key.head} on {key.prompt_set}: {key.drafted} ({key.engine})", table, [*_falls(found), *_slower(key, found)])


def _kinds(prompts: Sequence[PromptAcceptance]) -> dict[str, list[PromptAcceptance]]:
    """All prompts; and those that ask for free writing and the others apart, where there are both."""
    creative = [prompt for prompt in prompts if prompt.category in CREATIVE]
    others = [prompt for prompt in prompts if prompt.category not in CREATIVE]
    return {"all": list(prompts)} | ({f"free writing ({', '.join(CREATIVE)})": creative, "others": others} if creative and others else {})


def _way(section: Section) -> str:
    return f"{section.way.temperature:g}, {section.way.draft_sampling}"


def _falls(found: Sequence[tuple[Section, Figures]]) -> list[str]:
    """What each way of drafting loses from its lowest temperature to each higher one, and what parts the two at one temperature,
    over the same prompts drawn together."""
    said = []
    ordered = sorted(found, key=lambda pair: (pair[0].way.draft_sampling, pair[0].way.temperature))
    for (before, first), (after, second) in itertools.combinations(ordered, 2):
        same_drafts = before.way.draft_sampling == after.way.draft_sampling
        lowest = before.way.temperature == min(s.way.temperature for s, _ in found if s.way.draft_sampling == before.way.draft_sampling)
        if same_drafts and lowest and before.way.temperature < after.way.temperature:
            start = f"{after.way.draft_sampling} drafts, temperature {after.way.temperature:g} less {before.way.temperature:g}"
        elif not same_drafts and before.way.temperature == after.way.temperature:
            start = f"temperature {after.way.temperature:g}, {after.way.draft_sampling} less {before.way.draft_sampling} drafts"
        else:
            continue
        counts = second.measurement.acceptance, first.measurement.acceptance
        if before.max_new_tokens != after.max_new_tokens or prompts_of(counts[0]) != prompts_of(counts[1]):
            said.append(f"{start}: left out, since they were not measured alike: {after.size} and {before.size}.")
            continue
        prompts = counts[0].prompts, counts[1].prompts
        rates, length = paired_difference(*prompts, after.way.num_speculative_tokens)
        said.append(f"{start}: first position {_difference(rates[0])}, acceptance length {_difference(length)}.")
    return said


def _slower(key: _Key, found: Sequence[tuple[Section, Figures]]) -> list[str]:
    slow = [
        f"{_way(section)} ({figures.speedup:.2f}×)" for section, figures in found if figures.speedup is not None and figures.speedup < 1
    ]
    return [f"{key.head} was slower than plain decoding at temperature " + "; ".join(slow) + "."] if slow else []


def _difference(found: Interval) -> str:
    return interval_text(found, digits=3, signed=True)
