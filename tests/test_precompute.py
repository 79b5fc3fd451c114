"""Workers that share one cache, as processes: killed, stopped, slow, at once; the cache is the one that a single worker makes.

The engine is a list of samples, so that a worker costs nothing but its process.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_train import precompute
from mtp_train.cache import claim
from mtp_train.cache.claim import Claims
from mtp_train.cache.sharing import Work
from mtp_train.cache.wanted import Production

_SPEC = importlib.util.spec_from_file_location("conftest_of_cache", Path(__file__).parent / "cache" / "conftest.py")
assert _SPEC is not None and _SPEC.loader is not None
CACHE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(CACHE)

# Ten samples in four shards would leave three workers little to share.
LENGTHS = tuple(3 + (7 * number) % 10 for number in range(40))
DEADLINE_S = 120.0


class Engine:
    """Answers from memory; ``before`` is called with each shard's first sample, as it is about to be read."""

    def __init__(self, source: Any, before: Callable[[str], None]) -> None:
        self.by_id = {sample.sample_id: sample for sample in source.samples}
        self.before = before

    def prefill_groups(self, groups: Iterable[list[Any]], settings: object) -> Iterator[Iterator[Any]]:
        for group in groups:
            if group is not None:
                yield self._samples(group)

    def _samples(self, group: list[Any]) -> Iterator[Any]:
        self.before(group[0].prompt_id)
        for response in group:
            yield self.by_id[response.prompt_id]


class Workers:
    """Processes over one folder; each writes down what it was asked to read."""

    def __init__(self, source: Any, path: Path) -> None:
        self.source, self.path, self.pids, self.number = source, path, dict[int, int](), -1
        self.read = path.with_name(path.name + ".read")
        self.read.touch()

    def start(self, *, silence_s: float = 60.0, before: Callable[[str], None] = lambda sample_id: None, elsewhere: bool = False) -> int:
        """``elsewhere``: no worker can see whether another's process lives, as if each had a machine of its own."""
        self.number += 1
        number = self.number
        pid = os.fork()
        if pid:
            self.pids[number] = pid
            return number
        code = 1
        try:
            precompute._LOOK_S = 0.02
            if elsewhere:
                claim._process = lambda pid: None

            def noted(sample_id: str) -> None:
                with open(self.read, "a", encoding="utf-8") as file:
                    file.write(f"{number} {sample_id}\n")
                before(sample_id)

            self.work(Engine(self.source, noted), silence_s=silence_s)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def work(self, engine: Engine, *, silence_s: float) -> None:
        writer = self.source.writer(self.path)
        responses = {s.sample_id: SimpleNamespace(prompt_id=s.sample_id, token_ids=s.token_ids_T.tolist()) for s in self.source.samples}
        with Claims(self.path, silence_s=silence_s) as claims:
            work = Work(writer=writer, claims=claims)
            production = Production(writer=writer, mode="offline", max_bytes=None)
            while True:
                precompute._write_shards(engine, None, writer=writer, work=work, production=production, responses=responses)
                if work.finish(look_s=0.02) is not None:
                    return

    def end(self, number: int) -> int:
        """A worker's exit code, minus the signal that killed it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pids.pop(number), 0)[1])

    def reads(self) -> list[tuple[int, str]]:
        return [(int(number), name) for number, name in map(str.split, self.read.read_text(encoding="utf-8").splitlines())]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.fixture
def source() -> Any:
    return CACHE.Source(CACHE._identity(), LENGTHS)


@pytest.fixture
def expected(source: Any, tmp_path: Path) -> dict[str, bytes]:
    source.write(tmp_path / "alone")
    return CACHE._contents(tmp_path / "alone")


@pytest.fixture
def workers(source: Any, tmp_path: Path) -> Iterator[Workers]:
    found = Workers(source, tmp_path / "cache")
    yield found
    for pid in found.pids.values():  # of a test that failed
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def num_shards(contents: dict[str, bytes]) -> int:
    return sum(name.endswith(".safetensors") for name in contents)


def test_three_workers_read_every_shard_once(workers: Workers, expected: dict[str, bytes]) -> None:
    for _ in range(3):
        workers.start(before=lambda sample_id: time.sleep(0.02))
    assert [workers.end(number) for number in range(3)] == [0, 0, 0]
    assert CACHE._contents(workers.path) == expected
    assert num_shards(expected) > 8
    reads = workers.reads()
    assert len(reads) == len({name for _, name in reads}) == num_shards(expected)
    assert {number for number, _ in reads} == {0, 1, 2}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_of_three_is_killed_and_the_others_make_its_shard(workers: Workers, expected: dict[str, bytes], elsewhere: bool) -> None:
    """On the killed one's machine they see it at once; from another, after the silence."""

    def die_at_the_second(sample_id: str) -> None:
        if [number for number, _ in workers.reads()].count(1) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)

    for number in range(3):
        before = die_at_the_second if number == 1 else (lambda sample_id: time.sleep(0.02))
        workers.start(silence_s=0.5 if elsewhere else 3600.0, elsewhere=elsewhere, before=before)
    assert [workers.end(number) for number in range(3)] == [0, -signal.SIGKILL, 0]
    assert CACHE._contents(workers.path) == expected
    reads = workers.reads()
    names = [name for _, name in reads]
    (again,) = {name for name in names if names.count(name) > 1}
    assert len(reads) == num_shards(expected) + 1 and again == [name for number, name in reads if number == 1][1]


