"""The folder that fetched shards lie in, within a limit of bytes, whichever caches, processes and trainings of a machine use it.

Files appear in it whole, by rename, and one that is deleted stays readable to whoever has it mapped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from mtp_train.lock import alone
from mtp_train.runtime import log

# How often whoever waits looks again, and after how long it waits no more for a fetch that does not end.
_LOOK_S, _PATIENCE_S = 0.05, 600.0
_MARK = ".arriving"


class FetchedFolder:
    """The shards of all caches in ``folder``: with those that arrive, counted whole, at most ``max_bytes``.

    Room is made under one lock on the folder. A shard that is fetched, or waits for room, has a mark there, ``.<cache>.<shard>.arriving``,
    which states its bytes and is locked by whoever fetches it: the system frees that lock when the process ends, however it ends, and
    the next that looks takes the mark away. What waits for room waits only for fetches that have begun, which wait for nobody. On a
    file system without locks nobody sees what others fetch, and only what is there is counted.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.path, self.max_bytes = folder, max_bytes

    def clear(self) -> None:
        """Delete what killed processes left half written; whoever writes a file other than a shard at the moment tries again."""
        with self._alone():
            arriving = self._arriving()
            for leftover in self.path.glob("*/.*.tmp"):
                if _written(leftover) not in arriving:
                    leftover.unlink(missing_ok=True)

    @contextmanager
    def room(self, path: Path, num_bytes: int, *, kept: Collection[Path], wait: bool) -> Iterator[bool]:
        """Room for a shard that the block fetches to ``path``; the least recently used ones make it, those in ``kept`` last.

        Gives whether the block is to fetch it, alone: not where it is there, be it that another fetched it meanwhile. With ``wait``,
        whoever fetches it already is waited for, and room, for which nobody may fetch ahead then; after ten minutes it goes on, beyond
        the limit, rather than hang. Without ``wait``, the shard is not to be fetched in either case.
        """
        mark = _Mark(self.path / f".{path.parent.name}.{path.name}{_MARK}", num_bytes)
        patient_until = time.monotonic() + _PATIENCE_S
        try:
            while (fetch := self._look(mark, path, kept=kept, wait=wait, patient=time.monotonic() < patient_until)) is None:
                time.sleep(_LOOK_S)
            yield fetch
        finally:
            mark.close()

    def _look(self, mark: _Mark, path: Path, *, kept: Collection[Path], wait: bool, patient: bool) -> bool | None:
        """Whether to fetch the shard now, for which there is room then; None where what arrives has to be waited for."""
        with self._alone():
            if path.exists():
                return False
            arriving = self._arriving(mark)
            taken = sum(num_bytes for num_bytes, has_begun in arriving.values() if has_begun or not wait)
            if path in arriving or taken + mark.num_bytes > self.max_bytes:
                if not wait:
                    return False
                if patient:
                    if path not in arriving:
                        mark.set(has_begun=False)
                    return None
                log(f"{path} is fetched beyond fetch.max_bytes: what others fetch to {self.path} has not ended in {_PATIENCE_S:.0f} s")
            self._make_room(mark.num_bytes, arriving=arriving, kept=kept)
            mark.set(has_begun=True)
            return True

    def _make_room(self, num_bytes: int, *, arriving: dict[Path, tuple[int, bool]], kept: Collection[Path]) -> None:
        """Delete shards, of any cache, until this many bytes stay within the limit, with what arrives."""
        total, found = num_bytes + sum(others for others, has_begun in arriving.values() if has_begun), []
        for path in self.path.glob("*/*shard-*"):
            if path in arriving or _written(path) in arriving:
                continue
            with suppress(FileNotFoundError):
                found.append((path, path.stat()))
        total += sum(stat.st_size for _, stat in found)
        for path, stat in sorted(found, key=lambda entry: (entry[0] in kept, entry[1].st_mtime_ns)):
            if total <= self.max_bytes:
                break
            if path.suffix == ".safetensors":
                path.unlink(missing_ok=True)
                total -= stat.st_size

    def _arriving(self, mine: _Mark | None = None) -> dict[Path, tuple[int, bool]]:
        """The shards that others fetch, or want to: the bytes of each, and whether it has begun. Takes away what the dead left."""
        found = {}
        for path in self.path.glob(f".*{_MARK}"):
            if mine is not None and mine.is_set and path == mine.path:
                continue
            cache, _, name = path.name[1:].removesuffix(_MARK).partition(".")
            shard = self.path / cache / name
            with suppress(FileNotFoundError):
                if (stated := _living(path)) is not None:
                    found[shard] = stated
                    continue
                path.unlink()
                for leftover in shard.parent.glob(f".{name}.*.tmp"):
                    leftover.unlink(missing_ok=True)
        return found

    def _alone(self) -> AbstractContextManager[None]:
        return alone(self.path / ".lock", writes=self.path, wait=True, instead="fetch.folder=")


class _Mark:
    """Says that this process fetches a shard, or waits for room, until ``close`` or its own end; ``set`` under the folder's lock."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self._descriptor: int | None = None

    @property
    def is_set(self) -> bool:
        return self._descriptor is not None

    def set(self, *, has_begun: bool) -> None:
        import fcntl

        if self._descriptor is None:
            self.path.unlink(missing_ok=True)  # of one that is waited for no more
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # no locks there: it would look like that of a dead process
                self.path.unlink(missing_ok=True)
        try:
            os.pwrite(self._descriptor, f"{self.num_bytes} {'begun' if has_begun else 'waits'}".encode(), 0)
        except OSError:  # a full disk: who only waits needs no room yet
            if has_begun:
                raise

    def close(self) -> None:
        """Take the mark away; harmless where it was never set."""
        import fcntl

        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                self.path.unlink()
        except FileNotFoundError:
            pass
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor too
            os.close(descriptor)


def _living(mark: Path) -> tuple[int, bool] | None:
    """The bytes that a mark states, and whether it has begun; None where its process has ended. Under the folder's lock."""
    import fcntl

    descriptor = os.open(mark, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return None
    except BlockingIOError:
        stated = os.read(descriptor, 100).decode("ascii").split()
        return (int(stated[0]), stated[1] == "begun") if len(stated) == 2 else (0, False)  # the disk had no room for the words
    except OSError:  # no locks there
        return None
    finally:
        os.close(descriptor)


def _written(temporary: Path) -> Path:
    """The file that a temporary one of ``atomic_path`` becomes."""
    return temporary.with_name(temporary.name[1:].rsplit(".", 2)[0])
