"""Stopping in time: a signal asks the loop to save and end after the step it is in; outside of the loop it ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from mtp_train.runtime import atomic_write_json, is_main

# In the order in which one is chosen where processes received different ones. SLURM sends SIGUSR1 ahead of the time limit
# where the job file asks for it, and SIGTERM when a job is to end.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
# Says why a run ended before its last step, to whoever sees only a launcher's exit status.
INTERRUPTED = "interrupted.json"
# Where a signal outside of the loop is noted, and the last step that is saved there; none until the folder is known to be ours.
_noted: list[tuple[Path, int]] = []


class StopSignal:
    """While entered, the first of ``SIGNALS`` is remembered in ``number``. A launcher and a scheduler may both send the same
    one: more of them change nothing, but for a second SIGINT, which interrupts at once."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, signal.Handlers] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._remember)  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before.pop(signal.SIGINT))
        if not self.number:
            self.number = number
            _say(f"{signal.Signals(number).name}: saving after this step")


class EndAtOnce:
    """While entered, and wherever no ``StopSignal`` is, SIGUSR1 and SIGTERM end the process at once, with one line and
    ``exit_status``: what was trained is saved, or nothing was. So does whatever leaves the block but its good end, told as ever:
    threads may be waiting for a shard that never comes, and the interpreter would wait for them.

    A thread listens too, since Python's own handlers wait for the main thread, and that one may be waiting for other processes,
    which have received the signal as well and are gone.
    """

    def __init__(self) -> None:
        self._leaving = threading.Lock()

    def __enter__(self) -> None:
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._end)
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reads,), name="signals", daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        status = error.code if isinstance(error, SystemExit) else int(error is not None)
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
        if not (others and isinstance(status, int) and status):
            return
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, trace)  # type: ignore[arg-type]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    def _listen(self, reads: int) -> None:
        while True:
            number = os.read(reads, 1)[0]
            if signal.getsignal(number) == self._end:
                self._end(number, None)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._leaving.acquire(blocking=False):
            return  # the other thread is at it
        for out, step in _noted if is_main() else ():
            with suppress(OSError):  # a disk that is full keeps nobody from ending
                note_interruption(out, number=number, step=step)
        _say(f"stopped by {signal.Signals(number).name}, nothing was left to save; the same command continues")
        os._exit(exit_status(number))


def note_in(out: Path, *, step: int) -> None:
    """From now on a signal that ends the process at once is noted in ``out``, where ``step`` is the last step that is saved."""
    _noted[:] = [(out, step)]


def note_interruption(out: Path, *, number: int, step: int) -> None:
    """Write down beside the states which signal ended a run, after which step, and with which exit status."""
    atomic_write_json(out / INTERRUPTED, {"signal": signal.Signals(number).name, "step": step, "exit_status": exit_status(number)})


def exit_status(number: int) -> int:
    """What a run that saved and ended for a signal exits with: 75 (EX_TEMPFAIL of sysexits.h: try again) for SIGUSR1, on which
    a job file requeues; 128 + number, as shells have it, for a signal that means to end it."""
    return os.EX_TEMPFAIL if number == signal.SIGUSR1 else 128 + number


def _say(message: str) -> None:
    """A line on stderr, from the main process, past Python's buffer: the handler may have come between two writes to it."""
    if is_main():
        os.write(2, f"[mtp-train] {message}\n".encode())
