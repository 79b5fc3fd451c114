"""Writes a finished cache once more with another codec, from its own states: the target is not run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mtp_train.cache.format import Manifest
from mtp_train.cache.plan import PlannedSample, content_hash
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.writer import CacheWriter


def recode(source: CacheReader, *, codec: str, out: Path) -> Manifest:
    """The samples of ``source`` in ``out``, shard by shard, all else as it was. Killed, the same call continues.

    The states are those that ``source`` gives: what its own codec has rounded stays rounded. Errors: ValueError as
    ``CacheWriter`` raises it.
    """
    planned = [
        PlannedSample(sample.sample_id, sample.num_tokens, content_hash(sample.token_ids_T.tolist(), sample.loss_mask_T.tolist()))
        for sample in (source[number] for number in range(len(source)))
    ]
    largest = max(shard.num_tokens for shard in source.manifest.shards)
    writer = CacheWriter(path=out, identity=replace(source.identity, codec=codec), samples=planned, shard_tokens=largest)
    number_of = {sample_id: number for number, sample_id in enumerate(source.sample_ids)}
    for index, sample_ids in writer.missing_shards():
        writer.write_shard(index, (source[number_of[sample_id]] for sample_id in sample_ids))
    return writer.finish()
