"""Writes a finished cache once more in another form, from its own states: the target is not run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mtp_train.cache.format import CacheIdentity, Manifest
from mtp_train.cache.plan import PlannedSample, content_hash
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.writer import CacheWriter
from mtp_train.records import Sample


def recode(source: CacheReader, *, codec: str, out: Path) -> Manifest:
    """The samples of ``source`` in ``out`` with another codec, all else as it was. Killed, the same call continues.

    The states are those that ``source`` gives: what its own codec has rounded stays rounded. Errors: ValueError as
    ``CacheWriter`` raises it.
    """
    return rewrite(source, identity=replace(source.identity, codec=codec), change=lambda sample: sample, out=out)


def rewrite(source: CacheReader, *, identity: CacheIdentity, change: Callable[[Sample], Sample], out: Path) -> Manifest:
    """Every sample of ``source``, changed, in ``out``, shard by shard under ``identity``. Killed, the same call continues.

    ``change`` keeps a sample's tokens and mask. Errors: ValueError as ``CacheWriter`` raises it.
    """
    planned = [
        PlannedSample(sample.sample_id, sample.num_tokens, content_hash(sample.token_ids_T.tolist(), sample.loss_mask_T.tolist()))
        for sample in (source[number] for number in range(len(source)))
    ]
    largest = max(shard.num_tokens for shard in source.manifest.shards)
    writer = CacheWriter(path=out, identity=identity, samples=planned, shard_tokens=largest)
    number_of = {sample_id: number for number, sample_id in enumerate(source.sample_ids)}
    for index, sample_ids in writer.missing_shards():
        writer.write_shard(index, (change(source[number_of[sample_id]]) for sample_id in sample_ids))
    return writer.finish()
