"""Counts, by reason, of the rows that were left out and of those that were changed on the way in, with first examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_train import runtime

# Enough to see what is wrong with a data set; all of them would repeat a broken file into its own report.
NUM_EXAMPLES = 3
_MAX_WHY_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Why one row or sample is not used: a ``reason`` to count by (one word) and ``why`` in full, for this row."""

    reason: str
    why: str


class RowFault(ValueError):
    """A row that cannot be used; carries the :class:`Skip` that it is counted as."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(f"{reason}: {why}")
        self.skip = Skip(reason=reason, why=why)


@dataclass(kw_only=True)
class Tally:
    """How often one reason occurred, and the first few rows it occurred in."""

    count: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class SkipCounts:
    """What became of every row: ``num_rows`` read, ``num_kept`` kept, the rest ``skipped`` by reason.

    ``notes`` counts what was changed or left out inside rows that were kept (a leading answer dropped, a thinking block
    that the template doesn't render). Rows are numbered from 1, as an editor numbers lines. ``sources`` says where the
    rows came from: name, source, revision, licence, and what a source made at run time states of itself.
    """

    num_rows: int = 0
    num_kept: int = 0
    skipped: dict[str, Tally] = field(default_factory=dict)
    notes: dict[str, Tally] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_skipped(self) -> int:
        return sum(tally.count for tally in self.skipped.values())

    @property
    def has_more(self) -> bool:
        """Whether there are more than the first of each reason, which ``summary`` shows."""
        return any(tally.count > 1 for tally in (*self.skipped.values(), *self.notes.values()))

    def skip(self, skip: Skip, *, row: int | str) -> None:
        """Count a row that is left out; ``row`` is its number, or the prompt id where no number is known any more."""
        _count(self.skipped, skip, row)

    def note(self, note: Skip, *, row: int | str) -> None:
        """Count a change to a row that is kept."""
        _count(self.notes, note, row)

    def as_dict(self) -> dict[str, Any]:
        """The counts as they stand in ``skips.json``."""
        return {
            "sources": self.sources,
            "num_rows": self.num_rows,
            "num_kept": self.num_kept,
            "num_skipped": self.num_skipped,
            "skipped": {reason: {"count": t.count, "examples": t.examples} for reason, t in sorted(self.skipped.items())},
            "notes": {reason: {"count": t.count, "examples": t.examples} for reason, t in sorted(self.notes.items())},
        }

    def write(self, path: Path) -> None:
        """Write the counts beside the output they speak about."""
        runtime.atomic_write_json(path, self.as_dict())

    def summary(self) -> str:
        """One line for the terminal and for errors."""
        parts = [f"{self.num_kept} of {self.num_rows} rows kept"]
        parts += [
            f"skipped {t.count} {reason} (first: row {t.examples[0]['row']}: {t.examples[0]['why']})" for reason, t in self.skipped.items()
        ]
        parts += [
            f"noted {t.count} {reason} (first: row {t.examples[0]['row']}: {t.examples[0]['why']})" for reason, t in self.notes.items()
        ]
        return "; ".join(parts)


def _count(tallies: dict[str, Tally], skip: Skip, row: int | str) -> None:
    tally = tallies.setdefault(skip.reason, Tally())
    tally.count += 1
    if len(tally.examples) < NUM_EXAMPLES:
        # Escaped: what is wrong with a row may be the very character that could not be written to a file.
        why = skip.why.encode("utf-8", "backslashreplace").decode("utf-8")
        tally.examples.append({"row": row, "why": why[:_MAX_WHY_CHARS]})
