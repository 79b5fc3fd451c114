"""What a training that runs beside precompute says to it: the shards that it reads next; and which shards precompute makes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtp_train.cache.format import MANIFEST, shard_name, shard_path, sidecar_path
from mtp_train.cache.writer import CacheWriter
from mtp_train.quantity import show_bytes
from mtp_train.runtime import atomic_write_json, read_object

WANTED = "wanted.json"
# offline: the whole cache is made, then trained on. stream: training runs beside, and what it is done with is dropped. hybrid:
# training runs beside, and everything is kept.
Mode = Literal["offline", "stream", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The shards that training reads from now on, those that it has begun first, then in the order in which it begins them.

    ``most_bytes``: what the shards that it needs at the same time take at the most, over the whole training. ``done``: it has ended.
    """

    plan_sha256: str
    shards: tuple[int, ...]
    most_bytes: int
    done: bool

    def write(self, folder: Path) -> None:
        content = {"plan_sha256": self.plan_sha256, "most_bytes": self.most_bytes, "done": self.done, "shards": list(self.shards)}
        atomic_write_json(folder / WANTED, content)

    @classmethod
    def read(cls, folder: Path) -> Wanted | None:
        """None where no training has said anything yet. Errors: ValueError where the file is damaged."""
        if not (folder / WANTED).exists():
            return None
        kinds = {"plan_sha256": str, "shards": list[int], "most_bytes": int, "done": bool}
        value = read_object(folder / WANTED, kinds, remedy="delete it; the training writes it anew")
        return cls(plan_sha256=value["plan_sha256"], shards=tuple(value["shards"]), most_bytes=value["most_bytes"], done=value["done"])


class Production:
    """Which shards are to be made, and in which order, as ``mode`` and the training beside say.

    ``stream`` makes the first of the wanted shards that ``max_bytes`` hold together, counted by their largest possible sizes, and
    deletes all others: however many workers do so, the folder's shards stay within it (but for those that a worker is at when the
    training goes back to an earlier state). Errors: ValueError where ``max_bytes`` is less than what the training needs at once,
    or ``stream`` would drop shards of a finished cache.
    """

    def __init__(self, *, writer: CacheWriter, mode: Mode, max_bytes: int | None) -> None:
        if (mode == "stream") != (max_bytes is not None):
            raise ValueError(f"max_bytes: expected a size with mode=stream and null with any other, found {max_bytes} with mode={mode}")
        if mode == "stream" and (writer.path / MANIFEST).exists():
            raise ValueError(
                f"{writer.path}: expected no finished cache, which mode=stream would drop, found {MANIFEST}; train on it with "
                "mode=offline, or stream into another folder (out=)"
            )
        self._writer, self._mode, self._max_bytes = writer, mode, max_bytes
        self._plan_sha256 = writer.plan.sha256()

    def order(self) -> Sequence[int]:
        """The shards to be made now, first things first; what is not wanted any more is dropped."""
        every = range(self._writer.num_shards)
        wanted = None if self._mode == "offline" else self._wanted()
        if wanted is None or (wanted.done and self._mode == "stream"):
            return () if self._mode == "stream" else every
        if self._max_bytes is None:
            return list(dict.fromkeys((*wanted.shards, *every)))
        if wanted.most_bytes > self._max_bytes:
            raise ValueError(
                f"max_bytes: expected at least {show_bytes(wanted.most_bytes)} ({wanted.most_bytes} bytes), what the training needs at "
                f"once, found {self._max_bytes}; raise it, or train with a smaller shuffle_shards, or precompute a smaller shard_tokens"
            )
        room, chosen = self._max_bytes, []
        for index in wanted.shards:
            room -= self._writer.plan.most_bytes(index)
            if room < 0:
                break
            chosen.append(index)
        self._drop_all_but(set(chosen))
        return chosen

    def waits_for(self) -> str | None:
        """What a stream waits for before there is more to make, for people; None where there is nothing to wait for."""
        if self._mode != "stream":
            return None
        if self._wanted() is None:
            return f"a training with mode=stream of the cache {self._writer.path}"
        return "the training, which has the shards that it needs next, as many as max_bytes hold"

    @property
    def is_over(self) -> bool:
        """Whether the training that a stream is made for has ended."""
        wanted = self._wanted() if self._mode == "stream" else None
        return wanted is not None and wanted.done

    def _wanted(self) -> Wanted | None:
        """What the training of this very cache says."""
        wanted = Wanted.read(self._writer.path)
        if wanted is None or wanted.plan_sha256 != self._plan_sha256:
            return None
        if not set(wanted.shards) <= set(range(self._writer.num_shards)):
            raise ValueError(
                f"{self._writer.path / WANTED}: expected shards below {self._writer.num_shards}, found {max(wanted.shards)}; delete it"
            )
        return wanted

    def _drop_all_but(self, kept: set[int]) -> None:
        folder = self._writer.path
        there = {path.name for path in folder.glob("shard-*.safetensors")}
        names = {index: shard_name(index) for index in kept}
        for index, name in names.items():
            if name not in there:
                self._writer.forget(index)  # another worker may have dropped it
        for name in there - set(names.values()):
            path = shard_path(folder, name)
            sidecar_path(path).unlink(missing_ok=True)  # first: a shard without one counts for nothing
            path.unlink(missing_ok=True)
            self._writer.forget(int(path.stem.rpartition("-")[2]))
