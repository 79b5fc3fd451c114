"""A shell for tests: starts stages as processes of their own without the seconds that their imports take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# One Python that has imported what all stages need, and forks for each command: a command then costs what it does, and not
# ten seconds of imports each time. A child is a process of its own: killed, it dies as any other would. With "die", the child
# kills itself (SIGKILL) when the named method is called for the n-th time, which is the same moment on every machine; with
# "stop" it stops itself there (SIGSTOP), until it is told to go on; with "full", it may from then on write no file longer than
# so many bytes, as on a full disk. "capabilities": what the CPU says of itself.
SHELL = """
import json, os, resource, runpy, signal, sys, torch, traceback
import accelerate, hydra, jinja2, matplotlib.pyplot, rich.table, safetensors.torch, torch.utils.data, tqdm, transformers
import transformers.models.llama.modeling_llama

def at_call(where, number, happens):
    module, _, path = where.partition(":")
    owner, _, method = path.partition(".")
    found = getattr(__import__(module, fromlist=["_"]), owner)
    calls, plain = [], getattr(found, method)
    def counted(*words, **named):
        calls.append(1)
        if len(calls) == number:
            happens()
        return plain(*words, **named)
    setattr(found, method, counted)

def child(job):
    os.setsid()
    for number, path in enumerate((os.devnull, job["out"], job["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.environ.update(job["environment"])
    for kind, number in (("die", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        if job[kind]:
            at_call(*job[kind], lambda number=number: os.kill(os.getpid(), number))
    if job["full"]:
        *call, most_bytes = job["full"]
        at_call(*call, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)))
    if job["capabilities"] is not None:
        torch.cpu.get_capabilities = lambda: job["capabilities"]
    sys.argv = ["stage", *job["words"]]
    try:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    job = json.loads(line)
    if "stopped" in job:
        print(os.WSTOPSIG(os.waitpid(job["stopped"], os.WUNTRACED)[1]), flush=True)
        continue
    if "wait" in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        code = child(job)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(pid, flush=True)
os._exit(0)
"""


class Shell:
    """Starts stages as processes forked from one that has the libraries loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", SHELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def ask(self, **job: Any) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(
        self,
        module: str,
        words: Sequence[str],
        *,
        die: tuple[str, int] | None = None,
        stop: tuple[str, int] | None = None,
        full: tuple[str, int, int] | None = None,
        capabilities: dict[str, bool] | None = None,
        **variables: str,
    ) -> Job:
        self.number += 1
        out, err = (self.folder / f"{self.number}.{kind}" for kind in ("out", "err"))
        pid = self.ask(
            module=module,
            words=list(words),
            out=str(out),
            err=str(err),
            die=die,
            stop=stop,
            full=full,
            capabilities=capabilities,
            environment=variables,
        )
        return Job(pid, out, err)

    def until_stopped(self, job: Job) -> None:
        """Wait until the child has stopped itself, where ``stop`` told it to."""
        assert self.ask(stopped=job.pid) == signal.SIGSTOP

    def wait(self, job: Job) -> Done:
        code = self.ask(wait=job.pid)
        return Done(code, job.out.read_text(encoding="utf-8"), job.err.read_text(encoding="utf-8"))

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


class Job(NamedTuple):
    """A stage that runs, and where it writes."""

    pid: int
    out: Path
    err: Path


class Done(NamedTuple):
    """A stage that has ended; ``code`` -9: by SIGKILL."""

    code: int
    stdout: str
    stderr: str


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
