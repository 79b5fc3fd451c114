"""Processes for the trainer's tests, forked from one Python that has the libraries: alone, or as the ranks of one job."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

# Imported once; a process then costs what it does, and not the ten seconds of imports.
_LIBRARIES = [
    "torch.distributed.fsdp",
    "accelerate",
    "safetensors.torch",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "mtp_train.trainer.loop",
]


def settings_of(recipe: Any) -> dict[str, Any]:
    """A recipe as what makes it again: the process has a class of its own."""
    return {field.name: getattr(recipe, field.name) for field in fields(recipe)}


def run_of(
    recipe: Any, out: Path, *, stop_after: int | None = None, signal: int = 15, late: tuple[int, float] | None = None
) -> dict[str, Any]:
    """One training run; ``stop_after``: the step after whose validation the main process is sent ``signal``; ``late``: a rank,
    and for how many seconds it sleeps before it begins its steps."""
    return {"recipe": settings_of(recipe), "out": str(out), "stop_after": stop_after, "signal": signal, "late": late}


class Ranks:
    """``num_ranks`` processes that go through ``runs`` together. ``wait`` gives their exit codes."""

    def __init__(self, runs: list[dict[str, Any]], *, num_ranks: int, logs: Path) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when the server imports DeepSpeed
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_LIBRARIES)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.logs = [logs / f"rank-{rank}.log" for rank in range(num_ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            job = {"environment": told if num_ranks > 1 else {}, "log": str(log), "runs": runs}
            script = str(Path(__file__).with_name("child.py"))
            process = context.Process(target=runpy.run_path, args=(script,), kwargs={"init_globals": {"JOB": job}})
            process.start()
            self.processes.append(process)

    def poll(self) -> int | None:
        """None while one runs, else the exit code of the first that failed, or 0."""
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def kill(self, one: int | None = None) -> None:
        for number, process in enumerate(self.processes):
            if one in (None, number):
                process.kill()
            else:
                process.terminate()  # as torchrun does where one has ended
        for process in self.processes:
            process.join(60)
        if left := [process.pid for process in self.processes if process.exitcode is None]:
            raise RuntimeError(f"expected the others to end where one is killed, found {left} running: {self.said()[-3000:]}")

    def wait(self, *, timeout_s: float = 240) -> list[int | None]:
        for process in self.processes:
            process.join(timeout_s)
        self.kill()
        return [process.exitcode for process in self.processes]

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(encoding='utf-8')}" for log in self.logs if log.exists())
