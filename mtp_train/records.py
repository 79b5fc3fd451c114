"""The vocabulary of the pipeline: what one stage hands to the next, as plain checked records.

Shape legend, used as name suffixes everywhere: ``T`` packed tokens (there is no batch axis), ``D`` hidden size,
``L`` tapped layers, ``V`` target vocabulary, ``U`` draft vocabulary, ``C`` teacher candidates kept, ``K`` draft tokens,
``N`` attention heads, ``H`` head size, ``M`` selected rows of T, ``S`` samples in a batch, ``R`` rows of one chunk.
Units are suffixes too: ``_nats _bytes _s _tokens``; counts begin with ``num_``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "given"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "given")
HiddenState = Literal["post_norm", "pre_norm"]


def _expect(condition: bool, where: str, expected: str, found: object) -> None:
    if not condition:
        raise ValueError(f"{where}: expected {expected}, found {found!r}")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation as a data set holds it, normalised to OpenAI messages.

    ``messages`` are dicts with ``role`` and string ``content``; assistant turns, where there are any, are the data
    set's own answers, which ``regenerate`` replaces by the target's. ``prompt_id`` is unique within a run and stable
    from run to run; resuming goes by it.
    """

    prompt_id: str
    messages: tuple[dict[str, Any], ...]
    category: str
    source: str

    def __post_init__(self) -> None:
        _expect(bool(self.prompt_id), "Prompt.prompt_id", "a non-empty string", self.prompt_id)
        _expect(len(self.messages) > 0, f"Prompt {self.prompt_id}", "at least one message", self.messages)


@dataclass(frozen=True, kw_only=True)
class Response:
    """One conversation as the target reads it: token ids, and which of them are the target's own text.

    ``loss_mask[t]`` says that ``token_ids[t]`` was written by the assistant (its end-of-turn token included).
    ``finish_reason`` is that of the last turn: ``stop``, ``length`` (cut by a limit) or ``given`` (the data set's
    own answer, not generated).
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    messages: tuple[dict[str, Any], ...]
    finish_reason: FinishReason
    category: str
    source: str

    def __post_init__(self) -> None:
        _expect(
            len(self.token_ids) == len(self.loss_mask),
            f"Response {self.prompt_id}: len(loss_mask)",
            f"{len(self.token_ids)} (one flag per token)",
            len(self.loss_mask),
        )
        _expect(self.finish_reason in FINISH_REASONS, f"Response {self.prompt_id}", f"one of {FINISH_REASONS}", self.finish_reason)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first one of the target's own; all of them where it wrote nothing."""
        return self.loss_mask.index(True) if any(self.loss_mask) else len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The target's next-token distribution at M positions, cut to its C most probable tokens.

    ``row_M`` (int64) is the position j whose logits z_j these are (they speak about token j + 1), ascending;
    ``ids_MC`` (int64) the candidates by falling probability, ``log_probs_MC`` (float32, nats) their log-probabilities
    under the whole vocabulary, ``log_sum_exp_M`` (float32) the logits' log-sum-exp, so that a candidate's logit is
    ``log_prob + log_sum_exp``. What is missing to 1 is the tail, which a loss must hold in one bucket.
    """

    row_M: torch.Tensor
    ids_MC: torch.Tensor
    log_probs_MC: torch.Tensor
    log_sum_exp_M: torch.Tensor

    def __post_init__(self) -> None:
        m, c = self.ids_MC.shape
        _expect(tuple(self.row_M.shape) == (m,), "Teacher.row_M", f"shape ({m},)", tuple(self.row_M.shape))
        _expect(tuple(self.log_probs_MC.shape) == (m, c), "Teacher.log_probs_MC", f"shape ({m}, {c})", tuple(self.log_probs_MC.shape))
        _expect(tuple(self.log_sum_exp_M.shape) == (m,), "Teacher.log_sum_exp_M", f"shape ({m},)", tuple(self.log_sum_exp_M.shape))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response with its tensors, as the cache keeps it and ``prefill`` yields it.

    ``hidden_TD`` is the target's last hidden state in the form that ``hidden_state`` names (the cache always keeps
    ``post_norm``: what the lm_head reads), ``taps_TLD`` the outputs of ``target_layer_ids`` (before the final norm).
    ``teacher`` covers the positions j whose next token is the target's own (``loss_mask_T[j + 1]``).
    """

    sample_id: str
    token_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    hidden_TD: torch.Tensor
    taps_TLD: torch.Tensor | None = None
    teacher: Teacher | None = None
    category: str = ""

    def __post_init__(self) -> None:
        t = self.token_ids_T.shape[0]
        _expect(
            tuple(self.loss_mask_T.shape) == (t,), f"Sample {self.sample_id}: loss_mask_T", f"shape ({t},)", tuple(self.loss_mask_T.shape)
        )
        _expect(
            self.hidden_TD.ndim == 2 and self.hidden_TD.shape[0] == t,
            f"Sample {self.sample_id}: hidden_TD",
            f"shape ({t}, D): one vector per token",
            tuple(self.hidden_TD.shape),
        )
        if self.taps_TLD is not None:
            _expect(
                self.taps_TLD.ndim == 3 and self.taps_TLD.shape[0] == t,
                f"Sample {self.sample_id}: taps_TLD",
                f"shape ({t}, L, D)",
                tuple(self.taps_TLD.shape),
            )

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


