"""``hidden_l1``: the head's hidden state against the target's, as EAGLE regresses it."""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_train.loss.base import Loss, LossChunk, Need, widen


class HiddenL1(Loss):
    """SmoothL1 (beta 1) between the head's and the target's hidden state, mean over D (EAGLE-1, Li et al. 2024, section 3.2).

    Squared units of the hidden state where they are less than 1 apart, units beyond. Needs no projection.
    """

    unit = "squared units"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"hidden"})

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        return functional.smooth_l1_loss(widen(chunk.hidden_RD), widen(chunk.teacher_hidden_RD), reduction="none").mean(-1)
