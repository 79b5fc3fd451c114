"""Batches through several processes, where the next one is not always there: with processes that answer by themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp_train.engine import vllm_process
from mtp_train.engine.vllm_process import VllmPool


class Worker:
    def __init__(self) -> None:
        self.inside: dict[str, int] = {}

    def close(self) -> None:
        pass


class Pool(VllmPool):
    """A pool whose processes answer what was sent first, when they are asked."""

    def __init__(self, num_workers: int) -> None:
        self._workers = [Worker() for _ in range(num_workers)]  # type: ignore[misc]
        self.sent: deque[str] = deque()

    def _enter(self, worker: Any, requests: Any, *, apart: bool) -> None:
        self.sent += [request["request_id"] for request in requests]

    def _receive(self, kind: str) -> dict[str, Any]:
        return {"request_id": self.sent.popleft()}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_source_that_has_nothing_at_the_moment_is_asked_again_when_something_was_read(num_workers: int) -> None:
    """Whoever waits for others must first be given what is its own: nothing may be inside while the source waits."""
    read: list[str] = []
    waited = []

    def batches() -> Iterator[list[dict[str, str]]]:
        asked = 0
        for number in range(9):
            if number % 3 == 2:
                while asked > len(read):  # as precompute does: it still has shards to write
                    yield []
                waited.append((asked, len(read)))
            yield [{"request_id": f"{number}.{part}"} for part in range(2)]
            asked += 2

    pool = Pool(num_workers)
    for answer in pool.run_apart(batches(), max_batches=2):
        read.append(answer["request_id"])
    assert read == [f"{number}.{part}" for number in range(9) for part in range(2)]
    assert waited == [(4, 4), (10, 10), (16, 16)]


def test_a_source_that_only_ever_has_nothing_ends() -> None:
    assert list(Pool(1).run_apart(iter([[], [], []]), max_batches=2)) == []


class Started(VllmPool):
    """A pool whose processes are ready at once."""

    def _receive(self, kind: str) -> dict[str, Any]:
        return {"kind": kind, "description": {}}


@pytest.mark.parametrize(
    ("llm", "said"),
    [
        ({"enforce_eager": False, "speculative_config": {}}, "starting 2 copies of vLLM with drafts, float32; it compiles first"),
        ({"enforce_eager": True}, "starting 2 copies of vLLM, float32\n"),
    ],
)
def test_a_start_is_told_with_what_it_takes_and_took(
    llm: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_process, "_Worker", lambda **words: Worker())
    given: dict[str, Any] = {"llm": {"dtype": "float32", **llm}, "environments": [{}, {}], "scratch": tmp_path}
    with Started(**given, target_layer_ids=None, tap_draft=False, time_steps=False):
        told = capsys.readouterr().err
    assert said in told and "ready after 0 s" in told
    assert not list(tmp_path.iterdir())
