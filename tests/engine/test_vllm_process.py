"""Batches through several processes, where the next one is not always there: with processes that answer by themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from mtp_train.engine.vllm_process import VllmPool


class Worker:
    def __init__(self) -> None:
        self.inside: dict[str, int] = {}


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
