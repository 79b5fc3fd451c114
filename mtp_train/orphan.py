"""Ends this process when the one that started it is killed: left alone, it would keep its run's folder and devices for itself.

A launcher that ends well ends its processes first; one under ``kill -9`` cannot, and the same command, typed again, would find
the folder in use.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Who started this process and is to be outlived by it in no case, as a process id; torchrun, which tells none, is known by its own.
PARENT = "MTP_TRAIN_PARENT"
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1  # prctl(2), Linux


def end_with_parent() -> None:
    """Have the system kill this process as soon as its parent is gone, where that is torchrun or one that set ``PARENT``.

    Linux only; elsewhere nothing is done. What is saved of a run lets the same command continue it.
    """
    parent = os.environ.pop(PARENT, None)
    if (parent is None and _TORCHRUN not in os.environ) or sys.platform != "linux":
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != int(parent):  # it went before this
        os.kill(os.getpid(), signal.SIGKILL)
