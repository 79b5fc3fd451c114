"""``sampled_kl``: ``topk_kl`` with the softmax over a part of the vocabulary that is drawn anew for each pack."""

from __future__ import annotations

import torch

from mtp_train.loss.base import Loss, LossChunk, Need, TopTeacher
from mtp_train.loss.topk_kl import TopkKl, bucket_kl
from mtp_train.loss.vocabulary_sample import VocabularySample


class SampledKl(Loss):
    """``topk_kl`` over the ``num_top`` most probable tokens of every row of the pack and ``num_random`` others, which stand for
    the rest (``vocabulary_sample.py``): some 4,000 logits a row in place of the vocabulary's.

    An estimator: the partition function is unbiased, its logarithm, and so the loss, is a little low, which validation
    measures and reports (``log_partition_bias_nats``). A row's candidates that no row has among its first ``num_top`` count to
    its tail. Where nothing is drawn (validation) it is ``topk_kl`` itself, over the whole vocabulary.
    """

    unit = "nats"

    def __init__(self, *, num_top: int, num_random: int) -> None:
        if num_top < 1 or num_random < 1:
            raise ValueError(f"loss sampled_kl: expected num_top and num_random of at least 1, found {num_top} and {num_random}")
        self.num_top, self.num_random = num_top, num_random
        self._exact = TopkKl()

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"vocabulary_sample", "topk_teacher"})

    def draw(self, top_ids_MC: torch.Tensor, *, vocab_size: int, seed: str) -> VocabularySample:
        """The part of the vocabulary for a pack whose teacher's candidates are ``top_ids_MC``."""
        return VocabularySample.draw(top_ids_MC[:, : self.num_top], num_others=self.num_random, vocab_size=vocab_size, seed=seed)

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        sample = chunk.vocabulary_sample
        if sample is None:
            return self._exact(chunk)
        top = _top(chunk)
        column_RC = sample.column_V[top.ids_RC]
        outside_RC = column_RC == sample.ids_S.shape[0]
        kept_RC = top.log_probs_RC.masked_fill(outside_RC, float("-inf"))
        tail_R = top.tail_R + (top.log_probs_RC.exp() * outside_RC).sum(-1)
        return bucket_kl(sample.corrected(chunk.sampled_projected_RS), column_RC, kept_RC, tail_R, partial=True)


def _top(chunk: LossChunk) -> TopTeacher:
    chunk.candidates  # noqa: B018 - says what to do where the cache has none
    assert chunk.top is not None
    return chunk.top
