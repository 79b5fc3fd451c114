"""Brings the reports of several runs together as one, for heads that were measured on the same prompts of one target."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mtp_train.acceptance.alike import counted, limit_of, prompts_of, unlike
from mtp_train.acceptance.report_data import Measurement, PromptSet, ReportData
from mtp_train.acceptance.report_way import Way, way_of

_IDENTITY = "fingerprint"  # the key of a report's target that says which weights it has


class _Basis(NamedTuple):
    """What a measurement was made over: prompts, by ids and lengths, and the most tokens that an answer could have."""

    prompts: frozenset[tuple[str, int]]
    most: int | None

    def text(self, of: str = "") -> str:
        """``80 prompts of gsm8k, at most 96 new tokens each``."""
        size = f"{len(self.prompts)} prompt{'' if len(self.prompts) == 1 else 's'}{of and f' of {of}'}"
        return size if self.most is None else f"{size}, at most {self.most} new tokens each"

    def alike(self, other: _Basis) -> bool:
        """Whether both can stand in one table; a limit that is not stated forbids nothing."""
        return self.prompts == other.prompts and (None in (self.most, other.most) or self.most == other.most)


def merge_reports(reports: Mapping[str, ReportData]) -> ReportData:
    """One report of all heads, by the runs' names. Heads that several runs call alike get the run's name in front.

    Only what all runs measured stays: prompt sets, and of each the same prompts with answers bounded alike; the notes name the rest.
    A certificate speaks about one run's heads and stays there; so do aims.
    Errors: ValueError where the target is not the same, where nothing stays, or where a set's prompts of one id are not of one length.
    """
    if len(reports) < 2:
        raise ValueError(f"comparison: expected the reports of two runs or more, found {len(reports)}")
    _check_target(reports)
    sets = _shared_sets(reports)
    shared, unshared = _shared_prompts(reports, sets)
    parted = {run: _parted(data, shared) for run, data in reports.items()}
    left_out = [f"{name}, of which the runs share nothing: {found}" for name, found in unshared.items()]
    left_out += [text for run, (_, odd) in parted.items() for text in _left_out(run, odd, shared)]
    renamed = [_renamed(run, data, reports) for run, (data, _) in parted.items()]
    heads = tuple(head for data in renamed for head in data.heads)
    measurements = tuple(item for data in renamed for item in data.measurements)
    first = renamed[0]
    return ReportData(
        title=f"Comparison of {', '.join(head.name for head in heads)} on {first.target['name']}",
        target=first.target,
        heads=heads,
        prompt_sets=tuple(prompt_set for prompt_set in sets if prompt_set.name in shared),
        measurements=measurements,
        answers=tuple(item for data in renamed for item in data.answers),
        aims=(),
        provenance={f"{run}: {stage}": stated for run, data in reports.items() for stage, stated in data.provenance.items()},
        notes=(
            *(f"Left out: {text}." for text in left_out),
            *unlike(measurements),
            *_unlike_in_speed(measurements),
            *(note for data in renamed for note in data.notes),
        ),
        costs=tuple(table for data in renamed for table in data.costs),
    )


def _check_target(reports: Mapping[str, ReportData]) -> None:
    stated = {run: (data.target.get("name"), data.target.get(_IDENTITY)) for run, data in reports.items()}
    (first, (name, expected)), *others = stated.items()
    for run, (other, found) in others:
        if found != expected or expected is None:
            raise ValueError(
                f"comparison: expected reports on one target, found {name} (fingerprint {str(expected)[:16]}) in {first} and {other} "
                f"({str(found)[:16]}) in {run}; their figures say nothing about each other"
            )


def _shared_sets(reports: Mapping[str, ReportData]) -> tuple[PromptSet, ...]:
    by_run = {run: {prompt_set.name for prompt_set in data.prompt_sets} for run, data in reports.items()}
    shared = set.intersection(*by_run.values())
    if not shared:
        raise ValueError(
            "comparison: expected a prompt set that all runs were measured on, found "
            + "; ".join(f"{run}: {', '.join(sorted(names))}" for run, names in by_run.items())
            + "; evaluate them on the same"
        )
    first = next(iter(reports.values()))
    return tuple(prompt_set for prompt_set in first.prompt_sets if prompt_set.name in shared)


def _shared_prompts(reports: Mapping[str, ReportData], sets: Sequence[PromptSet]) -> tuple[dict[str, list[_Basis]], dict[str, str]]:
    """What all runs measured of each prompt set, and what each measured of the sets of which that is nothing."""
    shared: dict[str, list[_Basis]] = {}
    unshared: dict[str, str] = {}
    for prompt_set in sets:
        items = {run: [item for item in counted(data.measurements) if item.prompt_set == prompt_set.name] for run, data in reports.items()}
        by_run = {run: list(dict.fromkeys(map(_basis_of, found))) for run, found in items.items() if found}
        _check_texts(prompt_set.name, by_run)
        found = [
            basis
            for basis in dict.fromkeys(itertools.chain.from_iterable(by_run.values()))
            if all(any(basis.alike(other) for other in others) for others in by_run.values())
        ]
        if all(set(found) & set(others) for others in by_run.values()):
            shared[prompt_set.name] = found
        else:
            labels = {run: next(known.label for known in reports[run].prompt_sets if known.name == prompt_set.name) for run in by_run}
            unshared[prompt_set.name] = _nothing_shared(by_run, labels)
    if not shared:
        raise ValueError(
            "comparison: expected the same prompts of a set in all runs, with answers of the same length at most, found "
            + "; ".join(f"{name}: {found}" for name, found in unshared.items())
            + "; evaluate them with the same limit, max_new_tokens and prompts"
        )
    return shared, unshared


def _basis_of(item: Measurement) -> _Basis:
    return _Basis(prompts_of(item.acceptance), limit_of(item.acceptance))


def _check_texts(name: str, by_run: Mapping[str, Sequence[_Basis]]) -> None:
    """A prompt of one id is as long wherever it was measured."""
    seen: dict[str, tuple[int, str]] = {}
    for run, bases in by_run.items():
        for prompt_id, length in sorted(itertools.chain.from_iterable(basis.prompts for basis in bases)):
            before, where = seen.setdefault(prompt_id, (length, run))
            if length != before:
                raise ValueError(
                    f"comparison: {name}: expected the same texts in all runs, found {prompt_id} of {before} tokens in {where} and of "
                    f"{length} in {run}; evaluate both with the same tokenizer and prompts"
                )


def _nothing_shared(by_run: Mapping[str, Sequence[_Basis]], labels: Mapping[str, str]) -> str:
    found = "; ".join(f"{' and '.join(basis.text() for basis in bases)} ({labels[run]}) in {run}" for run, bases in by_run.items())
    prompts = [frozenset[tuple[str, int]]().union(*(basis.prompts for basis in bases)) for bases in by_run.values()]
    odd = prompts[0].union(*prompts) - prompts[0].intersection(*prompts)
    return found + (f"; {len(odd)} of them not in all, such as {min(odd)[0]}" if odd else "")


def _parted(data: ReportData, shared: Mapping[str, Sequence[_Basis]]) -> tuple[ReportData, list[Measurement]]:
    """The report of what all runs measured, a head's estimates and proofs with its count, and the counts of anything else."""
    here = [item for item in data.measurements if item.prompt_set in shared]
    counts = list(counted(here))
    odd = [item for item in counts if _basis_of(item) not in shared[item.prompt_set]]

    def stays(item: Measurement) -> bool:
        beside = [other for other in counts if _place(other) == _place(item)]
        if not item.is_estimate:
            beside = [other for other in beside if other.acceptance.measured_by == item.acceptance.measured_by]
        return item not in odd and (not beside or any(other not in odd for other in beside))

    kept = [item for item in here if stays(item)]
    gone = {item.head for item in odd} - {item.head for item in kept}
    prompts = {(item.head, item.prompt_set, prompt.prompt_id) for item in kept for prompt in item.acceptance.prompts}
    return dataclasses.replace(
        data,
        heads=tuple(head for head in data.heads if head.name not in gone),
        measurements=tuple(kept),
        answers=tuple(item for item in data.answers if (item.head, item.prompt_set, item.prompt_id) in prompts),
        aims=(),
    ), odd


