"""What decoding costs in one engine on one machine: seconds of a verifying pass and of drafting, by batch size, from a table."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mtp_train.acceptance.speedup import Costs
from mtp_train.runtime import SEAL, atomic_write_json, check_seal, read_object, seal
from mtp_train.typed import fit

FOLDER = "costs"  # of tables, in a report's folder
_REMEDY = "delete it, and run tools/measure_costs.py again"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One cell: the median of ``num_repeats`` and their quartiles, in seconds. ``num_tokens`` is what the target reads for each
    of ``batch_size`` sequences, or what a head drafts for each."""

    batch_size: int
    num_tokens: int
    seconds: float
    low_s: float
    high_s: float
    num_repeats: int


def timing(batch_size: int, num_tokens: int, seconds: Sequence[float], *, less: float = 0.0) -> Timing:
    """A cell from its repeats, ``less`` taken off each (what is timed on top of something else, and never below 0)."""
    low, middle, high = (max(0.0, value - less) for value in statistics.quantiles(seconds, n=4, method="inclusive"))
    return Timing(batch_size=batch_size, num_tokens=num_tokens, seconds=middle, low_s=low, high_s=high, num_repeats=len(seconds))


def _seconds(cell: Timing) -> float:
    return cell.seconds


def _half_width(cell: Timing) -> float:
    """Half of the 95% interval of a cell's median, seconds (the notch of a box plot: McGill, Tukey and Larsen 1978)."""
    return 1.57 * (cell.high_s - cell.low_s) / math.sqrt(cell.num_repeats)


class Shape(NamedTuple):
    """What one step of a scheme runs: forwards of the head, each over ``width`` rows of a sequence, and then the target over
    ``num_verified`` tokens of it, its last one included."""

    num_draft_steps: int
    width: int
    num_verified: int


def chain_shape(num_speculative_tokens: int) -> Shape:
    """That of a chain of K tokens from a head."""
    return Shape(num_speculative_tokens, 1, num_speculative_tokens + 1)


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """``verify``: a forward of the target with its lm_head and the exact rule, over a grid of batch sizes and tokens per sequence, 1
    (plain decoding) among them. ``drafting``: all that comes on top of it when K tokens are drafted, at two K or more per batch
    size; empty without a head. ``source``: ``measured``, or ``modelled`` from a machine's rates. ``context_tokens`` each
    sequence held. Between cells values are interpolated, beyond them nothing is said."""

    source: Literal["measured", "modelled"]
    engine: str
    engine_version: str
    dtype: str
    device: str
    target_name: str
    target_fingerprint: str
    head: str | None
    context_tokens: int
    verify: tuple[Timing, ...]
    drafting: tuple[Timing, ...]
    notes: dict[str, Any]

    def __post_init__(self) -> None:
        for name, cells in (("verify", self.verify), ("drafting", self.drafting)):
            found = [(cell.batch_size, cell.num_tokens) for cell in cells]
            expected = [(batch, tokens) for batch in _axis(cells, "batch_size") for tokens in _axis(cells, "num_tokens")]
            if sorted(found) != expected:
                raise ValueError(f"costs: {name}: expected each batch size with each number of tokens once, found {found}")
            if any(not (cell.seconds > 0 or (cell.seconds == 0 and name == "drafting")) for cell in cells):
                raise ValueError(f"costs: {name}: expected times above 0, found {[cell.seconds for cell in cells]}")
            if any(not (0 <= cell.low_s <= cell.seconds <= cell.high_s < math.inf and cell.num_repeats > 0) for cell in cells):
                raise ValueError(f"costs: {name}: expected medians between their quartiles, found {cells}")
        if 1 not in self.verified_tokens:
            raise ValueError(f"costs: verify: expected plain decoding (num_tokens 1) among the cells, found {self.verified_tokens}")
        if self.drafting and len(_axis(self.drafting, "num_tokens")) < 2:
            raise ValueError("costs: drafting: expected two draft lengths or more, to part a step's cost from what comes once, found one")

    @property
    def batch_sizes(self) -> list[int]:
        return _axis(self.verify, "batch_size")

    @property
    def verified_tokens(self) -> list[int]:
        return _axis(self.verify, "num_tokens")

    @property
    def longest(self) -> int:
        """The longest chain whose verification is within the grid."""
        return self.verified_tokens[-1] - 1

    @property
    def head_sha256(self) -> str | None:
        """The hash of the weights of the head that was timed; None where it is not stated."""
        found = self.notes.get("head_sha256")
        return found if isinstance(found, str) else None

    @property
    def label(self) -> str:
        """Who was timed, where: for tables and captions."""
        head = "" if self.head is None else f", head {self.head}"
        where = f"{self.engine} ({self.engine_version}, {self.dtype}) on {self.device}{head}"
        return f"{where}, {self.context_tokens} tokens of context, {self.source}"

    def verify_s(self, batch_size: float, num_tokens: float) -> float:
        """Seconds of a pass over ``num_tokens`` of each of ``batch_size`` sequences. ValueError beyond the grid."""
        return self._at(self.verify, batch_size, num_tokens)

    def draft_step_s(self, batch_size: float) -> float:
        """Seconds of one more forward of the head over a row per sequence: the slope over K. ValueError beyond the grid."""
        return self._drafting(batch_size)[0]

    def costs(self, batch_size: float, shape: Shape) -> Costs:
        """What a step costs at this batch size. A head that reads several rows of a sequence costs what as many sequences would.

        Errors: ValueError where that lies beyond the grid, or a head is asked for that was not timed.
        """
        draft_step = overhead = 0.0
        if shape.num_draft_steps:
            draft_step, overhead = self.draft_step_s(batch_size * shape.width), self._drafting(batch_size)[1]
        verify = self.verify_s(batch_size, shape.num_verified)
        return Costs(plain=self.verify_s(batch_size, 1), draft_step=draft_step, verify=verify, overhead=overhead)

    def _drafting(self, batch_size: float) -> tuple[float, float]:
        """A step's cost, and what comes once beside it; neither is below 0, however noisy the cells."""
        if not self.drafting:
            raise ValueError(f"costs: expected the times of a head, found {self.label}, without one")
        lengths = _axis(self.drafting, "num_tokens")
        first, last = (self._at(self.drafting, batch_size, length) for length in (lengths[0], lengths[-1]))
        step = max(0.0, (last - first) / (lengths[-1] - lengths[0]))
        return step, max(0.0, first - lengths[0] * step)

    def unsureness(self, batch_size: float, shape: Shape) -> float:
        """Half the width of the 95% interval of a step's time over a plain pass', as a share of it: how sure the medians are by the
        quartiles that they were timed with."""
        step = self.costs(batch_size, shape)
        seconds = step.verify + step.overhead + shape.num_draft_steps * step.draft_step
        errors = [self._at(self.verify, batch_size, 1, _half_width) / step.plain]
        errors.append(self._at(self.verify, batch_size, shape.num_verified, _half_width) / seconds)
        if shape.num_draft_steps:
            lengths, rows = _axis(self.drafting, "num_tokens"), batch_size * shape.width
            if lengths[0] <= shape.num_draft_steps <= lengths[-1]:
                errors.append(self._at(self.drafting, rows, shape.num_draft_steps, _half_width) / seconds)
            else:  # on the line through the two ends: the further away, the more each of them moves it
                part = (shape.num_draft_steps - lengths[0]) / (lengths[-1] - lengths[0])
                ends = (self._at(self.drafting, rows, length, _half_width) / seconds for length in (lengths[0], lengths[-1]))
                errors += [weight * end for weight, end in zip((1 - part, part), ends, strict=True)]
        return math.hypot(*errors)

    def _at(self, cells: Sequence[Timing], batch_size: float, num_tokens: float, of: Callable[[Timing], float] = _seconds) -> float:
        by_place = {(cell.batch_size, cell.num_tokens): of(cell) for cell in cells}
        batches, tokens = _axis(cells, "batch_size"), _axis(cells, "num_tokens")
        (low, high, share), (few, many, part) = (
            _between(batches, batch_size, "batch sizes", flag="--batch-sizes"),
            _between(tokens, num_tokens, "tokens per sequence", flag="--num-tokens"),
        )
        rows = [by_place[batch, few] * (1 - part) + by_place[batch, many] * part for batch in (low, high)]
        return rows[0] * (1 - share) + rows[1] * share


