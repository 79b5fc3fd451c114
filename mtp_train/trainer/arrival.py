"""Waits for a step's batches where they come from afar, all processes together, so that a signal is heeded while they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mtp_train.batch.loader import StepLoader
from mtp_train.trainer.stop import SIGNALS, StopSignal

if TYPE_CHECKING:
    from accelerate import Accelerator

# Between two looks at each other.
_LOOK_S = 0.1


def await_batches(loader: StepLoader, stop: StopSignal, *, accelerator: Accelerator) -> int:
    """Wait until every process has its batches of the next step, or some process a signal before that; the signal, or 0.

    A process that waited alone, inside the step's exchanges, could neither save nor leave: a state is written by all of them.
    """
    while True:
        ready = loader.wait(_LOOK_S)
        said = torch.tensor([ready, *(stop.number == number for number in SIGNALS)], dtype=torch.float64, device=accelerator.device)
        num_ready, *received = accelerator.reduce(said, "sum").tolist()
        if num_ready == accelerator.num_processes:
            return 0  # a signal is heeded after the step
        if any(received):
            return next(number for number, count in zip(SIGNALS, received, strict=True) if count)