def _place(item: Measurement) -> tuple[str, str, Way]:
    return item.head, item.prompt_set, way_of(item.acceptance)


def _left_out(run: str, odd: Sequence[Measurement], shared: Mapping[str, Sequence[_Basis]]) -> Iterator[str]:
    """What of a run is left out, a sentence for all that was measured over the same."""
    found: dict[tuple[str, _Basis], list[str]] = {}
    for item in odd:
        found.setdefault((item.prompt_set, _basis_of(item)), []).append(f"{item.head}, {way_of(item.acceptance).drafted}")
    for (name, basis), heads in found.items():
        others = " and ".join(other.text() for other in shared[name])
        yield f"{run}: {'; '.join(dict.fromkeys(heads))}: {basis.text(name)}, where all runs share {others}"


def _renamed(run: str, data: ReportData, reports: Mapping[str, ReportData]) -> ReportData:
    """The run's report with names that no other run's heads have."""
    others = {head.name for other, found in reports.items() if other != run for head in found.heads}
    names = {head.name: f"{run}: {head.name}" if head.name in others else head.name for head in data.heads}
    return dataclasses.replace(
        data,
        heads=tuple(dataclasses.replace(head, name=names[head.name]) for head in data.heads),
        measurements=tuple(dataclasses.replace(item, head=names[item.head]) for item in data.measurements),
        answers=tuple(dataclasses.replace(item, head=names[item.head]) for item in data.answers),
        aims=(),
        costs=tuple(
            table if table.head is None else dataclasses.replace(table, head=names.get(table.head, f"{run}: {table.head}"))
            for table in data.costs
        ),
    )


def _unlike_in_speed(measurements: Sequence[Measurement]) -> Iterator[str]:
    """A sentence where speeds were taken with other numbers of sequences at once, which does not change what is accepted."""
    found: dict[str, set[str]] = {}
    for item in measurements:
        if item.plain is not None and item.identity is None:
            found.setdefault(str(item.acceptance.notes.get("batch_size")), set()).add(item.head)
    if len(found) > 1:
        said = "; ".join(f"{batch}: {', '.join(sorted(heads))}" for batch, heads in sorted(found.items()))
        yield f"Speeds were taken with different numbers of sequences at once and cannot be compared; batch_size {said}."
