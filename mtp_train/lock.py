"""One process at a time: a lock on a file, which the system frees when its holder ends, however it ends."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from mtp_train.runtime import log


@contextmanager
def alone(lock: Path, *, writes: Path, wait: bool, instead: str = "run=") -> Iterator[None]:
    """Hold the file ``lock`` while the block runs, so that one process at a time writes to ``writes``.

    The system frees it when the process ends, however it ends. ``wait`` waits for the other process, else it is refused, and told
    which setting to choose ``instead``.
    Errors: ValueError where another process holds it.
    """
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    while (descriptor := _lock(lock, writes=writes, wait=wait, instead=instead)) is None:
        pass
    try:
        with suppress(OSError):  # for people only: a full disk keeps nobody from deleting
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held: whoever opened it before finds another file in its place, or none
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor too, and would hold it
        os.close(descriptor)


def _lock(lock: Path, *, writes: Path, wait: bool, instead: str) -> int | None:
    """The locked file's descriptor; None where it was taken away between opening and locking."""
    import fcntl

    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        holder = os.read(descriptor, 100).decode("utf-8", "replace").strip() or "unknown"
        os.close(descriptor)
        raise ValueError(
            f"{writes}: expected to be the only one who writes there, found another process at it ({holder}); "
            f"wait until it is done, or choose another {instead}"
        ) from None
    except OSError as error:  # some network file systems have no locks
        _say_once(f"{lock} cannot be locked ({error.strerror}): nothing keeps a second process from writing to {writes}")
        return descriptor
    try:
        if os.path.samestat(os.stat(lock), os.fstat(descriptor)):
            return descriptor
    except FileNotFoundError:
        pass
    os.close(descriptor)
    return None


@cache
def _say_once(message: str) -> None:
    log(message)
