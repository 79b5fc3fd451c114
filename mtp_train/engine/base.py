"""The contract of an inference engine: generate answers, prefill hidden states, decode speculatively."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from mtp_train.acceptance.costs import Timing
from mtp_train.decoding.base import Decoding
from mtp_train.records import Acceptance, FinishReason, Response, Sample

DraftSampling = Literal["greedy", "probabilistic"]

# Temperatures that are sampled at. vLLM draws at 0.01 where less is asked for (0.32.0, sampling_params.py), so that what it measured
# would stand under another temperature; far above, float32 tells no two tokens' probabilities apart.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 1e6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy. ``seed`` makes each request's draws its own and repeatable."""

    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature: expected 0 (greedy), or {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}, found {self.temperature:g}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p: expected a share in (0, 1], found {self.top_p}")
        if self.max_new_tokens < 1:
            raise ValueError(f"sampling.max_new_tokens: expected at least 1, found {self.max_new_tokens}")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Token ids to be continued; ``request_id`` comes back with the answer.

    ``max_new_tokens`` is this request's own limit, beside the sampling's: the smaller one holds.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The new tokens of one request, the end-of-turn token included where one was written."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class PrefillSettings:
    """What ``prefill`` keeps: ``target_layer_ids`` taps (DESIGN.md, Words), ``top_k`` teacher candidates (None: no teacher)."""

    target_layer_ids: tuple[int, ...]
    top_k: int | None


@dataclass(frozen=True, kw_only=True)
class SpeculateRequest:
    """One prompt to decode speculatively."""

    prompt_id: str
    category: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SpeculateSettings:
    """How to draft and verify. ``draft_sampling``: whether drafts are the most probable tokens (or chosen by another rule) or
    drawn from q. ``ignore_eos`` decodes ``max_new_tokens`` whatever comes."""

    decoding: Decoding
    draft_sampling: DraftSampling
    sampling: Sampling
    batch_size: int
    ignore_eos: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, found {self.batch_size}")
        if self.draft_sampling == "probabilistic" and not self.decoding.draws:
            raise ValueError(
                f"draft_sampling: expected greedy with decoding={self.decoding.word}, whose drafts are not drawn, found probabilistic"
            )

    @property
    def num_speculative_tokens(self) -> int:
        """Drafted tokens that one verification can accept at the most: K of a chain, the depth of a tree."""
        return self.decoding.depth


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Plain decoding of the same requests by the same engine: what speculation must equal and beat."""

    token_ids: dict[str, tuple[int, ...]]
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class CostsAsked:
    """Which cells of a cost table to time: every batch size with every number of tokens per sequence (1 is plain decoding), and
    with every draft length (none: the target alone is timed). Each ``num_repeats`` times, one cell after the other, so that what else the
    machine does falls on all alike; sequences hold ``context_tokens`` of random tokens."""

    batch_sizes: tuple[int, ...]
    num_tokens: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    context_tokens: int
    num_repeats: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "num_tokens", "draft_lengths"):
            found = getattr(self, name)
            if not (found or name == "draft_lengths") or sorted(set(found)) != list(found) or min(found, default=1) < 1:
                raise ValueError(f"{name}: expected different whole numbers of at least 1, ascending, found {list(found)}")
        if self.num_tokens[0] != 1:
            raise ValueError(f"num_tokens: expected 1, plain decoding, among them, found {list(self.num_tokens)}")
        if len(self.draft_lengths) == 1 or any(k + 1 not in self.num_tokens for k in self.draft_lengths):
            raise ValueError(
                f"draft_lengths: expected two or more, each less by one than one of num_tokens {list(self.num_tokens)}, "
                f"found {list(self.draft_lengths)}"
            )
        for name, least in (("context_tokens", 2), ("num_repeats", 3)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, found {getattr(self, name)}")


class StepTimes(NamedTuple):
    """What ``Engine.time_steps`` found, as a cost table keeps it: cells, the device's name, and what else must be said."""

    verify: tuple[Timing, ...]
    drafting: tuple[Timing, ...]
    device: str
    notes: dict[str, Any]


class Engine(ABC):
    """An inference backend over one target. What it cannot do raises NotImplementedError and names who can."""

    word: ClassVar[str]  # its name in conf/engine and on the command line

    @property
    @abstractmethod
    def version(self) -> str:
        """The library that computes, and its version: ``transformers 5.19.0``, ``vllm 0.32.0``."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """What it computes in: ``float32``, ``bfloat16``."""

    @property
    def device(self) -> str:
        """torch's word for where tensors beside the engine are computed (``auto``: an accelerator where there is one)."""
        return "auto"

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> Iterator[Generated]:
        """Continue every request until its end-of-turn token or the limit; yields each as it is finished, in any order.

        With a seed, a request's answer does not depend on which others were in its batch beyond rounding.
        """

    @abstractmethod
    def prefill(self, responses: Iterable[Response], settings: PrefillSettings) -> Iterator[Sample]:
        """Run the target over whole responses and yield each one's hidden states (post-norm) and teacher, in order."""

    def prefill_groups(self, groups: Iterable[Sequence[Response] | None], settings: PrefillSettings) -> Generator[Iterator[Sample]]:
        """``prefill`` for group after group; each is to be read to its end before the next is asked for. None among the groups: there
        is none at the moment; it is asked again when a group before it has been read.

        What is computed for a group does not depend on the others, so that a run that ended between two and is continued
        gives the same. An engine that takes long to start starts once for all (vllm); close the generator to end it.
        """
        for group in groups:
            if group is not None:
                yield self.prefill(group, settings)

    @abstractmethod
    def speculate(self, requests: Sequence[SpeculateRequest], draft: Path | None, settings: SpeculateSettings) -> Acceptance:
        """Decode with drafts and count what is accepted. ``draft``: a checkpoint for ``hf``, a served folder for the rest; None
        for schemes that need no head."""

    def draws_drafts_of(self, method: str) -> bool:
        """Whether drafts of a head of this method can be drawn from its q here; else they are its most probable tokens."""
        return True

    @abstractmethod
    def baseline(self, requests: Sequence[SpeculateRequest], settings: SpeculateSettings) -> Baseline:
        """Decode the same requests without drafts, by the same settings."""

    def time_steps(self, draft: Path | None, asked: CostsAsked) -> StepTimes:
        """Time what a decoding step is made of. ``draft`` as in ``speculate``; None: the target alone."""
        raise NotImplementedError(f"engine={self.word} does not time its steps; engine=hf and vllm do")

    def logit_gap(self, token_ids: Sequence[int]) -> float:
        """The distance of the two best logits for the token that follows ``token_ids``, float32: how near a greedy choice was."""
        raise NotImplementedError(f"engine={self.word} does not give logits; engine=hf does")

    def logit_gaps(self, prefixes: Sequence[Sequence[int]]) -> list[float]:
        """``logit_gap`` of several."""
        return [self.logit_gap(token_ids) for token_ids in prefixes]

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a report must say of it: library, version, device, dtype, attention, flags."""
