"""How fast this machine's matrix products are at a head's shapes: by one thread alone, by two threads, and by two processes at once."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Literal, get_args

import torch

Way = Literal["one core", "2 threads", "2 processes"]
WAYS: tuple[Way, ...] = get_args(Way)


class KernelRates:
    """Rates of the products of bfloat16 that a training step is made of, measured again at every ``measure()``.

    ``project``: R rows of hidden states onto the lm_head's table; ``back``: the gradient of their logits back; ``layer``: rows
    through a matrix of the decoder layer. In operations per second of the whole way, so that two processes count both, by the clock.
    ``copy``: bytes read and written per second. One core alone is timed by its own CPU time too, for figures that other work on the
    machine must not change. Two processes: one measures while another, made here by fork, keeps computing the same.
    """

    def __init__(self, lm_head_VD: torch.Tensor, *, chunk_rows: int, intermediate_size: int, two_cores: bool) -> None:
        vocab_size, size = lm_head_VD.shape
        left_RD = torch.randn(chunk_rows, size).bfloat16()
        grad_RV = torch.randn(chunk_rows, vocab_size).bfloat16()
        rows_TD, matrix_ID = torch.randn(2048, size).bfloat16(), torch.randn(intermediate_size, size).bfloat16()
        block = torch.zeros(1 << 25)
        product = 2.0 * chunk_rows * lm_head_VD.numel()
        self._kernels: dict[str, tuple[Callable[[], object], float]] = {
            "project": (lambda: left_RD @ lm_head_VD.T, product),
            "back": (lambda: grad_RV @ lm_head_VD, product),
            "layer": (lambda: rows_TD @ matrix_ID.T, 2.0 * rows_TD.numel() * intermediate_size),
            "copy": (block.clone, 2.0 * block.nbytes),
        }
        self._ways: tuple[Way, ...] = WAYS if two_cores else WAYS[:1]
        self._found: dict[tuple[Way, str], list[float]] = {(way, name): [] for way in self._ways for name in self._kernels}
        self._cpu: dict[str, list[float]] = {name: [] for name in self._kernels}
        self._other: _Beside | None = _Beside(self._kernels) if two_cores else None

    def measure(self) -> None:
        """Time every kernel once in every way; torch's number of threads is 1 afterwards."""
        for name, (run, amount) in self._kernels.items():
            torch.set_num_threads(1)
            cpu_s, wall_s = _time(run)
            self._cpu[name].append(amount / cpu_s)
            self._found["one core", name].append(amount / wall_s)
            if self._other is not None:
                self._other.begin(name)
                self._found["2 processes", name].append(2 * amount / _time(run)[1])
                self._other.rest()
                torch.set_num_threads(2)
                self._found["2 threads", name].append(amount / _time(run)[1])
        torch.set_num_threads(1)

    def per_cpu_s(self) -> dict[str, float]:
        """Medians for one core, per second of its CPU time."""
        return {name: statistics.median(found) for name, found in self._cpu.items()}

    def medians(self, way: Way) -> dict[str, float]:
        """Medians per second of the clock."""
        return {name: statistics.median(self._found[way, name]) for name in self._kernels}

    def close(self) -> None:
        """End the other process."""
        if self._other is not None:
            self._other.close()


class _Beside:
    """A process of one thread that computes a kernel again and again while told to."""

    def __init__(self, kernels: dict[str, tuple[Callable[[], object], float]]) -> None:
        context = multiprocessing.get_context("fork")  # inherits the matrices
        self._pipe, far = context.Pipe()
        self._stop = context.Event()
        self._process = context.Process(target=self._work, args=(kernels, far), daemon=True)
        self._process.start()

    def _work(self, kernels: dict[str, tuple[Callable[[], object], float]], pipe: Connection) -> None:
        torch.set_num_threads(1)
        while (name := pipe.recv()) is not None:
            run = kernels[name][0]
            run()
            pipe.send(None)
            while not self._stop.is_set():
                run()
            pipe.send(None)

    def begin(self, name: str) -> None:
        self._stop.clear()
        self._pipe.send(name)
        self._pipe.recv()

    def rest(self) -> None:
        self._stop.set()
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _time(run: Callable[[], object], *, times: int = 3) -> tuple[float, float]:
    """CPU and clock seconds of one run, behind one that is not timed."""
    run()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(times):
        run()
    return (time.process_time() - cpu_s) / times, (time.perf_counter() - wall_s) / times
