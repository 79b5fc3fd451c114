"""Stopping in time: a signal asks the loop to save and end after the step it is in."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from mtp_train.runtime import log


class StopSignal:
    """While entered, the first SIGTERM or SIGINT is remembered in ``number``; a second one acts as it always does."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, signal.Handlers] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()
        log(f"{signal.Signals(number).name}: saving after this step; once more to stop at once")
