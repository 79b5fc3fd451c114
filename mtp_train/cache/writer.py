"""Writes a cache shard by shard; killed at any byte, the same call continues and ends with the same bytes."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mtp_train.cache.format import MANIFEST, PLAN, CacheIdentity, Manifest, ShardInfo, shard_name, shard_path, sidecar_path
from mtp_train.cache.plan import CachePlan, PlannedSample
from mtp_train.cache.shard import ShardBuilder, metadata
from mtp_train.records import Sample
from mtp_train.runtime import atomic_path, atomic_write_json, log, sha256_file

# What ``runtime.atomic_path`` leaves behind of our files when it is killed, and what claims a dead worker does (``cache/claim.py``).
_LEFTOVER = re.compile(r"\.(?:(shard-\d{5,}|manifest|plan)\.(?:safetensors|json)\.\d+-[0-9a-f]{8}\.tmp|shard-\d{5,}\.claim\.\d+)")
_OS_ERROR = re.compile(r"os error (\d+)")
# Shards that are hashed at once when the cache is completed; hashing leaves the interpreter free.
_HASHERS = 4


class CacheWriter:
    """Writes a cache into ``path`` according to a plan that is fixed, and stored, before the first shard.

    Use: ``for index, sample_ids in writer.missing_shards(): writer.write_shard(index, engine.prefill(...))``, then
    ``writer.finish()``. Several processes may have a writer on one folder, on several machines (``cache/sharing.py`` says who
    writes what); two that write the same shard do no harm. Errors: ValueError where ``path`` holds a cache begun
    with another identity, other samples or another shard size, or cannot be written.
    """

    def __init__(self, *, path: Path, identity: CacheIdentity, samples: Iterable[PlannedSample], shard_tokens: int) -> None:
        self.path = path
        plan = CachePlan.make(identity=identity, shard_tokens=shard_tokens, samples=samples)
        self._done: dict[int, ShardInfo] = {}  # hashed, or written, by this writer
        self._glanced: dict[int, ShardInfo] = {}  # with a sidecar of this plan, and of the size that it says
        with self._writing(path, needed_bytes=0):
            path.mkdir(parents=True, exist_ok=True)
        if not (path / PLAN).exists():
            with self._writing(path / PLAN, needed_bytes=0):
                plan.write(path)
        begun = CachePlan.read(path)
        plan.check_continues(begun, folder=path)
        self.plan = plan = begun  # the same but for what is informative: the first run's statement stays
        self._plan_sha256 = plan.sha256()

    @property
    def num_shards(self) -> int:
        return self.plan.num_shards

    def missing_shards(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """(shard, its sample ids) of each shard not done yet. Done: a sidecar of this plan, and size and sha256 agree.

        Each shard on disk is hashed once per writer.
        """
        for index in range(self.num_shards):
            if not self._is_done(index):
                yield index, self.sample_ids(index)

    def sample_ids(self, index: int) -> tuple[str, ...]:
        """The samples of a shard, in its order."""
        return tuple(sample.sample_id for sample in self.plan.shard(index))

    def looks_done(self, index: int) -> bool:
        """Whether a shard has a sidecar of this plan and the size that it says: nothing is hashed, and what was seen once is believed."""
        return index in self._done or index in self._glanced or self._glance(index) is not None

    def forget(self, index: int) -> None:
        """Look again whether a shard is there: somebody may have deleted it."""
        self._done.pop(index, None)
        self._glanced.pop(index, None)

    def verify(self) -> bool:
        """Hash what this writer has neither written nor hashed, several shards at once; False where one does not hold what its
        sidecar says. It then counts as missing, for every worker."""
        with ThreadPoolExecutor(max_workers=_HASHERS) as pool:
            return all(list(pool.map(self._is_done, range(self.num_shards))))

    def write_shard(self, index: int, samples: Iterable[Sample]) -> None:
        """Write one shard from its samples, in the plan's order (an engine's generator may make them as they are needed).

        Samples with a number that is not finite are left out and listed with the reason. A shard that another worker has
        written meanwhile is left as it is. Errors: ValueError where the disk is full or not writable; shards that are done
        stay, and the same command continues.
        """
        planned = self.plan.shard(index)
        path = shard_path(self.path, shard_name(index))
        needed_bytes = self.plan.most_bytes(index)
        if self.looks_done(index):  # by a worker that took it over while this one was stopped
            deque(samples, maxlen=0)
            return
        with self._writing(path, needed_bytes=needed_bytes):
            (self.path / MANIFEST).unlink(missing_ok=True)  # while a shard is missing, the cache is not complete
            sidecar_path(path).unlink(missing_ok=True)
            self._remove_leftovers(of=path.stem)
            if shutil.disk_usage(self.path).free < needed_bytes:  # before the target is run for nothing
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        builder = ShardBuilder(identity=self.plan.identity, num_tokens=sum(sample.num_tokens for sample in planned))
        received = iter(samples)
        for expected in planned:
            sample = next(received, None)
            assert sample is not None, f"shard {index}: the engine returned no sample {expected.sample_id!r}"
            expected.check(sample)
            builder.add(sample)
        extra = next(received, None)
        assert extra is None, f"shard {index}: the engine returned a sample too many, {extra.sample_id!r}"
        if self.looks_done(index):
            return
        with self._writing(path, needed_bytes=needed_bytes):
            info = self._write(builder, path)
        if info is None:
            log(f"{path.name}: another worker has taken it over, and writes it")
            return
        if info.quarantined:
            log(f"{path.name}: {len(info.quarantined)} of {len(planned)} samples quarantined, {info.quarantined[0].reason}")
        self._done[index] = info

    def finish(self) -> Manifest:
        """Write the manifest: the cache is complete. Errors: ValueError where shards are missing or nothing is trainable."""
        missing = [index for index in range(self.num_shards) if not self._is_done(index)]
        if missing:
            raise ValueError(
                f"{self.path}: expected {self.num_shards} shards, {len(missing)} are missing, the first is {shard_name(missing[0])}"
            )
        shards = tuple(self._done[index] for index in range(self.num_shards))
        manifest = Manifest(identity=self.plan.identity, plan_sha256=self._plan_sha256, shards=shards)
        if manifest.num_loss_tokens == 0:
            raise ValueError(
                f"{self.path}: expected tokens that the target wrote itself (loss mask), found none in {manifest.num_samples} samples "
                f"({len(manifest.quarantined)} quarantined): nothing could be learned from this cache"
            )
        with self._writing(self.path / MANIFEST, needed_bytes=0):
            try:
                atomic_write_json(self.path / MANIFEST, manifest.to_json())
            except FileNotFoundError:  # another worker, which took this one for dead, wrote the same and cleaned up
                if not (self.path / MANIFEST).exists():
                    raise
            self._remove_leftovers(of=None)
        return manifest

    def _remove_leftovers(self, *, of: str | None) -> None:
        """Delete what killed processes left: unfinished files of the shard named, which is about to be written, or with None all
        that there is, since all shards are done. Other processes may be writing other shards now."""
        for entry in list(self.path.iterdir()):
            found = _LEFTOVER.fullmatch(entry.name)
            if found and of in (None, found[1]):
                entry.unlink(missing_ok=True)

    def _write(self, builder: ShardBuilder, path: Path) -> ShardInfo | None:
        """Write shard and sidecar; None where the unfinished file was removed by a worker that took the shard over."""
        from safetensors.torch import save_file

        try:
            with atomic_path(path) as temporary:
                save_file(builder.tensors(), temporary, metadata=metadata(self.plan.identity))
                sha256, num_bytes = sha256_file(temporary), temporary.stat().st_size
            info = builder.info(name=path.name, sha256=sha256, num_bytes=num_bytes, plan_sha256=self._plan_sha256)
            atomic_write_json(sidecar_path(path), info.to_sidecar())
        except FileNotFoundError:
            if not self.path.is_dir():
                raise
            return None
        return info

    def _glance(self, index: int) -> ShardInfo | None:
        """What a shard's sidecar says, where it is of this plan and the file has the size that it says."""
        path = shard_path(self.path, shard_name(index))
        sidecar = sidecar_path(path)
        if not sidecar.exists() or not path.exists():
            return None
        try:
            info = ShardInfo.from_sidecar(sidecar)
            num_bytes = path.stat().st_size
        except FileNotFoundError:  # deleted meanwhile
            return None
        except ValueError as error:
            log(f"{sidecar.name} cannot be read and its shard is made anew: {error}")
            return None
        if info.plan_sha256 != self._plan_sha256 or info.name != path.name:
            log(f"{path.name} is of another plan and is made anew")
            return None
        if num_bytes != info.num_bytes:
            log(f"{path.name} does not hold what its sidecar says (size) and is made anew")
            return None
        self._glanced[index] = info
        return info

    def _is_done(self, index: int) -> bool:
        if index in self._done:
            return True
        info = self._glance(index)
        if info is None:
            return False
        path = shard_path(self.path, info.name)
        if sha256_file(path) != info.sha256:
            log(f"{path.name} does not hold what its sidecar says (sha256) and is made anew")
            self.forget(index)
            sidecar_path(path).unlink(missing_ok=True)
            return False
        self._done[index] = info
        return True

    @contextmanager
    def _writing(self, path: Path, *, needed_bytes: int) -> Iterator[None]:
        """Turn what the operating system refuses into a message for the user."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            code = error.errno if isinstance(error, OSError) else int(found[1]) if (found := _OS_ERROR.search(str(error))) else None
            if code is None:
                raise
            raise ValueError(
                f"{path}: expected to write {needed_bytes} bytes, found: {os.strerror(code)} ({free_bytes(path)} bytes free there). "
                f"{len(self._done)} finished shards are kept; make room or choose another folder, then run the same command again"
            ) from error


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that ``path`` would lie on."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free
