"""Random samples with a teacher and a tap, and a cache of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtp_train.batch.shift import teacher_rows
from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
from mtp_train.cache.plan import PlannedSample, content_hash
from mtp_train.cache.writer import CacheWriter
from mtp_train.records import Sample, Teacher

LENGTHS = (5, 1, 9, 3, 12, 2, 7, 11, 4, 8, 6, 10, 3, 9, 5, 7)


def _sample(number: int, length: int) -> Sample:
    random = torch.Generator().manual_seed(number)
    mask_T = torch.rand(length, generator=random) < 0.6
    mask_T[-1] = True
    rows = teacher_rows(mask_T)
    log_probs = torch.rand(len(rows), 50, generator=random).log_softmax(-1).topk(4)
    return Sample(
        sample_id=f"s{number}",
        token_ids_T=torch.randint(1, 50, (length,), generator=random),
        loss_mask_T=mask_T,
        hidden_TD=torch.randn(length, 8, generator=random),
        taps_TLD=torch.randn(length, 1, 8, generator=random),
        teacher=Teacher(
            row_M=rows,
            ids_MC=log_probs.indices,
            log_probs_MC=log_probs.values.half().float(),
            log_sum_exp_M=torch.randn(len(rows), generator=random),
        ),
        category="chat",
    )


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return [_sample(number, length) for number, length in enumerate(LENGTHS)]


@pytest.fixture
def cache(tmp_path: Path, samples: list[Sample]) -> Path:
    path = tmp_path / "cache"
    identity = CacheIdentity(
        format_version=FORMAT_VERSION,
        target_name="tiny",
        target_fingerprint="a",
        tokenizer_hash="b",
        template_hash="c",
        hidden_state="post_norm",
        target_layer_ids=(0,),
        dtype="float32",
        codec="float32",
        top_k=4,
        engine="hf",
        engine_version="transformers 5",
        quantization=None,
        hidden_size=8,
        vocab_size=50,
        git_commit=None,
    )
    planned = [PlannedSample(s.sample_id, s.num_tokens, content_hash(s.token_ids_T.tolist(), s.loss_mask_T.tolist())) for s in samples]
    writer = CacheWriter(path=path, identity=identity, samples=planned, shard_tokens=25)
    for index, ids in writer.missing_shards():
        writer.write_shard(index, [sample for sample in samples if sample.sample_id in ids])
    writer.finish()
    return path


def _equal(mine: object, theirs: object) -> bool:
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, Teacher) and isinstance(theirs, Teacher):
        return all(_equal(getattr(mine, name), getattr(theirs, name)) for name in Teacher.__dataclass_fields__)
    return mine == theirs


@pytest.fixture
def equal() -> Callable[[object, object], bool]:
    """Equality of tensors, teachers and plain values, dtype included."""
    return _equal
