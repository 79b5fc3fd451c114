"""A folder for what passes between processes: it goes when its owner ends, or, after a kill, when the next one comes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = ".vllm-"


class ScratchFolder:
    """``path``, in ``parent`` (None: the system's temporary folder), is this process's own until ``close``.

    Its owner holds a lock on it, which the system frees however the owner ends; opening one removes those beside it that
    nobody holds any more. Several processes may have theirs in one parent.
    """

    def __init__(self, *, parent: Path | None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{_PREFIX}*"):
            if (lock := _hold(left)) is not None:
                shutil.rmtree(left)
                os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            if (held := _hold(self.path)) is not None:
                break  # else another process took it for a left one before it was locked
        self._lock = held

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path)
        os.close(self._lock)


def _hold(folder: Path) -> int | None:
    """Lock a folder and return the open descriptor; None where it is another process's, or gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if not folder.exists():  # removed between the two calls
        os.close(descriptor)
        return None
    return descriptor
