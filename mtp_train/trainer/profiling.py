"""``profile=true``: a trace of a few training steps, by torch's profiler, written beside the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from mtp_train.runtime import atomic_path, log

PROFILE = "profile"
# Steps passed over (allocators fill, kernels are chosen), run with the profiler warm, and recorded.
_SKIPPED_STEPS, _WARM_STEPS, _RECORDED_STEPS = 2, 1, 3


class Stepping(Protocol):
    """Told when a step is done."""

    def step(self) -> None: ...


class _Off:
    def step(self) -> None:
        pass


@contextmanager
def profiling(out: Path, *, enabled: bool, rank: int) -> Iterator[Stepping]:
    """Record steps 4 to 6 of those that are done within, with shapes and memory, and write ``<out>/profile/rank-<n>.json``,
    which Perfetto and chrome://tracing show. A run with fewer steps writes what it recorded of them."""
    if not enabled:
        yield _Off()
        return
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]

    def write(recorded: Any) -> None:
        path = out / PROFILE / f"rank-{rank}.json"
        with atomic_path(path) as temporary:
            recorded.export_chrome_trace(str(temporary))
        log(f"the trace of {_RECORDED_STEPS} steps is in {path}")

    plan = schedule(wait=_SKIPPED_STEPS, warmup=_WARM_STEPS, active=_RECORDED_STEPS, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write, record_shapes=True, profile_memory=True) as recorder:
        yield recorder
