"""``forward_kl``: KL(teacher || head) over the whole vocabulary, the teacher recomputed from the target's hidden states."""

from __future__ import annotations

from typing import Any

import torch

from mtp_train.loss.base import Loss, LossChunk, Need, row_blocks, scale_rows_, widen
from mtp_train.loss.compiled import compiled_or_none


class ForwardKl(Loss):
    """sum_v p(v) (log p(v) - log q(v)) in nats, p the exact teacher.

    EAGLE's classification loss, the soft cross-entropy -sum_v p(v) log q(v), is this plus the teacher's entropy, which
    does not depend on the head: the same gradient (Li et al. 2024, section 3.2).
    Over a draft vocabulary U: m KL(p / m || q) = sum_U p (log p - log q) - m log m, m = sum_U p (``LossChunk``).
    """

    unit = "nats"
    compiles = True

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits", "exact_teacher"})

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        ids_U = None if chunk.draft is None else chunk.draft.ids_U
        value_R: torch.Tensor = _Kl.apply(chunk.projected_RU, chunk.teacher_projected_RV, ids_U)
        return value_R


class _Kl(torch.autograd.Function):
    """The loss from both sides' logits; its gradient to the head's, m q - p, is made on the way."""

    @staticmethod
    def forward(ctx: Any, logits_RU: torch.Tensor, teacher_RV: torch.Tensor, ids_U: torch.Tensor | None) -> torch.Tensor:
        if (passes := compiled_or_none(_passes)) is not None:
            value_R, grad_RU = passes(logits_RU, teacher_RV, ids_U)
        else:
            value_R = torch.empty(logits_RU.shape[0], dtype=torch.promote_types(logits_RU.dtype, torch.float32), device=logits_RU.device)
            grad_RU = torch.empty_like(logits_RU)
            for rows in row_blocks(teacher_RV):
                value_R[rows], grad_RU[rows] = _passes(logits_RU[rows], teacher_RV[rows], ids_U)
        ctx.save_for_backward(grad_RU)
        return value_R

    @staticmethod
    def backward(ctx: Any, grad_R: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad_RU,) = ctx.saved_tensors
        return scale_rows_(grad_RU, grad_R), None, None


def _passes(logits_RU: torch.Tensor, teacher_RV: torch.Tensor, ids_U: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    log_q = widen(logits_RU).log_softmax(-1)
    log_p = widen(teacher_RV).log_softmax(-1)
    if ids_U is not None:
        log_p = log_p[:, ids_U]
    p = log_p.exp()
    # p log p is 0 where p is; log_softmax is finite for finite logits, so no 0 * inf arises.
    value_R = log_p.sub_(log_q).mul_(p).sum(-1)
    q = log_q.exp_()
    if ids_U is not None:
        inside_R = p.sum(-1)
        value_R -= torch.special.xlogy(inside_R, inside_R)
        q = q.mul_(inside_R[:, None])
    return value_R, q.sub_(p).to(logits_RU.dtype)
