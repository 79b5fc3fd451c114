"""Workers that share one cache, as processes: killed, stopped, slow, at once; the cache is the one that a single worker makes.

The engine is a list of samples, so that a worker costs nothing but its process.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_train import precompute
from mtp_train.batch.loader import StepLoader
from mtp_train.batch.packing import pack
from mtp_train.batch.plan import DataPlan
from mtp_train.cache import claim, growing
from mtp_train.cache.claim import Claims
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.sharing import Work
from mtp_train.cache.wanted import WANTED, Mode, Production, Wanted
from mtp_train.target.draft_vocabulary import count_answer_tokens
from mtp_train.trainer.data import Cache, split
from mtp_train.trainer.supply import Supply, make_order

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

    def start(
        self,
        *,
        silence_s: float = 60.0,
        before: Callable[[str], None] = lambda sample_id: None,
        elsewhere: bool = False,
        mode: Mode = "offline",
        max_bytes: int | None = None,
    ) -> int:
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

            self.work(Engine(self.source, noted), silence_s=silence_s, mode=mode, max_bytes=max_bytes)
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)

    def work(self, engine: Engine, *, silence_s: float, mode: Mode, max_bytes: int | None) -> None:
        writer = self.source.writer(self.path)
        responses = {s.sample_id: SimpleNamespace(prompt_id=s.sample_id, token_ids=s.token_ids_T.tolist()) for s in self.source.samples}
        with Claims(self.path, silence_s=silence_s) as claims:
            work = Work(writer=writer, claims=claims)
            production = Production(writer=writer, mode=mode, max_bytes=max_bytes)
            while True:
                precompute._write_shards(engine, None, writer=writer, work=work, production=production, responses=responses)
                if production.is_over or work.finish(look_s=0.02) is not None:
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


# What follows trains, as far as data goes: 200 samples in 88 shards, eight of which are shuffled over at a time.
STREAMED = tuple(3 + (7 * number) % 10 for number in range(200))
NUM_STEPS, MAX_PREFETCH = 120, 2


class Training:
    """A training's view of a cache: its batches, step by step."""

    def __init__(self, cache: Cache, *, first_step: int = 0) -> None:
        self.cache, self.first_step = cache, first_step
        self.train, _ = split(cache, fraction=0.0, seed=0)
        self.plan = DataPlan(
            lengths=self.train.lengths,
            sample_ids=self.train.sample_ids,
            seed=0,
            tokens_per_pack=14,
            packs_per_step=2,
            order=make_order(self.train, window=8, shares=None, seed=0),
        )
        self.supply = None
        if not cache.is_local:
            self.supply = Supply(train=self.train, plan=self.plan, first_step=first_step, num_steps=NUM_STEPS, max_prefetch=MAX_PREFETCH)

    def batches(self, *, stop_step: int = NUM_STEPS, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        loader = StepLoader(
            reader=self.train,
            plan=self.plan,
            rank=rank,
            world_size=world_size,
            start_step=self.first_step,
            stop_step=stop_step,
            max_prefetch=MAX_PREFETCH,
            before_read=None if self.supply is None else self.supply.before_read,
        )
        with loader:
            yield from loader


def equal(mine: Any, theirs: Any) -> bool:
    return mine.step == theirs.step and all(
        a.sample_ids == b.sample_ids
        and torch.equal(a.token_ids_T, b.token_ids_T)
        and torch.equal(a.loss_mask_T, b.loss_mask_T)
        and torch.equal(a.hidden_TD, b.hidden_TD)
        and torch.equal(a.teacher.log_probs_MC, b.teacher.log_probs_MC)
        for a, b in zip(mine.batches, theirs.batches, strict=True)
    )


@pytest.fixture
def streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Workers, list[Any], dict[str, bytes]]]:
    """Workers of a cache that is to be trained on while it is made; the steps of an offline training; the complete cache."""
    monkeypatch.setattr(growing, "_LOOK_S", 0.01)
    source = CACHE.Source(CACHE._identity(), STREAMED)
    source.write(tmp_path / "alone")
    offline = Training(CacheReader(tmp_path / "alone", verify="first_read"))
    steps = list(offline.batches())
    assert offline.plan.epoch(NUM_STEPS - 1) >= 1, "an epoch is begun anew"
    workers = Workers(source, tmp_path / "cache")
    source.writer(workers.path)  # the plan
    yield workers, steps, CACHE._contents(tmp_path / "alone")
    for pid in workers.pids.values():  # of a test that failed
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(("mode", "num_workers"), [("stream", 1), ("stream", 2), ("hybrid", 2)])
def test_training_sees_the_same_batches_in_the_same_order_in_every_mode(streamed: Any, mode: Mode, num_workers: int) -> None:
    workers, steps, alone = streamed
    training = Training(growing.GrowingCache(workers.path))
    max_bytes = training.supply.most_bytes if mode == "stream" else None
    for _ in range(num_workers):
        workers.start(mode=mode, max_bytes=max_bytes)
    held = []
    for mine, theirs in zip(training.batches(), steps, strict=True):
        assert equal(mine, theirs)
        held.append(len(list(workers.path.glob("shard-*.safetensors"))))
    training.cache.done()
    assert [workers.end(number) for number in range(num_workers)] == [0] * num_workers
    found = CACHE._contents(workers.path)
    del found[WANTED]
    if mode == "hybrid":
        assert found == alone and len(workers.reads()) == num_shards(alone)
    else:
        assert "manifest.json" not in found and all(found[name] == alone[name] for name in found)
        most = max_bytes // ((1 << 16) + 1)  # shards that fit
        assert max(held) <= most + num_workers, "one more for each worker that was at it when another word came"
        assert num_shards(found) <= most < 0.6 * num_shards(alone) < num_shards(alone) < len(workers.reads())


