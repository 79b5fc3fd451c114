"""``forward_kl``: KL(teacher || head) over the whole vocabulary, the teacher recomputed from the target's hidden states."""

from __future__ import annotations

from typing import Any

import torch

from mtp_train.loss.base import Loss, LossChunk, Need, row_blocks, scale_rows_


class ForwardKl(Loss):
    """sum_v p(v) (log p(v) - log q(v)) in nats, p the exact teacher.

    EAGLE's classification loss, the soft cross-entropy -sum_v p(v) log q(v), is this plus the teacher's entropy, which
    does not depend on the head: the same gradient (Li et al. 2024, section 3.2).
    """

    unit = "nats"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits", "exact_teacher"})

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        value_R: torch.Tensor = _Kl.apply(chunk.projected_RV, chunk.teacher_projected_RV)
        return value_R


class _Kl(torch.autograd.Function):
    """KL of two softmaxes from their logits; its gradient to the second's logits, q - p, is made on the way."""

    @staticmethod
    def forward(ctx: Any, logits_RV: torch.Tensor, teacher_RV: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(logits_RV.dtype, torch.float32)
        value_R = torch.empty(logits_RV.shape[0], dtype=wide, device=logits_RV.device)
        grad_RV = torch.empty_like(logits_RV)
        for rows in row_blocks(logits_RV):
            log_q = logits_RV[rows].to(wide).log_softmax(-1)
            log_p = teacher_RV[rows].to(wide).log_softmax(-1)
            p = log_p.exp()
            # p log p is 0 where p is; log_softmax is finite for finite logits, so no 0 * inf arises.
            value_R[rows] = log_p.sub_(log_q).mul_(p).sum(-1)
            grad_RV[rows] = log_q.exp_().sub_(p)
        ctx.save_for_backward(grad_RV)
        return value_R

    @staticmethod
    def backward(ctx: Any, grad_R: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad_RV,) = ctx.saved_tensors
        return scale_rows_(grad_RV, grad_R), None
