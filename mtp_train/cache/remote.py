"""Reads a finished cache that lies behind a URL: each shard is fetched when it is needed, or before, and kept within a limit of bytes.

What a URL means is fsspec's (s3://, gs://, http://, memory://, ...). Fetched shards lie in a folder that several processes, and
several trainings, may use at once (``FetchedFolder``).
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mtp_train.cache.fetched import FetchedFolder
from mtp_train.cache.format import MANIFEST, ShardInfo, shard_path
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.shard import OpenShard
from mtp_train.quantity import show_bytes
from mtp_train.runtime import atomic_path, local_place, log, sha256_file

_ATTEMPTS, _PAUSE_S = 4, 1.0
# Shards fetched at once, ahead of their use.
_FETCHES = 4


class RemoteCache(CacheReader):
    """A cache behind ``url``; of its shards, and of those of other caches that use ``folder``, at most ``max_bytes`` lie there,
    whichever processes of this machine fetch them.

    The least recently used shards make room, those that ``expect`` has announced last. A shard that is needed now waits for what
    arrives, where only that can make room, and is not fetched by a second process while one fetches it; where another's fetch has
    not ended in ten minutes, it is fetched all the same, beyond the limit. Each is hashed when it arrives, and one that an earlier
    process has left when it is first used. Errors: ValueError for a protocol whose package is missing, a file that cannot
    be had after four attempts, and a shard larger than ``max_bytes``.
    """

    def __init__(self, url: str, *, folder: Path, max_bytes: int) -> None:
        self.url = url.rstrip("/")
        self._folder, self._max_bytes = FetchedFolder(folder, max_bytes=max_bytes), max_bytes
        self._local = folder / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._files, self._root = _file_system(self.url)
        self._room, self._fetching = threading.Lock(), dict[int, Future[None]]()
        self._announced: set[int] = set()
        self._whole: set[int] = set()  # hashed by this process since they were fetched
        self._pool = ThreadPoolExecutor(max_workers=_FETCHES, thread_name_prefix="fetch")
        self._local.mkdir(parents=True, exist_ok=True)
        if local_place()[0] == 0:
            self._folder.clear()
        self._fetch(MANIFEST, None)
        super().__init__(self._local, verify="first_read")
        largest = max(self.shard_bytes())
        if largest > max_bytes:
            raise ValueError(
                f"fetch.max_bytes: expected room for {show_bytes(largest)} ({largest} bytes), the largest shard of {self.url}, "
                f"found {max_bytes}; raise it, or precompute with a smaller shard_tokens"
            )

    @property
    def is_local(self) -> bool:
        return False

    @property
    def is_whole(self) -> bool:
        return sum(self.shard_bytes()) <= self._max_bytes

    def prepare(self, most_bytes: int) -> None:
        """Training reads shards of up to so many bytes at once. Errors: ValueError where that is more than may be kept."""
        if most_bytes > self._max_bytes:
            raise ValueError(
                f"fetch.max_bytes: expected at least {show_bytes(most_bytes)} ({most_bytes} bytes), what training reads from at once, "
                f"found {self._max_bytes}; raise it, or set shuffle_shards (a smaller one), which samples are shuffled over"
            )

    def expect(self, shards: Sequence[int]) -> None:
        """Fetch these shards ahead, in this order, as far as all of them have room together."""
        room, announced = self._max_bytes, []
        for index in shards:
            room -= self.manifest.shards[index].num_bytes
            if room < 0:
                break
            announced.append(index)
        with self._room:
            self._announced = set(announced)
            missing = [index for index in announced if index not in self._fetching and not self._path(index).exists()]
            for index in missing[: max(0, 2 * _FETCHES - len(self._fetching))]:
                self._fetching[index] = self._pool.submit(self._fetch_ahead, index)

    def done(self) -> None:
        """Stop fetching ahead; harmless when repeated."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _shard(self, index: int) -> OpenShard:
        with self._lock:
            path = self._path(index)
            try:
                os.utime(path)  # used now
            except FileNotFoundError:
                self._open.pop(index, None)
            while index not in self._open:
                try:
                    with self._having(index):
                        self._open[index] = OpenShard(path=path, info=self.manifest.shards[index], identity=self.identity)
                except (FileNotFoundError, RuntimeError):  # as torch calls it where safetensors maps through torch
                    if path.exists() or not self._local.is_dir():
                        raise
                    continue  # another process made room
                for other in [held for held in self._open if not self._path(held).exists()]:
                    if other != index:
                        del self._open[other]  # a deleted file takes room until nobody maps it
            return self._open[index]

    @contextmanager
    def _having(self, index: int) -> Iterator[None]:
        """Have a shard in the folder, whole; one that had to be fetched for it stays there until the block ends."""
        with self._room:
            fetching = self._fetching.pop(index, None)
        if fetching is not None and not fetching.cancel():  # one that is not begun need not wait for its turn
            fetching.result()
        path, info = self._path(index), self.manifest.shards[index]
        if index not in self._whole and path.exists() and sha256_file(path) != info.sha256:
            log(f"{path} is not what the manifest of {self.url} says, and is fetched anew")
            path.unlink(missing_ok=True)
        with self._fetched(index, wait=True):
            self._whole.add(index)
            yield

    def _fetch_ahead(self, index: int) -> None:
        """Fetch a shard before it is needed; where another does, or leaves no room for it, it is had when it is."""
        with self._fetched(index, wait=False):
            pass
        with self._room:
            self._fetching.pop(index, None)

    @contextmanager
    def _fetched(self, index: int, *, wait: bool) -> Iterator[None]:
        info = self.manifest.shards[index]
        with self._room:
            kept = {self._path(announced) for announced in self._announced}
        with self._folder.room(self._path(index), info.num_bytes, kept=kept, wait=wait) as is_ours:
            if is_ours:
                self._fetch(info.name, info)
                self._whole.add(index)
            yield

    def _path(self, index: int) -> Path:
        return shard_path(self._local, self.manifest.shards[index].name)

    def _fetch(self, name: str, info: ShardInfo | None) -> None:
        """Copy one file into the folder; a shard must be what the manifest says."""
        failed = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2 ** (attempt - 1))
            try:
                with atomic_path(self._local / name) as temporary:
                    self._files.get_file(f"{self._root}/{name}", str(temporary))
                    failed = "" if info is None else _difference(temporary, info)
                    if failed:
                        raise ConnectionError(failed)
                return
            except (PermissionError, FileNotFoundError) as error:
                if not self._local.is_dir():
                    raise
                failed = str(error) or type(error).__name__
                # What is missing may be our own half-written manifest, which a process that has just started took for a leftover.
                if isinstance(error, PermissionError) or (info is None and not self._files.exists(f"{self._root}/{name}")):
                    break
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                failed = f"{type(error).__name__}: {error}"  # each protocol's library has errors of its own
        what = "a finished cache" if info is None else f"a shard of {info.num_bytes} bytes (sha256 {info.sha256})"
        raise ValueError(
            f"{self.url}/{name}: expected {what}, found none that could be read ({failed}); see whether it is there and may be read, "
            "then run the same command again: it continues"
        )


def _difference(path: Path, info: ShardInfo) -> str:
    size, found = path.stat().st_size, sha256_file(path)
    return "" if (size, found) == (info.num_bytes, info.sha256) else f"{size} bytes of sha256 {found}"


def _file_system(url: str):  # type: ignore[no-untyped-def]  # fsspec has no types
    """fsspec's file system for a URL, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{url}: expected a URL that fsspec can read, found: {error}; s3:// needs the package s3fs, gs:// gcsfs, "
            "http:// and https:// aiohttp (pip install 'mtp-train[remote]')"
        ) from error