def test_both_sides_are_killed_and_go_on(streamed: Any) -> None:
    """The maker in the middle of a shard; the training ten steps after its last state, which shards that were dropped belong to."""
    workers, steps, _ = streamed

    def die_late(sample_id: str) -> None:
        if len(workers.reads()) == 60:
            os.kill(os.getpid(), signal.SIGKILL)

    first = Training(growing.GrowingCache(workers.path))
    max_bytes = first.supply.most_bytes
    one = workers.start(mode="stream", max_bytes=max_bytes, before=die_late)
    for mine, theirs in zip(first.batches(stop_step=60), steps, strict=False):
        if mine.step == 20:
            begun = threading.Thread(target=lambda: (workers.end(one), workers.start(mode="stream", max_bytes=max_bytes)))
            begun.start()
        assert equal(mine, theirs)
    begun.join()
    second = Training(growing.GrowingCache(workers.path), first_step=50)
    assert all(equal(mine, theirs) for mine, theirs in zip(second.batches(), steps[50:], strict=True))
    second.cache.done()
    assert workers.end(1) == 0


def test_too_little_room_is_said_with_both_figures(streamed: Any) -> None:
    workers, _, _ = streamed
    training = Training(growing.GrowingCache(workers.path))
    writer = workers.source.writer(workers.path)
    production = Production(writer=writer, mode="stream", max_bytes=training.supply.most_bytes - 1)
    with pytest.raises(ValueError, match=rf"\({training.supply.most_bytes} bytes\), what the training needs at once, found"):
        production.order()


def test_modes_and_files_that_do_not_go_together_are_refused(streamed: Any, tmp_path: Path) -> None:
    workers, _, alone = streamed
    writer = workers.source.writer(workers.path)
    for mode, max_bytes in (("offline", 10), ("hybrid", 10), ("stream", None)):
        with pytest.raises(ValueError, match="max_bytes: expected a size with mode=stream and null with any other"):
            Production(writer=writer, mode=mode, max_bytes=max_bytes)
    with pytest.raises(ValueError, match="expected no finished cache, which mode=stream would drop"):
        Production(writer=workers.source.writer(tmp_path / "alone"), mode="stream", max_bytes=10**9)
    assert CACHE._contents(tmp_path / "alone") == alone
    production = Production(writer=writer, mode="stream", max_bytes=10**9)
    assert production.order() == () and "a training with mode=stream" in str(production.waits_for())
    Wanted(plan_sha256="another cache", shards=(1,), most_bytes=0, done=True).write(workers.path)
    assert production.order() == () and not production.is_over
    Wanted(plan_sha256=writer.plan.sha256(), shards=(10**6,), most_bytes=0, done=False).write(workers.path)
    with pytest.raises(ValueError, match=r"wanted\.json: expected shards below \d+, found 1000000"):
        production.order()
    (workers.path / WANTED).write_text("{")
    with pytest.raises(ValueError, match=r"wanted\.json: .*the training writes it anew"):
        production.order()


def test_a_sample_that_was_left_out_takes_its_place_and_counts_nothing(tmp_path: Path) -> None:
    source = CACHE.Source(CACHE._identity(), LENGTHS)
    source.poison(3, hidden_TD=source.samples[3].hidden_TD * float("nan"))
    source.write(tmp_path / "cache")
    cache = growing.GrowingCache(tmp_path / "cache")
    assert len(cache) == len(LENGTHS) and cache.sample_ids[3] == "sample-3"
    sample = cache[3]
    assert sample.num_tokens == LENGTHS[3] and not sample.loss_mask_T.any() and not sample.hidden_TD.any()
    assert sample.taps_TLD.shape == source.samples[3].taps_TLD.shape and sample.hidden_TD.dtype == cache[4].hidden_TD.dtype
    pack([cache[2], sample, cache[4]])
    assert torch.equal(cache[4].hidden_TD, source.samples[4].hidden_TD)


def test_answers_are_counted_before_there_are_hidden_states(tmp_path: Path) -> None:
    source = CACHE.Source(CACHE._identity(), LENGTHS)
    source.write(tmp_path / "cache")
    responses = [SimpleNamespace(token_ids=sample.token_ids_T.tolist(), loss_mask=sample.loss_mask_T.tolist()) for sample in source.samples]
    growing.write_answer_counts(tmp_path / "cache", responses, vocab_size=CACHE.VOCAB)
    cache = growing.GrowingCache(tmp_path / "cache")
    assert torch.equal(cache.answer_counts(), count_answer_tokens(source.samples, vocab_size=CACHE.VOCAB))
    (tmp_path / "cache" / growing.ANSWER_COUNTS).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="expected counts of answer tokens"):
        cache.answer_counts()


def test_a_damaged_shard_is_named_while_the_cache_grows(tmp_path: Path) -> None:
    source = CACHE.Source(CACHE._identity(), LENGTHS)
    source.write(tmp_path / "cache")
    shard = tmp_path / "cache" / "shard-00000.safetensors"
    broken = bytearray(shard.read_bytes())
    broken[-1] ^= 1
    shard.write_bytes(broken)
    with pytest.raises(ValueError, match=r"shard-00000.*rerun precompute"):
        growing.GrowingCache(tmp_path / "cache")[0]
