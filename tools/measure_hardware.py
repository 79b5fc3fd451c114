#!/usr/bin/env python
"""Measures this machine and prints it as a conf/hardware file for plan: tools/measure_hardware.py --name mine --devices 8

Rates of one device: dense products (1024 x 576 by 576 x 49152, an lm_head's shapes; 8192 cubed on a GPU) in what precision=auto takes
on it (bfloat16 where the device multiplies it, else float32; a CPU's other rate stands beside it), a copy of memory
(bytes read and written), and a file of 1 GB written with fsync and read back past the page cache. On a CPU a device is one core, timed
by its CPU time, so that other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mtp_train.faults import telling
from mtp_train.nn.bf16 import multiplies_bf16
from mtp_train.quantity import show_bytes

REPEATS, LEAST_S = 5, 0.5
FILE_BYTES = 10**9


def per_second(run: Callable[[], object], amount: float, *, cuda: bool) -> float:
    """The median of ``amount`` per second over repeats of at least half a second each."""
    clock = time.perf_counter if cuda else time.process_time
    run()
    rates = []
    for _ in range(REPEATS):
        begun, count = clock(), 0
        while clock() - begun < LEAST_S:
            run()
            count += 1
            if cuda:
                torch.cuda.synchronize()
        rates.append(count * amount / (clock() - begun))
    return statistics.median(rates)


def disk_rates(folder: Path) -> tuple[float, float]:
    """(written, read) bytes per second of one file."""
    block = os.urandom(1 << 24)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".measure-") as file:
        begun = time.perf_counter()
        for _ in range(FILE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = file.tell() / (time.perf_counter() - begun)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun, size = time.perf_counter(), 0
        while part := file.read(len(block)):
            size += len(part)
        return written, size / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="the file's name in conf/hardware")
    parser.add_argument("--devices", type=int, required=True, help="how many there are")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk that runs are written to")
    words = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.set_num_threads(1)
    rows, inner, columns = (8192, 8192, 8192) if cuda else (1024, 576, 49152)
    best, other = (torch.bfloat16, torch.float32) if multiplies_bf16(torch.device(device)) else (torch.float32, torch.bfloat16)

    def products(dtype: torch.dtype) -> float:
        left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, inner), (inner, columns)))
        return per_second(lambda: left @ right, 2.0 * rows * inner * columns, cuda=cuda)

    def named(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    flops, beside = products(best), "" if cuda else f"  # {products(other):.3g} in {named(other)}"
    source = torch.zeros(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    memory = per_second(lambda: target.copy_(source), 2.0 * source.nbytes, cuda=cuda)
    written, read = disk_rates(words.folder)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // words.devices
    lines = {
        "name": words.name,
        "device": torch.cuda.get_device_name() if cuda else f"core of {_cpu_name()}",
        "kind": "gpu" if cuda else "cpu",
        "num_devices": words.devices,
        "memory_bytes": show_bytes(torch.cuda.get_device_properties(0).total_memory if cuda else memory_bytes),
        "usable_share": 0.9,
        "flops_per_s": f"{flops:.3g}{beside}",
        "flops_dtype": named(best),
        "memory_bytes_per_s": show_bytes(memory),
        "link_bytes_per_s": f"{show_bytes(memory / 2)}  # not measured: half of memory's",
        "disk_bytes": show_bytes(shutil.disk_usage(words.folder).free),
        "disk_read_bytes_per_s": show_bytes(read),
        "disk_write_bytes_per_s": show_bytes(written),
        "usd_per_hour": "null",
        "source": f"tools/measure_hardware.py --name {words.name} --devices {words.devices}, torch {torch.__version__}",
    }
    print("\n".join(f"{key}: {value}" for key, value in lines.items()))


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")


if __name__ == "__main__":
    with telling("measure_hardware"):
        main()
