"""A random cache is a cache: lengths as asked for, answers at the end, and a teacher that its own states give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_train.cache.reader import CacheReader
from mtp_train.trainer.random_cache import RandomTarget, RandomText, write_random_cache

TARGET = RandomTarget(vocab_size=300, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, num_layers=4)
TEXT = RandomText(num_samples=30, median=40, spread=0.8, shortest=8, longest=90, answer_share=0.4)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> CacheReader:
    path: Path = tmp_path_factory.mktemp("random") / "cache"
    write_random_cache(path, target=TARGET, text=TEXT, num_taps=2, top_k=5, codec="bf16", shard_tokens=500, seed=3)
    return CacheReader(path, verify="first_read")


def test_lengths_and_answers_are_as_asked_for(reader: CacheReader) -> None:
    assert reader.lengths == TEXT.lengths(seed=3) and len(reader.manifest.shards) > 1
    assert min(reader.lengths) >= 8 and max(reader.lengths) <= 90 and 25 < sorted(reader.lengths)[15] < 60
    assert sum(reader.num_loss_tokens) == pytest.approx(0.4 * sum(reader.lengths), rel=0.05)


def test_the_teacher_is_what_the_states_say(reader: CacheReader) -> None:
    sample, lm_head_VD = reader[4], TARGET.shared(seed=3).lm_head_VD.bfloat16()
    assert sample.teacher is not None and sample.taps_TLD is not None and sample.taps_TLD.shape[1:] == (2, 32)
    logits = (sample.hidden_TD[sample.teacher.row_M] @ lm_head_VD.T).float()
    assert bool(sample.loss_mask_T[sample.teacher.row_M + 1].all())
    torch.testing.assert_close(sample.teacher.log_sum_exp_M, logits.logsumexp(-1))
    found = logits.log_softmax(-1).gather(1, sample.teacher.ids_MC)
    torch.testing.assert_close(sample.teacher.log_probs_MC, found, rtol=2e-3, atol=2e-3)
    assert bool((sample.teacher.log_probs_MC.diff(dim=1) <= 0).all())
    assert 0.02 < float(logits.softmax(-1).amax(-1).mean()) < 0.9, "neither flat nor certain"
