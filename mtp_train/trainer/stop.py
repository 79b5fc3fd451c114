"""Stopping in time: a signal asks the loop to save and end after the step it is in."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from mtp_train.runtime import log

# In the order in which one is chosen where processes received different ones. SLURM sends SIGUSR1 ahead of the time limit
# where the job file asks for it, and SIGTERM when a job is to end.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


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
            log(f"{signal.Signals(number).name}: saving after this step")


def exit_status(number: int) -> int:
    """What a run that saved and ended for a signal exits with: 75 (EX_TEMPFAIL of sysexits.h: try again) for SIGUSR1, on which
    a job file requeues; 128 + number, as shells have it, for a signal that means to end it."""
    return os.EX_TEMPFAIL if number == signal.SIGUSR1 else 128 + number
