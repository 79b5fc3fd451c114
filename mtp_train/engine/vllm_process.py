"""Our side of the vLLM processes: starts them, keeps a bounded number of requests inside, hands out answers as they come."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mtp_train.runtime import atomic_write_json

# Lines of the process's stderr that an error shows.
_SHOWN_LOG_LINES = 25
_STOP_TIMEOUT_S = 30.0
_Inbox = queue.SimpleQueue[tuple[int, dict[str, Any] | None]]


class _Worker:
    """One ``vllm_worker`` process; what it says goes into the pool's inbox under its index."""

    def __init__(self, *, index: int, spec: Path, log: Path, environment: Mapping[str, str], inbox: _Inbox) -> None:
        self.index = index
        self.inside: dict[str, int] = {}
        self._inbox = inbox
        self._log = open(log, "w+b")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mtp_train.engine.vllm_worker", str(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._inbox.put((self.index, json.loads(line)))
        self._inbox.put((self.index, None))

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure() from None

    def failure(self) -> ValueError:
        code = self.process.wait(_STOP_TIMEOUT_S)
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()[-_SHOWN_LOG_LINES:]
        return ValueError(
            f"engine=vllm: expected the vLLM process to answer, found that it ended with status {code}; the last lines it wrote:\n"
            + "\n".join(lines)
        )

    def close(self) -> None:
        """End the process: kindly where it has nothing left to do, else at once."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.poll() is None and self.inside:
            self.process.terminate()
        with contextlib.suppress(BrokenPipeError):  # it may have gone already: then there is nothing to tell it
            self.process.stdin.close()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(_STOP_TIMEOUT_S)
        self.process.stdout.close()
        self._log.close()


class VllmPool:
    """Equal vLLM processes behind one door; use it in a ``with`` block.

    ``llm`` are the arguments of vLLM's ``LLM``; ``environments`` has one entry per process, added to ours.
    ``target_layer_ids`` (None: nothing is tapped; empty: the last hidden state only) and ``tap_draft`` switch the probe
    on. ``scratch`` is where the processes leave what is handed over in files (None: the system's temporary folder).
    """

    def __init__(
        self,
        *,
        llm: Mapping[str, Any],
        environments: Sequence[Mapping[str, str]],
        target_layer_ids: tuple[int, ...] | None,
        tap_draft: bool,
        scratch: Path | None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mtp-train-vllm-", dir=scratch)
        self.folder = Path(self._folder.name)
        spec = self.folder / "spec.json"
        layers = None if target_layer_ids is None else list(target_layer_ids)
        atomic_write_json(spec, {"llm": dict(llm), "target_layer_ids": layers, "tap_draft": tap_draft})
        self._inbox: _Inbox = queue.SimpleQueue()
        self._workers = [
            _Worker(index=index, spec=spec, log=self.folder / f"log.{index}.txt", environment=environment, inbox=self._inbox)
            for index, environment in enumerate(environments)
        ]
        self.description: dict[str, Any] = {}

    def __enter__(self) -> VllmPool:
        try:
            for _ in self._workers:
                self.description = self._receive("ready")["description"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and remove the folder."""
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()

    def _receive(self, kind: str) -> dict[str, Any]:
        """Wait for the next message, which must be of this kind. ValueError with the end of the log where a process has gone."""
        index, message = self._inbox.get()
        if message is None:
            raise self._workers[index].failure()
        assert message["kind"] == kind, (message["kind"], kind)
        self._workers[index].inside.pop(message.get("request_id", ""), None)
        return message

    def ask(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a message to every process while nothing else is inside, and return their answers."""
        for worker in self._workers:
            assert not worker.inside, "asked while requests are inside"
            worker.send(message)
        return [self._receive(message["kind"]) for _ in self._workers]

    def run(
        self, requests: Iterable[Mapping[str, Any]], *, max_in_flight: int, max_in_flight_tokens: int | None
    ) -> Iterator[dict[str, Any]]:
        """Answer all requests, each as it finishes.

        At most ``max_in_flight`` requests, and as many of their tokens (None: no limit), are inside each process at
        once, so that neither side holds more than that; requests are drawn from the iterable only as room comes.
        """
        source = iter(requests)
        following = next(source, None)
        while following is not None or any(worker.inside for worker in self._workers):
            while following is not None:
                worker = min(self._workers, key=lambda worker: sum(worker.inside.values()))
                size = len(following["token_ids"])
                full = max_in_flight_tokens is not None and sum(worker.inside.values()) + size > max_in_flight_tokens
                if worker.inside and (full or len(worker.inside) >= max_in_flight):
                    break
                assert all(following["request_id"] not in other.inside for other in self._workers), following["request_id"]
                worker.inside[following["request_id"]] = size
                worker.send({"kind": "request", **following})
                following = next(source, None)
            yield self._receive("answer")
