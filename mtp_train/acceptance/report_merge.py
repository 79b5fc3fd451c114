"""Brings the reports of several runs together as one, for heads that were measured on the same prompts of one target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from mtp_train.acceptance.alike import counted, limit_of, prompts_of, unlike
from mtp_train.acceptance.report_data import Measurement, PromptSet, ReportData

_IDENTITY = "fingerprint"  # the key of a report's target that says which weights it has


def merge_reports(reports: Mapping[str, ReportData]) -> ReportData:
    """One report of all heads, by the runs' names. Heads that several runs call alike get the run's name in front.

    Only prompt sets that all runs measured stay. A certificate speaks about one run's heads and stays there; so do aims.
    Errors: ValueError where the target is not the same, where no prompt set is in all of them, or where one has other prompts
    or another bound of answers.
    """
    if len(reports) < 2:
        raise ValueError(f"comparison: expected the reports of two runs or more, found {len(reports)}")
    _check_target(reports)
    sets = _shared_sets(reports)
    _check_prompts(reports, sets)
    renamed = [_renamed(run, data, reports) for run, data in reports.items()]
    heads = tuple(head for data in renamed for head in data.heads)
    kept = {prompt_set.name for prompt_set in sets}
    measurements = tuple(item for data in renamed for item in data.measurements if item.prompt_set in kept)
    first = renamed[0]
    return ReportData(
        title=f"Comparison of {', '.join(head.name for head in heads)} on {first.target['name']}",
        target=first.target,
        heads=heads,
        prompt_sets=sets,
        measurements=measurements,
        answers=tuple(item for data in renamed for item in data.answers if item.prompt_set in kept),
        aims=(),
        provenance={f"{run}: {stage}": stated for run, data in reports.items() for stage, stated in data.provenance.items()},
        notes=(*unlike(measurements), *_unlike_in_speed(measurements), *(note for data in renamed for note in data.notes)),
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


def _check_prompts(reports: Mapping[str, ReportData], sets: Sequence[PromptSet]) -> None:
    """Each prompt set, as measured to count, holds the same prompts of the same lengths in all runs, answered up to the same limit."""
    labels = {run: {prompt_set.name: prompt_set.label for prompt_set in data.prompt_sets} for run, data in reports.items()}
    for prompt_set in sets:
        seen: tuple[str, Measurement] | None = None
        for run, data in reports.items():
            for item in counted(data.measurements):
                if item.prompt_set != prompt_set.name:
                    continue
                if seen is None:
                    seen = run, item
                before = seen[1].acceptance
                mine, theirs = prompts_of(before), prompts_of(item.acceptance)
                if mine != theirs:
                    odd, length = min(mine ^ theirs)
                    raise ValueError(
                        f"comparison: {prompt_set.name}: expected the same prompts in all runs, found {len(mine)} "
                        f"({labels[seen[0]][prompt_set.name]}) in {seen[0]} and {len(theirs)} ({labels[run][prompt_set.name]}) in {run}, "
                        f"{len(mine ^ theirs)} of them in one only, such as {odd} of {length} tokens; "
                        "evaluate both with the same limit, tokenizer and prompts"
                    )
                limits = limit_of(before), limit_of(item.acceptance)
                if None not in limits and limits[0] != limits[1]:
                    raise ValueError(
                        f"comparison: {prompt_set.name}: expected answers of the same length at most in all runs, found max_new_tokens "
                        f"{limits[0]} ({seen[1].head}, {seen[0]}) and {limits[1]} ({item.head}, {run}); "
                        "evaluate both with the same max_new_tokens"
                    )


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