def _axis(cells: Sequence[Timing], name: Literal["batch_size", "num_tokens"]) -> list[int]:
    return sorted({getattr(cell, name) for cell in cells})


class NotTimed(ValueError):
    """What is asked for lies beyond the cells; ``words`` have tools/measure_costs.py time it too."""

    def __init__(self, message: str, *, words: Sequence[str]) -> None:
        super().__init__(message)
        self.words = tuple(words)


def _between(axis: Sequence[int], value: float, what: str, *, flag: str) -> tuple[int, int, float]:
    """The neighbours of a value on an axis, and how far it lies from the first to the second. NotTimed beyond its ends, with the
    ``flag`` that widens it."""
    if not axis[0] <= value <= axis[-1]:
        raise NotTimed(
            f"costs: expected {what} from {axis[0]} to {axis[-1]}, which were timed, found {value:g}; measure more of them",
            words=[flag, *map(str, sorted({*axis, math.ceil(value)}))],
        )
    index = min(bisect.bisect_right(axis, value), len(axis) - 1)
    low, high = axis[max(index - 1, 0)], axis[index]
    return low, high, 0.0 if low == high else (value - low) / (high - low)


def write_costs(table: CostTable, out: Path) -> Path:
    """Keep a table in a report's folder, where ``evaluate`` and ``advise`` find it; that of the same engine and head is replaced."""
    path = out / FOLDER / f"{table.engine}.{table.head or 'target'}.json"
    document = {"costs": asdict(table)}
    atomic_write_json(path, {**document, SEAL: seal(document)})
    return path


def read_costs(out: Path) -> tuple[CostTable, ...]:
    """The tables kept in a report's folder, in the order of their names. ValueError for one that is damaged."""
    found = []
    for path in sorted((out / FOLDER).glob("*.json")):
        document = read_object(path, {"costs": dict}, remedy=_REMEDY)
        check_seal(document, where=path, remedy=_REMEDY)
        try:
            found.append(fit(CostTable, document["costs"], "costs"))
        except ValueError as fault:
            raise ValueError(f"{path}: {fault}; {_REMEDY}") from None
    return tuple(found)
