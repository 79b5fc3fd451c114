"""``topk_kl``: KL(teacher || head) over the teacher's cached candidates, all other tokens as one bucket."""

from __future__ import annotations

from typing import Any

import torch

from mtp_train.loss.base import Loss, LossChunk, Need, row_blocks, scale_rows_, top_of


class TopkKl(Loss):
    """sum_c p_c (log p_c - log q_c) + p_tail (log p_tail - log q_tail) in nats, tail = all tokens but the C candidates.

    A lower bound of ``forward_kl`` (joining tokens to a bucket can only lower a KL), equal to it where C = V. The tail
    is not dropped: the head is paid for no mass that it moves there, and is told how much belongs there.
    """

    unit = "nats"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits", "topk_teacher"})

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        top = top_of(chunk)
        value_R: torch.Tensor = _BucketKl.apply(chunk.projected_RV, top.ids_RC, top.log_probs_RC, top.tail_R)
        return value_R


class _BucketKl(torch.autograd.Function):
    """The loss from the head's logits, its gradient made on the way in blocks of rows.

    The tail's log-sum-exp is summed over the tail itself, not as 1 - sum q_c, which would cancel where the head puts
    nearly all mass on the candidates. The gradient to logit z_v is q_v - p_v on candidates and
    q_v (1 - p_tail / q_tail) in the tail.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: torch.Tensor, ids_RC: torch.Tensor, log_probs_RC: torch.Tensor, tail_R: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(logits_RV.dtype, torch.float32)
        log_p_RC, tail_R = log_probs_RC.to(wide), tail_R.to(wide)
        p_RC = log_p_RC.exp()
        z_RC = logits_RV.gather(1, ids_RC).to(wide)
        lse_candidates_R = z_RC.logsumexp(-1)
        value_R = torch.empty_like(tail_R)
        grad_RV = torch.empty_like(logits_RV)
        for rows in row_blocks(logits_RV):
            ids, p, log_p, z, tail = ids_RC[rows], p_RC[rows], log_p_RC[rows], z_RC[rows], tail_R[rows]
            block = logits_RV[rows].to(wide, copy=True).scatter_(1, ids, float("-inf"))
            # Where C = V no token is left for the tail: any finite peak keeps exp(-inf - peak) at 0, and total is 0.
            peak = block.amax(-1).clamp_min(torch.finfo(wide).min)
            total = block.sub_(peak[:, None]).exp_().sum(-1)
            tail = tail * (total > 0)
            lse_tail = peak + total.log()
            lse = torch.logaddexp(lse_tail, lse_candidates_R[rows])
            in_tail = torch.special.xlogy(tail, tail) - torch.where(tail > 0, tail * (lse_tail - lse), 0.0)
            value_R[rows] = torch.where(p > 0, p * (log_p - z + lse[:, None]), 0.0).sum(-1) + in_tail
            factor = (peak - lse).exp() - torch.where(tail > 0, tail / total, 0.0)
            block.mul_(factor[:, None]).scatter_(1, ids, (z - lse[:, None]).exp_() - p)
            grad_RV[rows] = block
        ctx.save_for_backward(grad_RV)
        return value_R

    @staticmethod
    def backward(ctx: Any, grad_R: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad_RV,) = ctx.saved_tensors
        return scale_rows_(grad_RV, grad_R), None, None, None
