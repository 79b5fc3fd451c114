"""Switches off the CPU's slow arithmetic on numbers too small to matter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Within the block, numbers below 1e-38 count as 0 on this thread: each costs a CPU a hundred cycles, and the softmax
    over a vocabulary and the optimizer's squares have many. No effect on a GPU.

    numpy warns when it first looks at a machine that does so; hence it looks before.
    """
    for kind in (np.float32, np.float64):
        assert np.finfo(kind).smallest_subnormal > 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
