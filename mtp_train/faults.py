"""Which errors are the user's or the machine's, and how they are told: one message, nothing in it that steers a terminal."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# What to do about an error of the operating system, by its number.
_REMEDIES = {
    errno.ENOSPC: "make room there, then run the same command again: it continues",
    errno.EDQUOT: "make room within your quota, then run the same command again: it continues",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), then run the same command again: it continues",
    errno.EACCES: "choose another folder, or have yourself be given the right",
    errno.EPERM: "choose another folder, or have yourself be given the right",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOENT: "nothing is there; name another path, or run the stage that makes it",
    errno.ENOTDIR: "a part of the path is a file; choose another path",
    errno.EISDIR: "a folder is where a file should be; choose another path",
    errno.EEXIST: "a file is where a folder should be; choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
# C0 and C1 controls but tab and line end; marks, embeddings, overrides and isolates of direction; line and paragraph separators.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_OS_ERROR = re.compile(r"os error (\d+)")
_EXIT_USER, _EXIT_INTERRUPTED, _EXIT_PIPE, _EXIT_TERMINATED = 2, 130, 141, 143


class _Terminated(BaseException):
    """SIGTERM has come."""


def printable(text: str) -> str:
    """The text with control characters, escape sequences and direction marks written out, line ends and tabs kept: what
    comes from a data set cannot move the cursor, colour the terminal or turn the line around."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def told(error: BaseException) -> str | None:
    """The message for an error that is the user's or the machine's; None for one that is ours and shows its traceback."""
    said = str(error)
    if isinstance(error, OSError):
        return _of_system(error.errno, where=error.filename, said=error.strerror or said)
    if isinstance(error, (ValueError, NotImplementedError)) and said:
        return said
    if isinstance(error, ModuleNotFoundError) and not (error.name or "mtp_train").startswith("mtp_train"):
        return f"{said}; install what this choice needs (tools/setup.sh; vLLM: tools/setup.sh --engine), or choose another"
    if type(error).__name__ == "SafetensorError" and (found := _OS_ERROR.search(said)):
        return _of_system(int(found[1]), where=None, said=said)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in said:
        return (
            f"out of memory: {said.splitlines()[0] if said else 'the system gave no more'}; "
            "take less at once: engine.batch_size, engine.max_prefill_tokens, engine.max_cache_tokens; in train tokens_per_pack, chunk_rows"
        )
    return None


def _of_system(number: int | None, *, where: object, said: str) -> str:
    start = f"{os.fsdecode(where)}: " if isinstance(where, (str, bytes, os.PathLike)) else ""
    what = os.strerror(number) if number is not None else said
    remedy = _REMEDIES.get(number) if number is not None else None
    return f"{start}the system says: {what}" + (f"; {remedy}" if remedy else "")


@contextmanager
def telling(name: str) -> Iterator[None]:
    """Run a stage's block; an error that is the user's ends the process with one message on stderr and exit status 2.

    An interrupt ends it with 130, a closed pipe (``| head``) with 141, SIGTERM with 143, as shells have it.
    MTP_TRAIN_TRACEBACK=1 shows where an error was found.
    """
    try:
        with _raising_at_sigterm():
            yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's own flush fails again at the end
        sys.exit(_EXIT_PIPE)
    except KeyboardInterrupt:
        print(f"\nmtp-train {name}: interrupted; the same command continues", file=sys.stderr, flush=True)
        sys.exit(_EXIT_INTERRUPTED)
    except _Terminated:
        print(f"\nmtp-train {name}: ended by SIGTERM; the same command continues", file=sys.stderr, flush=True)
        sys.exit(_EXIT_TERMINATED)
    except Exception as error:
        message = told(error)
        if message is None or os.environ.get("MTP_TRAIN_TRACEBACK"):
            raise
        print(f"\nmtp-train {name}: {printable(message)}", file=sys.stderr, flush=True)
        sys.exit(_EXIT_USER)


@contextmanager
def _raising_at_sigterm() -> Iterator[None]:
    """SIGTERM raises, as an interrupt does, so that what is open is closed; a second one ends at once. Where SIGTERM has a handler
    (train's, or that of a block around this one), it is left alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != owner:  # a forked child, which has nothing of ours to close
            os.kill(os.getpid(), signal.SIGTERM)
        raise _Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
