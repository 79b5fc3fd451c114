"""``cross_entropy``: the head's surprise at the token that the text has."""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_train.loss.base import Loss, LossChunk, Need


class CrossEntropy(Loss):
    """-log q(label) in nats, where the label is the *text's* token, not the teacher's argmax.

    On answers that the target gave greedily the two are the same; on sampled or given answers they are not. A label that the
    head cannot draft gives 0: the teacher is one-hot, and nothing of it lies inside (``LossChunk``).
    """

    unit = "nats"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits", "label"})

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        return functional.cross_entropy(chunk.logits_RU, chunk.label_column_R, ignore_index=-1, reduction="none")
