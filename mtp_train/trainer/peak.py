"""How many bytes of tensors a computation holds at its fullest, as torch's allocators count them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(run: Callable[[], object], *, device: torch.device) -> int:
    """The most that ``run`` holds on ``device`` beyond what is held before: its results, what it keeps for the backward and
    what kernels ask the allocator for.

    On a GPU the caching allocator's own mark; on a CPU the profiler's record of every allocation, which slows small
    operations down but counts exactly (a process' resident set would also count what the C library has not given back).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    now = most = 0
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        most = max(most, now)
    return most
