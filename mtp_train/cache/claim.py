"""Who of several workers does a piece of work: a claim is a file, made by whoever comes first and kept alive by its owner.

It needs nothing of a file system that NFS lacks: that one of several processes alone makes a new file (O_EXCL), and that what is
written can be read after the writer closed the file. It needs no clock but the reader's own monotonic one. A claim never decides
what is right, only who works: where two believe to own one, work is done twice, and the same is written twice.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# How often an owner says that it lives, within the silence after which others take it for dead.
_BEATS_PER_SILENCE = 6
# Width of the counter, so that each beat overwrites the last one in place.
_DIGITS = 12


class Claims:
    """The claims of one worker in ``folder``, a context manager: ``take`` a name, work, ``release`` it.

    The claim of a name is the file ``.<name>.claim.<n>``: n = 0 at first; whoever takes it over makes the file of n + 1, which
    again one alone can. It names its owner and holds a counter that a thread of the owner counts on, six times in
    ``silence_s``. An owner has died where this worker has seen no change for ``silence_s`` seconds of its own monotonic clock;
    or, at once, where it was a process of this machine and is none any more. A worker that was stopped for longer, and goes on,
    has lost its claim; ``release`` then leaves the new owner's alone.
    """

    def __init__(self, folder: Path, *, silence_s: float) -> None:
        if silence_s <= 0:
            raise ValueError(f"silence_s: expected more than 0 seconds, found {silence_s}")
        self._folder, self._silence_s = folder, silence_s
        self._me = {"owner": uuid.uuid4().hex, "host": platform.node(), "pid": os.getpid(), "process": _process(os.getpid())}
        self._held: dict[str, Path] = {}
        self._seen: dict[Path, tuple[bytes, float]] = {}  # what a claim held when it was first seen so, and when that was
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._beats = 0
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release what is held, so that others need not wait until it is silent."""
        self._ended.set()
        self._thread.join()
        for name in list(self._held):
            self.release(name)

    def take(self, name: str) -> bool:
        """Claim the work ``name``, which this worker does not hold. False where another, living worker does, or was faster."""
        assert name not in self._held, name
        newest = self._newest(name)
        if newest is not None and not self._is_dead(newest):
            return False
        path = self._path(name, 0 if newest is None else _number(newest) + 1)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, self._content())
        finally:
            os.close(descriptor)
        with self._lock:
            self._held[name] = path
        return True

    def holds(self, name: str) -> bool:
        """Whether this worker took the name and has not released it."""
        return name in self._held

    def release(self, name: str) -> None:
        """Give up a claim, with those that it took the work over from."""
        with self._lock:
            path = self._held.pop(name)
        for number in range(_number(path) + 1):
            self._path(name, number).unlink(missing_ok=True)

    def holder(self, name: str) -> str | None:
        """Who holds a claim, for people; None where nobody does."""
        newest = self._newest(name)
        if newest is None:
            return None
        stated = _read(_bytes(newest))
        return f"process {stated['pid']} on {stated['host']}" if stated else "unknown"

    def _path(self, name: str, number: int) -> Path:
        return self._folder / f".{name}.claim.{number}"

    def _newest(self, name: str) -> Path | None:
        found = None
        for number in range(1 << 30):
            path = self._path(name, number)
            if not path.exists():
                break
            found = path
        return found

    def _is_dead(self, claim: Path) -> bool:
        now_s, content = time.monotonic(), _bytes(claim)
        stated = _read(content)
        if stated is not None and _has_ended(stated):
            return True
        if claim not in self._seen or self._seen[claim][0] != content:
            self._seen[claim] = (content, now_s)
        return now_s - self._seen[claim][1] >= self._silence_s

    def _content(self) -> bytes:
        return json.dumps({**self._me, "beats": f"{self._beats:0{_DIGITS}d}"}).encode()

    def _beat(self) -> None:
        while not self._ended.wait(self._silence_s / _BEATS_PER_SILENCE):
            self._beats += 1
            with self._lock:
                held = list(self._held.values())
            for path in held:
                try:
                    descriptor = os.open(path, os.O_WRONLY)
                except OSError:  # taken away, or out of reach for the moment: others see the silence
                    continue
                try:
                    os.pwrite(descriptor, self._content(), 0)
                except OSError:
                    continue
                finally:
                    os.close(descriptor)


def _number(claim: Path) -> int:
    return int(claim.suffix[1:])


def _bytes(claim: Path) -> bytes:
    """What a claim holds; nothing where it is just being made, or has gone."""
    try:
        return claim.read_bytes()
    except OSError:
        return b""


def _read(content: bytes) -> dict[str, Any] | None:
    """A claim's content; None where it is being written."""
    try:
        stated = json.loads(content)
    except ValueError:
        return None
    return stated if isinstance(stated, dict) and stated.keys() >= {"owner", "host", "pid", "process"} else None


def _process(pid: int) -> str | None:
    """A name for a process that no other has, on no machine and at no time: boot, process namespace, number, start. None where
    the system does not tell, or there is no such process (a dead one that nobody has waited for is none)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if state in "ZX" else f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {fields[18]}"
    except OSError:
        return None


def _has_ended(stated: dict[str, Any]) -> bool:
    """Whether the owner was a process where this one can see it, and is none any more."""
    mine, theirs = _process(os.getpid()), stated["process"]
    if mine is None or not isinstance(theirs, str) or type(stated["pid"]) is not int:
        return False
    return mine.split()[:2] == theirs.split()[:2] and _process(stated["pid"]) != theirs