class RowShare(Protocol):
    """Which rows of a batch this process computes, where several share it (``nn/context.py``): ``stretches``, and ``index_T``
    each row's place among them, -1 for rows of others."""

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def index_T(self) -> torch.Tensor: ...

    def own(self, column_T: torch.Tensor) -> torch.Tensor:
        """This process' rows of a column of the whole batch."""
        ...

    def gather(self, own_NTH: torch.Tensor) -> torch.Tensor:
        """The rows of all processes, in the batch's order."""
        ...

    def to(self, device: torch.device | str) -> RowShare: ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples packed one behind the other: T tokens, no batch axis, no padding.

    ``bounds`` has S + 1 entries: sample s is rows ``bounds[s]:bounds[s + 1]``. ``sample_T`` (int64) is each row's
    sample, ``position_T`` (int64) its position within it. ``teacher.row_M`` counts rows of the batch. ``share``: None where this
    process computes all rows; the columns are whole in any case.
    All alignment between these columns is done by ``batch/shift.py``.
    """

    token_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    hidden_TD: torch.Tensor
    sample_T: torch.Tensor
    position_T: torch.Tensor
    bounds: tuple[int, ...]
    sample_ids: tuple[str, ...]
    taps_TLD: torch.Tensor | None = None
    teacher: Teacher | None = None
    share: RowShare | None = None

    def __post_init__(self) -> None:
        t = self.token_ids_T.shape[0]
        for name in ("loss_mask_T", "sample_T", "position_T"):
            _expect(tuple(getattr(self, name).shape) == (t,), f"Batch.{name}", f"shape ({t},)", tuple(getattr(self, name).shape))
        _expect(self.hidden_TD.shape[0] == t, "Batch.hidden_TD", f"{t} rows", self.hidden_TD.shape[0])
        _expect(
            self.bounds[0] == 0 and self.bounds[-1] == t and len(self.bounds) == len(self.sample_ids) + 1,
            "Batch.bounds",
            f"{len(self.sample_ids) + 1} bounds from 0 to {t}",
            self.bounds,
        )

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name in ("token_ids_T", "loss_mask_T", "hidden_TD", "sample_T", "position_T", "taps_TLD")
            if (value := getattr(self, name)) is not None
        }
        if self.teacher is not None:
            moved["teacher"] = Teacher(
                **{name: getattr(self.teacher, name).to(device, non_blocking=True) for name in Teacher.__dataclass_fields__}
            )
        return replace(self, **moved, share=None if self.share is None else self.share.to(device))


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """One depth of a head's unroll: at row t, ``hidden_TD[t]`` speaks about token t + ``ahead``.

    Depth k has ``ahead`` = k + 2. ``hidden_TD`` is what the lm_head reads (after the output norm, where the head has
    one); ``project`` turns any rows of it into logits over the U tokens that the head can draft, late and in chunks: products with
    the rows of ``lm_head_UD``, some of which give the logits of these tokens alone. ``parameters`` are what it reads of the head's
    own, which the objective differentiates by apart.
    """

    ahead: int
    hidden_TD: torch.Tensor
    project: Callable[[torch.Tensor], torch.Tensor]
    lm_head_UD: torch.Tensor
    parameters: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PromptAcceptance:
    """What speculative decoding counted on one prompt.

    ``num_drafted_per_position[i]`` counts the verifications that drafted at least i + 1 tokens,
    ``num_accepted_per_position[i]`` those that accepted at least i + 1 of them. ``accepted`` marks, for each emitted
    token, whether it came from the draft (True) or from the target itself (False).
    """

    prompt_id: str
    category: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    num_drafts: int
    num_drafted_per_position: tuple[int, ...]
    num_accepted_per_position: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return sum(self.num_accepted_per_position)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance over a prompt set, with all that must be said beside the number (DESIGN.md, Words).

    ``scheme`` is ``chain`` or ``tree``, ``decoding`` the word of ``conf/decoding`` that proposed the drafts. Positions of a tree
    are its depths: ``num_speculative_tokens`` is the longest path, ``num_nodes`` the drafted tokens that one verification
    judges at the most (None: a chain, of as many as it has positions). ``draft_sampling`` is ``greedy`` (the draft's most
    probable tokens, or others chosen by a rule; q one-hot) or ``probabilistic`` (drawn from q); ``measured_by`` names the
    engine, or ``estimate`` for the walk over the cache.
    """

    prompts: tuple[PromptAcceptance, ...]
    scheme: str
    num_speculative_tokens: int
    temperature: float
    draft_sampling: Literal["greedy", "probabilistic"]
    measured_by: str
    engine_version: str
    dtype: str
    decoding: str = "chain"
    num_nodes: int | None = None
    wall_s: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def num_drafts(self) -> int:
        return sum(p.num_drafts for p in self.prompts)

    def rate_per_position(self) -> list[float]:
        """Accepted at position i / drafts, unconditional, as vLLM counts; 0.0 where nothing was drafted."""
        drafts = self.num_drafts
        return [
            (sum(p.num_accepted_per_position[i] for p in self.prompts) / drafts if drafts else 0.0)
            for i in range(self.num_speculative_tokens)
        ]

    def acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens emitted per verification, the bonus token counted."""
        return 1.0 + (sum(p.num_accepted for p in self.prompts) / self.num_drafts if self.num_drafts else 0.0)
