"""The contract of a loss: one number per row of a chunk, made of what the chunk offers and of nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch

from mtp_train.loss.vocabulary_sample import VocabularySample
from mtp_train.target.draft_vocabulary import DraftVocabulary

Unit = Literal["nats", "probability", "squared units"]
# What a loss reads: the head's hidden states themselves, as states of the target's (all losses read what is made of them), the
# head's logits, the label token, the exact teacher (the target's logits, recomputed from its hidden states), the teacher's most
# probable tokens as the cache keeps them, or a part of the vocabulary to speak about in training.
Need = Literal["hidden", "logits", "label", "exact_teacher", "topk_teacher", "vocabulary_sample"]

# Elements of a float32 block that stays in a CPU core's second-level cache together with its source (1 MB of 2).
_BLOCK_ELEMENTS = 2**18
_together: ContextVar[bool] = ContextVar("rows_together", default=False)


@dataclass(frozen=True, kw_only=True)
class TopTeacher:
    """The teacher's C most probable tokens of R rows, as ``records.Teacher`` says; nats under the whole vocabulary."""

    ids_RC: torch.Tensor
    log_probs_RC: torch.Tensor
    log_sum_exp_R: torch.Tensor

    @cached_property
    def tail_R(self) -> torch.Tensor:
        """The teacher's probability outside its C candidates; at least 0, where rounding makes the sum exceed 1."""
        return (1.0 - self.log_probs_RC.exp().sum(-1)).clamp_min(0.0)


class Candidates(NamedTuple):
    """The cached teacher as columns of the head's logits: ``column_RC`` (int64) is U, one past the last, where the head
    cannot draft the candidate, whose log-probability is then -inf; ``tail_R`` the probability outside all C candidates."""

    column_RC: torch.Tensor
    log_probs_RC: torch.Tensor
    tail_R: torch.Tensor


