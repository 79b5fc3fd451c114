"""What is minimised: a weighted sum of losses over depths, projected to the vocabulary in chunks that are never kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from mtp_train.head.base import Head
from mtp_train.loss.base import Loss, LossChunk, TopTeacher
from mtp_train.loss.sampled_kl import SampledKl
from mtp_train.loss.total_variation import overlap
from mtp_train.loss.vocabulary_sample import VocabularySample
from mtp_train.records import Batch, DraftStep
from mtp_train.target.draft_vocabulary import DraftVocabulary
from mtp_train.trainer.rows import Pack

# Columns of the sums beside one per loss: rows, rows whose top token is the teacher's, sum of min(p, q), mean square of the state,
# sum of the error of the partition function's logarithm where a part of the vocabulary is drawn.
EXTRA_COLUMNS = ("rows", "agree", "overlap", "square", "log_partition")


class Term(NamedTuple):
    """One summand of the objective."""

    weight: float
    loss: Loss


class Result(NamedTuple):
    """``loss``: the differentiable scalar. ``sums_KX`` (float64, detached): per depth the sum over counted rows of each
    loss in order, then ``EXTRA_COLUMNS``; a column that was not measured is NaN."""

    loss: torch.Tensor
    sums_KX: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Sum over depths k of w_k / N_k, over counted rows and losses, of weight * value; w_k = decay ** k, or as ``depth_weights`` say.

    N_k is the number of rows that count at depth k in the whole step, over all ranks and packs (``scale_K`` holds its
    reciprocal), so that how a step is cut into packs and ranks changes nothing. ``chunk_rows`` bounds what is projected
    to the vocabulary at once.
    """

    terms: Mapping[str, Term]
    draft_steps: int
    decay: float
    chunk_rows: int
    depth_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("losses: expected at least one with a weight above 0, found none")
        for word, term in self.terms.items():
            if not term.weight > 0:
                raise ValueError(f"losses.{word}: expected a weight above 0, found {term.weight}")
        if self.draft_steps < 1 or self.chunk_rows < 1:
            raise ValueError(f"draft_steps and chunk_rows: expected at least 1, found {self.draft_steps} and {self.chunk_rows}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"depth_decay: expected above 0 and at most 1, found {self.decay}")
        weights = self.depth_weights
        if weights is not None and (len(weights) != self.draft_steps or min(weights) < 0 or max(weights) == 0):
            raise ValueError(
                f"depth_weights: expected one weight per depth (draft_steps={self.draft_steps}), none below 0 and not all 0, found "
                f"{list(weights)}; set draft_steps to as many, or give fewer or more weights"
            )

    def draw(self, batch: Batch, *, vocab_size: int, seed: str) -> VocabularySample | None:
        """The part of the vocabulary that a loss wants drawn for this batch; None where none does."""
        loss = next((term.loss for term in self.terms.values() if isinstance(term.loss, SampledKl)), None)
        if loss is None or batch.teacher is None:
            return None
        return loss.draw(batch.teacher.ids_MC, vocab_size=vocab_size, seed="/".join([seed, *batch.sample_ids]))

    def weight(self, depth: int) -> float:
        """What depth ``depth`` counts."""
        return self.decay**depth if self.depth_weights is None else self.depth_weights[depth]

    def needs(self, need: str) -> bool:
        """True where some loss needs it (``loss.base.Need``)."""
        return any(need in term.loss.needs for term in self.terms.values())

    def check(self, head: Head) -> None:
        """ValueError where the head cannot be trained so."""
        if head.num_depths not in (None, self.draft_steps):
            raise ValueError(
                f"draft_steps: expected {head.num_depths}, one for each token that head={head.word} speaks about, "
                f"found {self.draft_steps}; set draft_steps={head.num_depths}"
            )
        if head.reads_hidden:
            return
        if self.draft_steps != 1:
            raise ValueError(
                f"draft_steps: expected 1 for head={head.word}, which reads tokens alone, so that its depths are the same states, "
                f"found {self.draft_steps}; set draft_steps=1"
            )
        if self.needs("hidden"):
            raise ValueError(
                f"losses.hidden_l1: expected 0 for head={head.word}, whose hidden states are its own and not the target's; "
                "set losses.hidden_l1=0 +losses.forward_kl=1.0"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of ``Result.sums_KX``."""
        return (*self.terms, *EXTRA_COLUMNS)

    def __call__(self, head: Head, pack: Pack, scale_K: torch.Tensor, *, measure: bool) -> Result:
        """Unroll the head over a pack. ``scale_K`` (float32, on the device) is 1 / N_k, times whatever undoes the
        averaging over ranks. ``measure`` also computes agreement and overlap with the exact teacher, for validation."""
        losses, sums = [], []
        for depth, step in enumerate(itertools.islice(head.unroll(pack.batch, wanted=pack.wanted), self.draft_steps)):
            assert step.ahead == depth + 2, (step.ahead, depth)
            rows = _DepthRows(self, head, pack, depth, step, measure=measure)
            total, depth_sums = _ChunkedSum.apply(rows, step.hidden_TD, *step.parameters)
            losses.append(total * (scale_K[depth] * self.weight(depth)))
            sums.append(depth_sums)
        return Result(torch.stack(losses).sum(), torch.stack(sums))


class _DepthRows:
    """The counted rows of one depth, chunk by chunk."""

    def __init__(self, objective: Objective, head: Head, pack: Pack, depth: int, step: DraftStep, *, measure: bool) -> None:
        self.objective, self.pack, self.depth, self.measure = objective, pack, depth, measure
        self.rows, self.project, self.parameters = pack.rows[depth], step.project, step.parameters
        ids_U = head.draft_ids_U
        self.draft = None if ids_U is None else DraftVocabulary.of(ids_U, vocab_size=head.shared.embedding_VD.shape[0])
        self.project_teacher: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: _target_logits(head, hidden)
        self.sample = pack.vocabulary_sample
        if self.sample is not None and self.parameters:
            raise ValueError(
                "losses.sampled_kl: expected a head that speaks through the target's own lm_head, found one with an lm_head of its own; "
                "choose topk_kl, and a draft vocabulary (head.draft_vocab_size) for speed"
            )
        self.sampled_SD = None if self.sample is None else head.shared.lm_head_VD[self.sample.ids_S]

    def chunk(self, hidden_RD: torch.Tensor, where: slice) -> LossChunk:
        batch = self.pack.batch
        top = None
        if self.pack.top_M:
            assert batch.teacher is not None
            top_R = self.pack.top_M[self.depth][where]
            top = TopTeacher(
                ids_RC=batch.teacher.ids_MC[top_R],
                log_probs_RC=batch.teacher.log_probs_MC[top_R].float(),
                log_sum_exp_R=batch.teacher.log_sum_exp_M[top_R].float(),
            )
        return LossChunk(
            hidden_RD=hidden_RD,
            teacher_hidden_RD=self.pack.teacher_hidden_TD[self.rows.teacher_M[where]],
            label_R=batch.token_ids_T[self.rows.label_M[where]],
            top=top,
            project=self.project,
            project_teacher=self.project_teacher,
            draft=self.draft,
            vocabulary_sample=None if self.measure else self.sample,
            project_sampled=self._project_sampled,
        )

    def _project_sampled(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        assert self.sampled_SD is not None
        autocast = torch.is_autocast_enabled(hidden_RD.device.type)
        return functional.linear(hidden_RD, self.sampled_SD if autocast else self.sampled_SD.to(hidden_RD.dtype))

    def columns(self, chunk: LossChunk, values: list[torch.Tensor]) -> torch.Tensor:
        """This chunk's sums, float64 (X,); reading them costs no projection that the losses did not make."""
        unknown = torch.full((), float("nan"), dtype=torch.float64, device=chunk.label_R.device)
        objective, exact = self.objective, self.objective.needs("exact_teacher")
        agree = overlapping = log_partition = unknown
        if self.measure or (objective.needs("logits") and (exact or chunk.top is not None)):
            agree = (chunk.top_R == chunk.teacher_top_R).sum().double()
        if self.measure:
            overlapping = overlap(chunk).sum().double()
        if self.measure and self.sample is not None:
            estimated_R = self.sample.corrected(self._project_sampled(chunk.hidden_RD)).logsumexp(-1)
            log_partition = (estimated_R - chunk.logits_RU.logsumexp(-1)).sum().double()
        count = torch.full_like(unknown, chunk.label_R.shape[0])
        square = chunk.hidden_RD.detach().float().square().mean(-1).sum().double()
        return torch.stack([*(value.detach().sum().double() for value in values), count, agree, overlapping, square, log_partition])


class _ChunkedSum(torch.autograd.Function):
    """The weighted sum over one depth's rows; its gradients are formed in the forward, chunk by chunk.

    A chunk's logits are for the gradient to its hidden states (and to the lm_head, where that is the head's own:
    ``parameters``) and for nothing else: they are dropped with the chunk, and the backward only scales what is stored. A pack
    without rows gives 0 and gradients of zeros, so that every rank takes part in every reduction.
    """

    @staticmethod
    def forward(ctx: Any, rows: _DepthRows, hidden_TD: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        objective = rows.objective
        base_M = rows.rows.base_M
        wants_gradient = any(ctx.needs_input_grad[1:])
        total = torch.zeros((), dtype=torch.promote_types(hidden_TD.dtype, torch.float32), device=hidden_TD.device)
        sums_X = torch.zeros(len(objective.columns), dtype=torch.float64, device=hidden_TD.device)
        grads = [torch.zeros_like(tensor) for tensor in (hidden_TD, *parameters)] if wants_gradient else []
        for first in range(0, base_M.shape[0], objective.chunk_rows):
            where = slice(first, first + objective.chunk_rows)
            leaf_RD = hidden_TD[base_M[where]].detach().requires_grad_(wants_gradient)
            with torch.set_grad_enabled(wants_gradient):
                chunk = rows.chunk(leaf_RD, where)
                values = [term.loss(chunk) for term in objective.terms.values()]
                weighted = torch.stack(
                    [term.weight * value.sum() for term, value in zip(objective.terms.values(), values, strict=True)]
                ).sum()
            if wants_gradient:
                _add_gradients(grads, weighted, leaf_RD, base_M[where], rows.parameters)
            total += weighted.detach()
            with torch.no_grad():
                sums_X += rows.columns(chunk, values)
        if wants_gradient:
            ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(sums_X)
        return total, sums_X

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        return None, *(stored * grad for stored in ctx.saved_tensors)


def _add_gradients(
    grads: Sequence[torch.Tensor],
    weighted: torch.Tensor,
    leaf_RD: torch.Tensor,
    base_R: torch.Tensor,
    parameters: Sequence[torch.Tensor],
) -> None:
    """Put a chunk's gradient to its hidden states into its rows of the first of ``grads``, and add those to ``parameters`` to
    the others. A loss that projects nothing leaves the parameters out."""
    with torch.autocast(leaf_RD.device.type, enabled=False):
        grad_RD, *rest = torch.autograd.grad(weighted, [leaf_RD, *parameters], allow_unused=bool(parameters))
    grads[0][base_R] = grad_RD
    for stored, found in zip(grads[1:], rest, strict=True):
        if found is not None:
            stored += found


def _target_logits(head: Head, hidden_RD: torch.Tensor) -> torch.Tensor:
    """The target's own logits of its hidden states: its lm_head, whatever the head under training projects with."""
    lm_head_VD = head.shared.lm_head_VD
    return functional.linear(hidden_RD.to(lm_head_VD.dtype), lm_head_VD)
