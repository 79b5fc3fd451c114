"""Opens the cache that training reads: in a folder, behind a URL, or still in the making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.cache.format import check_fields
from mtp_train.cache.growing import GrowingCache
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.remote import RemoteCache
from mtp_train.cache.wanted import Mode
from mtp_train.quantity import parse_bytes
from mtp_train.trainer.data import Cache


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Where the shards of a cache behind a URL are kept, and how much of them (80GB, 64GiB, or bytes)."""

    folder: str
    max_bytes: str | int


def open_cache(where: str, *, mode: Mode, fetch: Fetch, expected: Mapping[str, Any]) -> Cache:
    """The cache in the folder, or behind the URL, ``where``. ``expected``: fields of its identity.

    Errors: ValueError where it was made for another target (with both values), or is behind a URL and ``mode`` is not offline.
    """
    cache: Cache
    if "://" in where:
        if mode != "offline":
            raise ValueError(f"mode: expected offline with a cache behind a URL, found {mode}; precompute writes into a folder")
        cache = RemoteCache(where, folder=Path(fetch.folder), max_bytes=parse_bytes(fetch.max_bytes, where="fetch.max_bytes"))
    else:
        cache = CacheReader(Path(where), verify="first_read") if mode == "offline" else GrowingCache(Path(where))
    check_fields(expected, cache.identity, where=cache.path)
    return cache