def test_a_slow_worker_holds_up_nothing_but_its_shard(workers: Workers, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Nor is it taken for dead, however long it takes: it says that it lives."""

    def wait(sample_id: str) -> None:
        while not (tmp_path / "go").exists():
            time.sleep(0.01)

    slow = workers.start(silence_s=0.5, elsewhere=True, before=wait)
    workers.until(lambda: len(workers.reads()) == 1)
    fast = workers.start(silence_s=0.5, elsewhere=True)
    workers.until(lambda: len(list(workers.path.glob("shard-*.json"))) == num_shards(expected) - 1)
    time.sleep(1.5)  # three silences
    assert not (workers.path / "manifest.json").exists()
    (tmp_path / "go").touch()
    assert [workers.end(slow), workers.end(fast)] == [0, 0]
    assert CACHE._contents(workers.path) == expected
    assert len(workers.reads()) == num_shards(expected)


def test_one_that_was_stopped_is_taken_over_and_may_go_on(workers: Workers, expected: dict[str, bytes]) -> None:
    stopped = workers.start(silence_s=0.3, elsewhere=True, before=lambda sample_id: os.kill(os.getpid(), signal.SIGSTOP))
    os.waitid(os.P_PID, workers.pids[stopped], os.WSTOPPED)
    other = workers.start(silence_s=0.3, elsewhere=True)
    assert workers.end(other) == 0
    assert CACHE._contents(workers.path) == expected
    before = {path: path.stat().st_ino for path in workers.path.iterdir()}
    os.kill(workers.pids[stopped], signal.SIGCONT)
    assert workers.end(stopped) == 0
    assert CACHE._contents(workers.path) == expected and {path: path.stat().st_ino for path in workers.path.iterdir()} == before


def test_two_that_write_the_same_shard_at_once_do_no_harm(workers: Workers, expected: dict[str, bytes], monkeypatch: Any) -> None:
    """Claims that everybody gets: the worst that a file system, or an owner that came back, could do."""
    monkeypatch.setattr(Claims, "take", lambda self, name: self._held.setdefault(name, self._path(name, 0)) is not None)
    for _ in range(3):
        workers.start()
    assert [workers.end(number) for number in range(3)] == [0, 0, 0]
    assert CACHE._contents(workers.path) == expected


def test_what_was_damaged_between_two_calls_is_found_once_and_made_anew(workers: Workers, expected: dict[str, bytes]) -> None:
    workers.start()
    assert workers.end(0) == 0
    broken = bytearray(expected["shard-00002.safetensors"])
    broken[-1] ^= 1
    (workers.path / "shard-00002.safetensors").write_bytes(broken)
    (workers.path / "shard-00001.safetensors").write_bytes(expected["shard-00001.safetensors"][:-1])
    num_reads = len(workers.reads())
    numbers = [workers.start(), workers.start()]
    assert [workers.end(number) for number in numbers] == [0, 0]
    assert CACHE._contents(workers.path) == expected
    assert len(workers.reads()) == num_reads + 2


def test_two_different_caches_begun_at_once_in_one_folder_leave_one(source: Any, tmp_path: Path) -> None:
    """Whichever plan came first stands, and the other worker is refused."""
    for attempt in range(5):
        path, children = tmp_path / f"cache-{attempt}", []
        path.mkdir()
        for shard_tokens in (24, 31):
            pid = os.fork()
            if pid == 0:
                while not (path / "go").exists():
                    pass
                try:
                    source.writer(path, shard_tokens=shard_tokens)
                except ValueError as fault:
                    os._exit(3 if "this cache was begun with shard_tokens" in str(fault) else 1)
                os._exit(0)
            children.append(pid)
        (path / "go").touch()
        assert sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children) == [0, 3]