class LossChunk:
    """R rows of one depth: the head's side and the teacher's, each made once, when first asked for.

    ``hidden_RD`` is the head's and carries the gradient; ``teacher_hidden_RD`` the target's hidden state about the same
    token; ``label_R`` (int64) that token as the text has it; ``top`` the cached teacher, or None where the cache has none.
    The head's logits are over the U tokens that it can draft, the teacher's over all V; ``draft`` says which are which, and is
    None where they are the same. ``vocabulary_sample``: the tokens that ``project_sampled`` speaks about; None where none were drawn.

    With a draft vocabulary no head reaches KL(p || q) below infinity, since q is 0 where p is not. What depends on the head
    is the teacher's part inside: with m = sum_U p, the losses in nats give m KL(p / m || q), so that a row counts by the
    probability that the head can reach. None is dropped, and nothing is normalised to look larger than it is. EAGLE-3's own
    loss is another: it takes KL(p / m || q) unweighted and leaves out rows whose most probable token lies outside.
    """

    def __init__(
        self,
        *,
        hidden_RD: torch.Tensor,
        teacher_hidden_RD: torch.Tensor,
        label_R: torch.Tensor,
        top: TopTeacher | None,
        project: Callable[[torch.Tensor], torch.Tensor],
        project_teacher: Callable[[torch.Tensor], torch.Tensor],
        draft: DraftVocabulary | None = None,
        vocabulary_sample: VocabularySample | None = None,
        project_sampled: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.hidden_RD, self.teacher_hidden_RD, self.label_R, self.top = hidden_RD, teacher_hidden_RD, label_R, top
        self._project, self._project_teacher, self.draft = project, project_teacher, draft
        self.vocabulary_sample, self._project_sampled = vocabulary_sample, project_sampled

    @cached_property
    def projected_RU(self) -> torch.Tensor:
        """The head's logits as the lm_head's matrix product gives them (bfloat16 under autocast), with gradient."""
        return self._project(self.hidden_RD)

    @cached_property
    def sampled_projected_RS(self) -> torch.Tensor:
        """The head's logits of the tokens in ``vocabulary_sample``, as the matrix product gives them, with gradient."""
        assert self._project_sampled is not None
        return self._project_sampled(self.hidden_RD)

    @cached_property
    def logits_RU(self) -> torch.Tensor:
        """The head's logits in at least float32, with gradient."""
        return widen(self.projected_RU)

    @cached_property
    def log_probs_RU(self) -> torch.Tensor:
        """The head's log-probabilities in nats, float32, with gradient."""
        return self.logits_RU.log_softmax(-1)

    @cached_property
    def teacher_projected_RV(self) -> torch.Tensor:
        """The target's logits as the lm_head's matrix product gives them, without gradient."""
        with torch.no_grad():
            return self._project_teacher(self.teacher_hidden_RD)

    @cached_property
    def teacher_log_probs_RU(self) -> torch.Tensor:
        """The target's log-probabilities of the tokens that the head can draft, in nats under the whole vocabulary,
        float32, recomputed from its hidden state, without gradient."""
        log_probs_RV = widen(self.teacher_projected_RV).log_softmax(-1)
        return log_probs_RV if self.draft is None else log_probs_RV[:, self.draft.ids_U]

    @cached_property
    def label_column_R(self) -> torch.Tensor:
        """The label as a column of the head's logits, int64; -1 where the head cannot draft it."""
        return self.label_R if self.draft is None else self.draft.index_V[self.label_R]

    @cached_property
    def top_R(self) -> torch.Tensor:
        """The head's most probable token, as the target numbers it, int64."""
        column_R = argmax_rows(self.projected_RU.detach())
        return column_R if self.draft is None else self.draft.ids_U[column_R]

    @cached_property
    def teacher_top_R(self) -> torch.Tensor:
        """The target's most probable token, int64: from the cached teacher where there is one, else recomputed."""
        return argmax_rows(self.teacher_projected_RV) if self.top is None else self.top.ids_RC[:, 0]

    @cached_property
    def candidates(self) -> Candidates:
        """The cached teacher; ValueError where the cache has none."""
        if self.top is None:
            raise ValueError(
                "losses: expected a cache with the teacher's most probable tokens, found none in this one; "
                "set precompute's top_k (64, say) and precompute again, or choose a loss with the exact teacher"
            )
        if self.draft is None:
            return Candidates(self.top.ids_RC, self.top.log_probs_RC, self.top.tail_R)
        column_RC = self.draft.index_V[self.top.ids_RC]
        outside_RC = column_RC < 0
        return Candidates(
            column_RC.masked_fill(outside_RC, self.draft.ids_U.shape[0]),
            self.top.log_probs_RC.masked_fill(outside_RC, float("-inf")),
            self.top.tail_R,
        )


class Loss(ABC):
    """A measure of how far the head is from its teacher, row by row.

    ``needs`` says what the chunk must offer; ``unit`` what the number is measured in; ``compiles`` whether ``compiled.py`` changes it.
    """

    unit: ClassVar[Unit]
    compiles: ClassVar[bool] = False

    @property
    @abstractmethod
    def needs(self) -> frozenset[Need]: ...

    @abstractmethod
    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        """Return value_R: one unreduced number per row, in at least float32, differentiable in ``chunk.hidden_RD``."""


def widen(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def row_blocks(x_RV: torch.Tensor) -> Iterator[slice]:
    """Rows of a matrix in pieces over which several element-wise passes run out of the cache instead of memory.

    On two Sapphire Rapids cores the passes of ``topk_kl`` over 256 rows of 49152 take 10 ms so and 60 ms at once. A GPU
    takes all rows together.
    """
    num_rows = x_RV.shape[0]
    step = max(1, _BLOCK_ELEMENTS // x_RV.shape[1]) if x_RV.device.type == "cpu" and not _together.get() else max(1, num_rows)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


@contextmanager
def rows_together() -> Iterator[None]:
    """Inside, ``row_blocks`` takes all rows together on a CPU too: to see there what a GPU would do."""
    token = _together.set(True)
    try:
        yield
    finally:
        _together.reset(token)


def scale_rows_(x_RV: torch.Tensor, factor_R: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its factor, in place, with one rounding however narrow ``x_RV`` is."""
    for rows in row_blocks(x_RV):
        x_RV[rows].mul_(factor_R[rows, None])
    return x_RV


def argmax_rows(x_RV: torch.Tensor) -> torch.Tensor:
    """The column of each row's largest entry, int64 (R,); one of them where several are equal.

    torch's own argmax over bfloat16 costs a CPU ten times this: maxima of strided column groups first, then within one.
    """
    num_rows, num_columns = x_RV.shape
    groups = next((size for size in (64, 32, 16) if num_columns % size == 0), None)
    if groups is None or x_RV.device.type != "cpu" or num_rows == 0:
        return x_RV.argmax(-1)
    stride = num_columns // groups
    grouped = x_RV.view(num_rows, groups, stride)
    offset_R = grouped.amax(1).argmax(-1)
    within = grouped.gather(2, offset_R[:, None, None].expand(-1, groups, 1))[..., 0]
    return within.argmax(-1) * stride + offset_R
