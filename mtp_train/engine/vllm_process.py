"""Our side of the vLLM processes: starts them, keeps a bounded number of requests inside, hands out answers as they come.

A process ends when its stdin does, so that none outlives us, however we end; what they leave in files goes with us too
(``scratch.py``).
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from mtp_train.engine.scratch import ScratchFolder
from mtp_train.runtime import atomic_write_json, environment_apart, log

# Lines of the process's stderr that an error shows.
_SHOWN_LOG_LINES = 25
_STOP_TIMEOUT_S = 30.0
_Inbox = queue.SimpleQueue[tuple[int, dict[str, Any] | None]]
Message = Mapping[str, Any]


class _Worker:
    """One ``vllm_worker`` process; what it says goes into the pool's inbox under its index, and why it gave up into ``said``."""

    def __init__(self, *, index: int, spec: Path, log: Path, environment: Mapping[str, str], inbox: _Inbox) -> None:
        self.index = index
        self.inside: dict[str, int] = {}
        self.said: str | None = None
        self._inbox = inbox
        self._log = open(log, "w+b")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mtp_train.engine.vllm_worker", str(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env={**environment_apart(), **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if message["kind"] == "failed":
                self.said = message["said"]
            else:
                self._inbox.put((self.index, message))
        self._inbox.put((self.index, None))

    def send(self, message: Message) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure() from None

    def failure(self) -> ValueError:
        code = self.process.wait(_STOP_TIMEOUT_S)
        self._reader.join(_STOP_TIMEOUT_S)
        if self.said is not None:
            return ValueError(f"engine=vllm: {self.said}")
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()[-_SHOWN_LOG_LINES:]
        return ValueError(
            f"engine=vllm: expected the vLLM process to answer, found that it ended with status {code}; the last lines it wrote:\n"
            + "\n".join(lines)
        )

    def close(self) -> None:
        """End the process: it leaves when its stdin ends, whatever it has inside."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it may have gone already: then there is nobody to tell
            self.process.stdin.close()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(_STOP_TIMEOUT_S)
        self.process.stdout.close()
        self._log.close()


def _starting(llm: Mapping[str, Any], *, copies: int) -> str:
    """What is started and how long that takes, for whoever waits for it."""
    what = "vLLM" if copies == 1 else f"{copies} copies of vLLM"
    drafts = " with drafts" if "speculative_config" in llm else ""
    compiles = "" if llm.get("enforce_eager") else "; it compiles first, minutes on a CPU, which engine.enforce_eager=true leaves out"
    return f"engine=vllm: starting {what}{drafts}, {llm['dtype']}{compiles}"


class _Batch(NamedTuple):
    """Requests inside one process that nobody has read all answers of; ``unread`` are their ids, in order."""

    worker: _Worker
    unread: deque[str]


class VllmPool:
    """Equal vLLM processes behind one door; use it in a ``with`` block.

    ``llm`` are the arguments of vLLM's ``LLM``; ``environments`` has one entry per process, added to ours.
    ``target_layer_ids`` (None: nothing is tapped; empty: the last hidden state only) and ``tap_draft`` switch the probe
    on; ``time_steps`` keeps how long each step took. ``scratch`` is where the processes leave what is handed over in files
    (None: the system's temporary folder).
    """

    def __init__(
        self,
        *,
        llm: Mapping[str, Any],
        environments: Sequence[Mapping[str, str]],
        target_layer_ids: tuple[int, ...] | None,
        tap_draft: bool,
        time_steps: bool,
        scratch: Path | None,
    ) -> None:
        self._folder = ScratchFolder(parent=scratch)
        self.folder = self._folder.path
        spec = self.folder / "spec.json"
        layers = None if target_layer_ids is None else list(target_layer_ids)
        atomic_write_json(spec, {"llm": dict(llm), "target_layer_ids": layers, "tap_draft": tap_draft, "time_steps": time_steps})
        self._says = _starting(llm, copies=len(environments))
        self._inbox: _Inbox = queue.SimpleQueue()
        self._workers = [
            _Worker(index=index, spec=spec, log=self.folder / f"log.{index}.txt", environment=environment, inbox=self._inbox)
            for index, environment in enumerate(environments)
        ]
        self.description: dict[str, Any] = {}

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [worker.process.pid for worker in self._workers]

    def __enter__(self) -> VllmPool:
        log(self._says)
        began_s = time.monotonic()
        try:
            for _ in self._workers:
                self.description = self._receive("ready")["description"]
        except BaseException:
            self.close()
            raise
        log(f"engine=vllm: ready after {time.monotonic() - began_s:.0f} s")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and remove the folder."""
        for worker in self._workers:
            worker.close()
        self._folder.close()

    def _receive(self, kind: str) -> dict[str, Any]:
        """Wait for the next message, which must be of this kind. ValueError with the end of the log where a process has gone."""
        index, message = self._inbox.get()
        if message is None:
            raise self._workers[index].failure()
        assert message["kind"] == kind, (message["kind"], kind)
        self._workers[index].inside.pop(message.get("request_id", ""), None)
        return message

    def ask(self, message: Message) -> list[dict[str, Any]]:
        """Send a message to every process while nothing else is inside, and return their answers."""
        for worker in self._workers:
            assert not worker.inside, "asked while requests are inside"
            worker.send(message)
        return [self._receive(message["kind"]) for _ in self._workers]

    def _enter(self, worker: _Worker, requests: Sequence[Message], *, apart: bool) -> None:
        for request in requests:
            assert all(request["request_id"] not in other.inside for other in self._workers), request["request_id"]
            worker.inside[request["request_id"]] = len(request["token_ids"])
        worker.send({"kind": "requests", "apart": apart, "requests": [dict(request) for request in requests]})

    def run(self, requests: Iterable[Message], *, max_in_flight: int) -> Iterator[dict[str, Any]]:
        """Answer all requests, each as it finishes.

        At most ``max_in_flight`` are inside each process at once; requests are drawn from the iterable only as room comes.
        """
        source = iter(requests)
        following = next(source, None)
        while following is not None or any(worker.inside for worker in self._workers):
            while following is not None:
                worker = min(self._workers, key=lambda worker: sum(worker.inside.values()))
                if len(worker.inside) >= max_in_flight:
                    break
                self._enter(worker, [following], apart=False)
                following = next(source, None)
            yield self._receive("answer")

    def run_apart(self, batches: Iterable[Sequence[Message]], *, max_batches: int) -> Iterator[dict[str, Any]]:
        """Answer batch after batch, in the order of the requests.

        Each batch is run by one process, which reads it whole before it begins and takes in nothing else until it is done:
        so its forwards, and the last bits of what they compute, depend on the batch alone. At most ``max_batches`` per
        process are inside or have answers that were not read; batches are drawn from the iterable only as room comes. An empty
        batch says that there is none at the moment: the next is drawn when a batch has been read, or at once where none is inside.
        """
        source = iter(batches)
        following = next(source, None)
        held: deque[_Batch] = deque()
        found: dict[str, dict[str, Any]] = {}
        while following is not None or held:
            while following is not None:
                if not following:
                    if held:
                        break
                    following = next(source, None)
                    continue
                loads = [sum(batch.worker is worker for batch in held) for worker in self._workers]
                if min(loads) >= max_batches:
                    break
                worker = self._workers[loads.index(min(loads))]
                held.append(_Batch(worker, deque(request["request_id"] for request in following)))
                self._enter(worker, following, apart=True)
                following = next(source, None)
            if not held:
                continue
            unread = held[0].unread
            while unread:
                while unread[0] not in found:
                    answer = self._receive("answer")
                    found[answer["request_id"]] = answer
                yield found.pop(unread.popleft())
            held.popleft()
            if following is not None and not following:
                following = next(source, None)
