"""Shares the shards of one cache between any number of workers that know nothing of each other but the folder."""

from __future__ import annotations

import time
from collections.abc import Iterable

from mtp_train.cache.claim import Claims
from mtp_train.cache.format import MANIFEST, Manifest, shard_name
from mtp_train.cache.writer import CacheWriter

# The name under which one worker completes the cache.
_MANIFEST = MANIFEST.removesuffix(".json")


class Work:
    """One worker's part in a cache: ``take`` a free shard, write it, ``done``; and ``finish`` when there is none to wait for.

    Shards go to whoever comes first, so that a slow worker holds up nothing but the shard it is at. What a worker that died had
    claimed is taken over by the next that asks (``Claims``).
    """

    def __init__(self, *, writer: CacheWriter, claims: Claims) -> None:
        self._writer, self._claims = writer, claims
        self._waited = False

    def take(self, order: Iterable[int]) -> int | None:
        """Claim the first shard in ``order`` that is neither written nor claimed; None where there is none at the moment."""
        for index in order:
            name = _claim_name(index)
            if self._writer.looks_done(index) or self._claims.holds(name) or not self._claims.take(name):
                continue
            if not self._writer.looks_done(index):
                return index
            self._claims.release(name)  # written between the look and the claim
        return None

    def done(self, index: int) -> None:
        self._claims.release(_claim_name(index))

    def waits_for(self) -> str | None:
        """What others are still at, for people; None where every shard is written."""
        for index in range(self._writer.num_shards):
            if not self._writer.looks_done(index):
                return f"{shard_name(index)} ({self._claims.holder(_claim_name(index)) or 'free'})"
        return None

    def finish(self, *, look_s: float) -> Manifest | None:
        """Verify and complete the cache, all shards of which look written; its manifest, be it this worker's or that of another,
        which is looked after every ``look_s`` seconds. None where a shard was found damaged: it is free again.
        """
        while not self._claims.take(_MANIFEST):
            self._waited = True
            time.sleep(look_s)
        try:
            path = self._writer.path / MANIFEST
            if self._waited and path.exists():
                return Manifest.read(path)
            if self._writer.verify():
                return self._writer.finish()
            path.unlink(missing_ok=True)
            return None
        finally:
            self._claims.release(_MANIFEST)


def _claim_name(index: int) -> str:
    return shard_name(index).removesuffix(".safetensors")
