"""Writes a cache shard by shard; killed at any byte, the same call continues and ends with the same bytes."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mtp_train.cache.codec import bytes_per_token
from mtp_train.cache.format import MANIFEST, PLAN, CacheIdentity, Manifest, ShardInfo, shard_name, shard_path, sidecar_path
from mtp_train.cache.plan import CachePlan, PlannedSample
from mtp_train.cache.shard import ShardBuilder, metadata
from mtp_train.records import Sample
from mtp_train.runtime import atomic_path, atomic_write_json, log, sha256_file

# What ``runtime.atomic_path`` leaves behind of our files when it is killed.
_LEFTOVER = re.compile(r"\.(shard-\d{5,}\.(safetensors|json)|manifest\.json|plan\.json)\.\d+\.tmp")
_OS_ERROR = re.compile(r"os error (\d+)")


class CacheWriter:
    """Writes a cache into ``path`` according to a plan that is fixed, and stored, before the first shard.

    Use: ``for index, sample_ids in writer.missing_shards(): writer.write_shard(index, engine.prefill(...))``, then
    ``writer.finish()``. Several processes may have a writer on one folder, if each writes other shards and one of them
    finishes when all are done. Errors: ValueError where ``path`` holds a cache begun
    with another identity, other samples or another shard size, or cannot be written.
    """

    def __init__(self, *, path: Path, identity: CacheIdentity, samples: Iterable[PlannedSample], shard_tokens: int) -> None:
        self.path = path
        plan = CachePlan.make(identity=identity, shard_tokens=shard_tokens, samples=samples)
        self._done: dict[int, ShardInfo] = {}
        with self._writing(path, needed_bytes=0):
            path.mkdir(parents=True, exist_ok=True)
        if (path / PLAN).exists():
            begun = CachePlan.read(path)
            plan.check_continues(begun, folder=path)
            plan = begun  # the same but for what is informative: the first run's statement stays
        else:
            with self._writing(path / PLAN, needed_bytes=0):
                plan.write(path)
        self.plan = plan
        self._plan_sha256 = plan.sha256()

    @property
    def num_shards(self) -> int:
        return self.plan.num_shards

    def missing_shards(self, among: Iterable[int] | None = None) -> Iterator[tuple[int, tuple[str, ...]]]:
        """(shard, its sample ids) of each shard, or of those ``among`` the given ones, not done yet. Done: a sidecar of this plan,
        and size and sha256 agree.

        Each shard on disk is hashed once per writer.
        """
        for index in range(self.num_shards) if among is None else among:
            if not self._is_done(index):
                yield index, tuple(sample.sample_id for sample in self.plan.shard(index))

    def num_unwritten(self) -> int:
        """Shards without a sidecar, at a glance: nothing is hashed."""
        return sum(not sidecar_path(shard_path(self.path, shard_name(index))).exists() for index in range(self.num_shards))

    def write_shard(self, index: int, samples: Iterable[Sample]) -> ShardInfo:
        """Write one shard from its samples, in the plan's order (an engine's generator may make them as they are needed).

        Samples with a number that is not finite are left out and listed with the reason. Errors: ValueError where the
        disk is full or not writable; shards that are done stay, and the same command continues.
        """
        planned = self.plan.shard(index)
        num_tokens = sum(sample.num_tokens for sample in planned)
        path = shard_path(self.path, shard_name(index))
        needed_bytes = self._needed_bytes(num_tokens)
        with self._writing(path, needed_bytes=needed_bytes):
            (self.path / MANIFEST).unlink(missing_ok=True)  # while a shard is missing, the cache is not complete
            sidecar_path(path).unlink(missing_ok=True)
            self._remove_leftovers(of=path.stem)
            if shutil.disk_usage(self.path).free < needed_bytes:  # before the target is run for nothing
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        builder = ShardBuilder(identity=self.plan.identity, num_tokens=num_tokens)
        received = iter(samples)
        for expected in planned:
            sample = next(received, None)
            assert sample is not None, f"shard {index}: the engine returned no sample {expected.sample_id!r}"
            expected.check(sample)
            builder.add(sample)
        extra = next(received, None)
        assert extra is None, f"shard {index}: the engine returned a sample too many, {extra.sample_id!r}"
        with self._writing(path, needed_bytes=needed_bytes):
            info = self._write(builder, path)
        if info.quarantined:
            log(f"{path.name}: {len(info.quarantined)} of {len(planned)} samples quarantined, {info.quarantined[0].reason}")
        self._done[index] = info
        return info

    def finish(self) -> Manifest:
        """Write the manifest: the cache is complete. Errors: ValueError where shards are missing or nothing is trainable."""
        missing = [index for index, _ in self.missing_shards()]
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
            self._remove_leftovers(of="")
            atomic_write_json(self.path / MANIFEST, manifest.to_json())
        return manifest

    def _remove_leftovers(self, *, of: str) -> None:
        """Delete what killed processes left of the files whose name begins with ``of``.

        Only of a shard about to be written, or of all when all are: other processes may be writing other shards now.
        """
        for entry in list(self.path.iterdir()):
            if _LEFTOVER.fullmatch(entry.name) and entry.name.startswith(f".{of}"):
                entry.unlink(missing_ok=True)

    def _needed_bytes(self, num_tokens: int) -> int:
        """An upper bound of a shard's size: every token an answer, and room for its header and sidecar."""
        identity = self.plan.identity
        per_token = bytes_per_token(
            codec=identity.codec,
            hidden_size=identity.hidden_size,
            num_taps=identity.num_taps,
            vocab_size=identity.vocab_size,
            top_k=identity.top_k,
            answer_share=1.0,
        )
        return int(num_tokens * per_token) + (1 << 16)

    def _write(self, builder: ShardBuilder, path: Path) -> ShardInfo:
        from safetensors.torch import save_file

        with atomic_path(path) as temporary:
            save_file(builder.tensors(), temporary, metadata=metadata(self.plan.identity))
            sha256, num_bytes = sha256_file(temporary), temporary.stat().st_size
        info = builder.info(name=path.name, sha256=sha256, num_bytes=num_bytes, plan_sha256=self._plan_sha256)
        atomic_write_json(sidecar_path(path), info.to_sidecar())
        return info

    def _is_done(self, index: int) -> bool:
        if index in self._done:
            return True
        path = shard_path(self.path, shard_name(index))
        sidecar = sidecar_path(path)
        if not sidecar.exists() or not path.exists():
            return False
        try:
            info = ShardInfo.from_sidecar(sidecar)
        except ValueError as error:
            log(f"{sidecar.name} cannot be read and its shard is made anew: {error}")
            return False
        if info.plan_sha256 != self._plan_sha256 or info.name != path.name:
            log(f"{path.name} is of another plan and is made anew")
            return False
        if path.stat().st_size != info.num_bytes or sha256_file(path) != info.sha256:
            log(f"{path.name} does not hold what its sidecar says (size or sha256) and is made anew")
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
