"""``total_variation``: the probability that a draft drawn from the head is rejected."""

from __future__ import annotations

from typing import Literal

import torch

from mtp_train.loss.base import Loss, LossChunk, Need

TeacherKind = Literal["exact", "topk"]


class TotalVariation(Loss):
    """1 - sum_v min(p(v), q(v)), a probability: what Leviathan et al. (2023, theorem 3.5) call the rejection rate.

    ``teacher``: ``exact`` recomputes p over the whole vocabulary; ``topk`` reads the cached candidates and holds all other
    tokens in one bucket, which gives a lower bound. What lies outside a draft vocabulary is rejected: q is 0 there, and the
    definition needs no change.
    """

    unit = "probability"

    def __init__(self, *, teacher: TeacherKind) -> None:
        if teacher not in ("exact", "topk"):
            raise ValueError(f"loss total_variation.teacher: expected exact or topk, found {teacher!r}")
        self.teacher: TeacherKind = teacher

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits", "exact_teacher" if self.teacher == "exact" else "topk_teacher"})

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        if self.teacher == "exact":
            return 1.0 - overlap(chunk)
        column_RC, log_probs_RC, tail_R = chunk.candidates
        num_columns = chunk.log_probs_RU.shape[1]
        q_RC = chunk.log_probs_RU.gather(1, column_RC.clamp_max(num_columns - 1)).exp()
        q_RC = q_RC.masked_fill(column_RC == num_columns, 0.0)
        in_tail_R = torch.minimum(tail_R, (1.0 - q_RC.sum(-1)).clamp_min(0.0))
        return 1.0 - torch.minimum(log_probs_RC.exp(), q_RC).sum(-1) - in_tail_R


def overlap(chunk: LossChunk) -> torch.Tensor:
    """sum_v min(p(v), q(v)) of each row with the exact teacher, (R,): the expected acceptance of a draft drawn from q."""
    return torch.minimum(chunk.teacher_log_probs_RU.exp(), chunk.log_probs_RU.exp()).sum(-1)
