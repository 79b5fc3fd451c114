"""What a report is made from: measurements, answers, curves and provenance, as records that survive a trip through JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from mtp_train.acceptance.certificate import Certificate
from mtp_train.acceptance.costs import CostTable
from mtp_train.acceptance.identity import Identity
from mtp_train.records import Acceptance
from mtp_train.typed import fit

Part = TypeVar("Part")

FORMAT_VERSION = 2
WEIGHTS_FACT = "weights sha256"  # the fact of a head that says which one it is: how the hash begins
ESTIMATE = "estimate"  # Acceptance.measured_by of the walk over the cache


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """A set of prompts that acceptance was measured on. ``name`` is its key, ``label`` what readers see."""

    name: str
    label: str
    description: str


@dataclass(frozen=True, kw_only=True)
class TrainedHead:
    """One head of the comparison. ``name`` is its key (its checkpoint's name), ``word`` its architecture.

    ``metrics`` are the rows of its metrics.jsonl, as the trainer wrote them; ``facts`` short statements beside it
    (parameters, steps, tokens, norms), in the order they shall be read.
    """

    name: str
    word: str
    facts: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Decoding without drafts, of the same prompts by the same engine and settings."""

    num_tokens: int
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Acceptance of one head on one prompt set under one way of decoding; an estimate is a measurement too
    (``acceptance.measured_by == "estimate"``). ``plain`` and ``identity`` stand where they were measured."""

    head: str
    prompt_set: str
    acceptance: Acceptance
    plain: Plain | None
    identity: Identity | None

    @property
    def is_estimate(self) -> bool:
        return self.acceptance.measured_by == ESTIMATE

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens written per second with drafts; None where no time was taken."""
        if not self.acceptance.wall_s:
            return None
        return sum(len(prompt.token_ids) for prompt in self.acceptance.prompts) / self.acceptance.wall_s


@dataclass(frozen=True, kw_only=True)
class MarkedAnswer:
    """An answer to be shown with its accepted tokens marked: one text per token, as the caller decoded them."""

    head: str
    prompt_set: str
    prompt_id: str
    category: str
    question: str
    token_texts: tuple[str, ...]
    accepted: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.token_texts) != len(self.accepted):
            raise ValueError(
                f"answer {self.prompt_id}: expected one flag per token, found {len(self.token_texts)} texts and {len(self.accepted)} flags"
            )


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A figure that was aimed at, so that a miss is named. ``quantity``: a first-position rate, an acceptance length, or
    tokens per second with drafts over without."""

    head: str
    prompt_set: str
    quantity: Literal["first_position", "acceptance_length", "speedup"]
    at_least: float


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that a report shows. The first prompt set is the one that its headline speaks about.

    ``provenance`` maps each stage to what it stated of itself (settings, versions, commit, hashes); ``notes`` are
    sentences that the reader must know. ``certificate``: of losslessness, where one was made. ``costs``: what steps cost,
    where it was measured.
    """

    title: str
    target: dict[str, Any]
    heads: tuple[TrainedHead, ...]
    prompt_sets: tuple[PromptSet, ...]
    measurements: tuple[Measurement, ...]
    answers: tuple[MarkedAnswer, ...]
    aims: tuple[Aim, ...]
    provenance: dict[str, Any]
    notes: tuple[str, ...]
    certificate: Certificate | None = None
    costs: tuple[CostTable, ...] = ()
    format_version: int = field(default=FORMAT_VERSION)

    def __post_init__(self) -> None:
        heads, sets = [head.name for head in self.heads], [prompt_set.name for prompt_set in self.prompt_sets]
        for kind, names in (("heads", heads), ("prompt_sets", sets)):
            if len(set(names)) != len(names) or not names:
                raise ValueError(f"report: {kind}: expected at least one, each with a name of its own, found {names}")
        placed: tuple[Measurement | MarkedAnswer | Aim, ...] = (*self.measurements, *self.answers, *self.aims)
        for item in placed:
            if item.head not in heads or item.prompt_set not in sets:
                raise ValueError(
                    f"report: {type(item).__name__}: expected one of the heads {heads} and prompt sets {sets}, "
                    f"found {item.head!r} on {item.prompt_set!r}"
                )


def to_json(data: ReportData) -> dict[str, Any]:
    """The data as plain JSON."""
    return dataclasses.asdict(data)


def from_json(document: Any) -> ReportData:
    """The data back from JSON, checked field by field.

    Errors: ValueError where the format is of another version, a field is missing, unknown or of another type.
    """
    if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
        found = document.get("format_version") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"report: expected format_version {FORMAT_VERSION}, found {found!r}; write the report again with evaluate")
    return cast(ReportData, fit(ReportData, document, "report"))


def part_from_json(kind: type[Part], document: Any) -> Part:
    """One record of a report (a ``Measurement``, a ``TrainedHead``, ...) back from JSON, checked field by field."""
    return cast(Part, fit(kind, document, kind.__name__))
