"""Caches of random numbers: small, with a teacher and taps, in four shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
from mtp_train.cache.plan import PlannedSample, content_hash
from mtp_train.cache.writer import CacheWriter
from mtp_train.records import Sample, Teacher

HIDDEN, VOCAB, TOP_K = 16, 300, 5


def _identity() -> CacheIdentity:
    return CacheIdentity(
        format_version=FORMAT_VERSION,
        target_name="tiny",
        target_fingerprint="aa11",
        tokenizer_hash="bb22",
        template_hash="cc33",
        hidden_state="post_norm",
        target_layer_ids=(0, 1),
        dtype="float32",
        codec="float32",
        top_k=TOP_K,
        engine="hf",
        engine_version="transformers 5",
        quantization=None,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        git_commit="abc",
    )


def _sample(number: int, length: int, identity: CacheIdentity) -> Sample:
    random = torch.Generator().manual_seed(number)
    mask_T = torch.zeros(length, dtype=torch.bool)
    mask_T[length // 2 :] = True
    rows = mask_T[1:].nonzero(as_tuple=True)[0]
    top_k, dtype = identity.top_k, torch.bfloat16 if identity.codec == "bf16" else torch.float32
    teacher = None
    if top_k is not None:
        probabilities = torch.rand(len(rows), identity.vocab_size, generator=random).log_softmax(-1).topk(top_k)
        teacher = Teacher(
            row_M=rows,
            ids_MC=probabilities.indices,
            log_probs_MC=probabilities.values.half().float(),
            log_sum_exp_M=torch.randn(len(rows), generator=random),
        )
    taps = len(identity.target_layer_ids)
    return Sample(
        sample_id=f"sample-{number}",
        token_ids_T=torch.randint(0, identity.vocab_size, (length,), generator=random),
        loss_mask_T=mask_T,
        hidden_TD=torch.randn(length, identity.hidden_size, generator=random).to(dtype),
        taps_TLD=torch.randn(length, taps, identity.hidden_size, generator=random).to(dtype) if taps else None,
        teacher=teacher,
        category=("chat", "code")[number % 2],
    )


class Source:
    """Samples, and the cache they make: 10 samples of 3 to 12 tokens in four shards of at most 24."""

    def __init__(self, identity: CacheIdentity, lengths: tuple[int, ...] = (3, 12, 7, 9, 4, 11, 5, 8, 6, 10)) -> None:
        self.identity = identity
        self.samples = [_sample(number, length, identity) for number, length in enumerate(lengths)]

    def poison(self, number: int, **changes: object) -> None:
        self.samples[number] = replace(self.samples[number], **changes)

    def planned(self) -> list[PlannedSample]:
        return [
            PlannedSample(s.sample_id, s.num_tokens, content_hash(s.token_ids_T.tolist(), s.loss_mask_T.tolist())) for s in self.samples
        ]

    def writer(self, path: Path, *, shard_tokens: int = 24) -> CacheWriter:
        return CacheWriter(path=path, identity=self.identity, samples=self.planned(), shard_tokens=shard_tokens)

    def write(self, path: Path, *, shard_tokens: int = 24) -> list[int]:
        """Write, or continue, the whole cache; returns the shards that had to be made."""
        writer = self.writer(path, shard_tokens=shard_tokens)
        by_id = {sample.sample_id: sample for sample in self.samples}
        made = []
        for index, sample_ids in writer.missing_shards():
            writer.write_shard(index, (by_id[sample_id] for sample_id in sample_ids))
            made.append(index)
        writer.finish()
        return made


@pytest.fixture
def identity() -> CacheIdentity:
    return _identity()


@pytest.fixture
def source(identity: CacheIdentity) -> Source:
    return Source(identity)


@pytest.fixture
def make_source() -> Callable[..., Source]:
    return Source


def _contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """The whole folder, byte for byte: leftovers show as extra names."""
    return _contents
