"""Reads a finished cache: memory-mapped, each shard's checksum verified before its first sample is used."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from mtp_train.cache.format import MANIFEST, PLAN, CacheIdentity, Manifest, ShardInfo, shard_name, shard_path, sidecar_path
from mtp_train.cache.plan import CachePlan
from mtp_train.cache.shard import OpenShard
from mtp_train.records import Sample
from mtp_train.runtime import sha256_file

Verify = Literal["first_read", "none"]


def check_shard(path: Path, info: ShardInfo) -> None:
    """Compare a shard with its manifest entry; ValueError names it, what was expected and found, and the remedy."""
    remedy = f"delete {path.name} and rerun precompute, which makes only this shard anew"
    if not path.exists():
        raise ValueError(f"{path}: expected a shard of {info.num_bytes} bytes (sha256 {info.sha256}), found no file; {remedy}")
    size = path.stat().st_size
    found = sha256_file(path)
    if size != info.num_bytes or found != info.sha256:
        raise ValueError(f"{path}: expected {info.num_bytes} bytes of sha256 {info.sha256}, found {size} bytes of sha256 {found}; {remedy}")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the cache in ``path``; ValueError says how far precompute got where there is none."""
    if (path / MANIFEST).exists():
        return Manifest.read(path / MANIFEST)
    if not (path / PLAN).exists():
        raise ValueError(f"{path}: expected a cache ({MANIFEST}), found none; run precompute first, or name another folder")
    plan = CachePlan.read(path)
    done = sum(1 for index in range(plan.num_shards) if sidecar_path(shard_path(path, shard_name(index))).exists())
    raise ValueError(
        f"{path}: expected a finished cache, found {done} of {plan.num_shards} shards; run the same precompute again, it continues"
    )


class CacheReader:
    """The samples of a cache by number: ``reader[i]``. Safe to use from several threads.

    ``verify``: ``first_read`` hashes each shard before its first sample is used; ``none`` trusts the disk. The lists
    hold one entry per sample (``shards``: the shard that it lies in) and come from the manifest, so that nothing is opened for
    them. ``hidden_TD`` of a sample
    is a view of the mapped file in the codec's dtype: private to this process, never written back.
    """

    def __init__(self, path: Path, *, verify: Verify) -> None:
        if verify not in get_args(Verify):
            raise ValueError(f"verify: expected one of {get_args(Verify)}, found {verify!r}")
        self.path = path
        self._verify = verify
        self.manifest = read_manifest(path)
        if self.manifest.num_loss_tokens == 0:
            raise ValueError(f"{path}: expected tokens with a loss, found an empty loss mask over all {self.manifest.num_samples} samples")
        shards = self.manifest.shards
        self._paths = [shard_path(path, shard.name) for shard in shards]
        self.sample_ids: list[str] = [entry for shard in shards for entry in shard.sample_ids]
        self.categories: list[str] = [entry for shard in shards for entry in shard.categories]
        self.lengths: list[int] = [entry for shard in shards for entry in shard.lengths]
        self.num_loss_tokens: list[int] = [entry for shard in shards for entry in shard.num_loss_tokens]
        self.num_teacher_rows: list[int] = [entry for shard in shards for entry in shard.num_teacher_rows]
        self.shards: list[int] = [index for index, shard in enumerate(shards) for _ in shard.sample_ids]
        self._first = [0]  # number of the first sample of each shard
        for shard in shards:
            self._first.append(self._first[-1] + len(shard.sample_ids))
        self._open: dict[int, OpenShard] = {}
        self._lock = threading.Lock()

    @property
    def identity(self) -> CacheIdentity:
        return self.manifest.identity

    def checksums(self) -> list[str]:
        """What tells this cache's content from another's."""
        return [shard.sha256 for shard in self.manifest.shards]

    def shard_bytes(self) -> list[int]:
        """The size of each shard."""
        return [shard.num_bytes for shard in self.manifest.shards]

    @property
    def is_local(self) -> bool:
        """Whether nobody has to be told what is read next."""
        return True

    @property
    def is_whole(self) -> bool:
        """Whether all shards can lie on the disk at once."""
        return True

    def prepare(self, most_bytes: int) -> None:
        """Training reads shards of up to so many bytes at once: no matter here."""

    def expect(self, shards: Sequence[int]) -> None:
        """Training reads these shards next: all of them are here."""

    def done(self) -> None:
        """Nothing more is read."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = bisect_right(self._first, number) - 1
        return self._shard(shard).sample(number - self._first[shard])

    def _shard(self, index: int) -> OpenShard:
        with self._lock:
            if index not in self._open:
                path, info = self._paths[index], self.manifest.shards[index]
                if self._verify == "first_read":
                    check_shard(path, info)
                elif not path.exists():
                    raise ValueError(f"{path}: expected a shard, found no file; rerun precompute, which makes only this shard anew")
                self._open[index] = OpenShard(path=path, info=info, identity=self.identity)
            return self._open[index]
