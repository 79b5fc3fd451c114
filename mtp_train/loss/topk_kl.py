"""``topk_kl``: KL(teacher || head) over the teacher's cached candidates, all other tokens as one bucket."""

from __future__ import annotations

from typing import Any

import torch

from mtp_train.loss.base import Loss, LossChunk, Need, row_blocks, scale_rows_


class TopkKl(Loss):
    """sum_c p_c (log p_c - log q_c) + p_tail (log p_tail - log q_tail) in nats, tail = all tokens but the C candidates.

    A lower bound of ``forward_kl`` (joining tokens to a bucket can only lower a KL), equal to it where C = V. The tail
    is not dropped: the head is paid for no mass that it moves there, and is told how much belongs there.
    Over a draft vocabulary: m KL(p / m || q) over the buckets that it reaches (``LossChunk``): the candidates inside, and
    the tail against all of its other tokens. Candidates outside are left to the rejections, m = 1 - their probability. The
    cache does not say which of the tail's tokens lie outside, so all of it counts as inside; equal to ``forward_kl`` where
    C = V.
    """

    unit = "nats"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits", "topk_teacher"})

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        return bucket_kl(chunk.projected_RU, *chunk.candidates, partial=chunk.draft is not None)


def bucket_kl(
    logits_RU: torch.Tensor, column_RC: torch.Tensor, log_probs_RC: torch.Tensor, tail_R: torch.Tensor, *, partial: bool
) -> torch.Tensor:
    """The loss of rows of logits against candidates in their columns; ``partial``: some lie outside, at column U, with a
    log-probability of -inf."""
    value_R: torch.Tensor = _BucketKl.apply(logits_RU, column_RC, log_probs_RC, tail_R, partial)
    return value_R


class _BucketKl(torch.autograd.Function):
    """The loss from the head's logits, its gradient made on the way in blocks of rows.

    The tail's log-sum-exp is summed over the tail itself, not as 1 - sum q_c, which would cancel where the head puts
    nearly all mass on the candidates. The gradient to logit z_v is m q_v - p_v on candidates and
    q_v (m - p_tail / q_tail) in the tail. ``partial``: some candidates lie outside, in a column of their own behind the
    head's, where its logit is -inf.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_RU: torch.Tensor, column_RC: torch.Tensor, log_probs_RC: torch.Tensor, tail_R: torch.Tensor, partial: bool
    ) -> torch.Tensor:
        wide = torch.promote_types(logits_RU.dtype, torch.float32)
        num_columns = logits_RU.shape[1]
        log_p_RC, tail_R = log_probs_RC.to(wide), tail_R.to(wide)
        p_RC = log_p_RC.exp()
        z_RC = logits_RU.gather(1, column_RC.clamp_max(num_columns - 1)).to(wide)
        if partial:
            z_RC = z_RC.masked_fill(column_RC == num_columns, float("-inf"))
        lse_candidates_R = z_RC.logsumexp(-1)
        value_R = torch.empty_like(tail_R)
        grad_RU = torch.empty_like(logits_RU)
        for rows in row_blocks(logits_RU):
            columns, p, log_p, z, tail = column_RC[rows], p_RC[rows], log_p_RC[rows], z_RC[rows], tail_R[rows]
            block = _with_column_behind(logits_RU[rows], wide) if partial else logits_RU[rows].to(wide, copy=True)
            block.scatter_(1, columns, float("-inf"))
            # Where no token is left for the tail (C = V): any finite peak keeps exp(-inf - peak) at 0, and total is 0.
            peak = block.amax(-1).clamp_min(torch.finfo(wide).min)
            total = block.sub_(peak[:, None]).exp_().sum(-1)
            tail = tail * (total > 0)
            # Over the whole vocabulary m is 1, not a sum that rounding moves.
            inside = p.sum(-1) + tail if partial else torch.ones_like(tail)
            lse_tail = peak + total.log()
            lse = torch.logaddexp(lse_tail, lse_candidates_R[rows])
            in_tail = torch.special.xlogy(tail, tail) - torch.where(tail > 0, tail * (lse_tail - lse), 0.0)
            in_candidates = torch.where(p > 0, p * (log_p - z + lse[:, None]), 0.0).sum(-1)
            value_R[rows] = in_candidates + in_tail - torch.special.xlogy(inside, inside)
            factor = inside * (peak - lse).exp() - torch.where(tail > 0, tail / total, 0.0)
            block.mul_(factor[:, None]).scatter_(1, columns, (z - lse[:, None]).exp_().mul_(inside[:, None]) - p)
            grad_RU[rows] = block[:, :num_columns]
        ctx.save_for_backward(grad_RU)
        return value_R

    @staticmethod
    def backward(ctx: Any, grad_R: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad_RU,) = ctx.saved_tensors
        return scale_rows_(grad_RU, grad_R), None, None, None, None


def _with_column_behind(x_RU: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy with one column more, of -inf."""
    wider = x_RU.new_full((x_RU.shape[0], x_RU.shape[1] + 1), float("-inf"), dtype=dtype)
    wider[:, :-1] = x_RU
    return wider
