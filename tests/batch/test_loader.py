"""The loader yields what the plan says, from any step, and hands on what goes wrong."""

from __future__ import annotations

import threading
from dataclasses import fields

import pytest

from mtp_train.batch.loader import StepBatches, StepLoader
from mtp_train.batch.packing import pack
from mtp_train.batch.plan import DataPlan
from mtp_train.cache.reader import CacheReader
from mtp_train.records import Batch


def _plan(reader: CacheReader) -> DataPlan:
    return DataPlan(lengths=reader.lengths, sample_ids=reader.sample_ids, seed=1, tokens_per_pack=24, packs_per_step=2)


def _load(path, *, start: int, stop: int, rank: int = 0, world_size: int = 1, max_prefetch: int = 2) -> list[StepBatches]:
    reader = CacheReader(path, verify="first_read")
    with StepLoader(
        reader=reader, plan=_plan(reader), rank=rank, world_size=world_size, start_step=start, stop_step=stop, max_prefetch=max_prefetch
    ) as loader:
        return list(loader)


def _same(mine: Batch, theirs: Batch, equal) -> bool:
    return all(equal(getattr(mine, field.name), getattr(theirs, field.name)) for field in fields(Batch))


def test_batches_are_those_of_the_plan(cache, samples, equal):
    reader = CacheReader(cache, verify="first_read")
    plan = _plan(reader)
    steps = _load(cache, start=0, stop=12)
    assert [step.step for step in steps] == list(range(12))
    assert [step.epoch for step in steps] == [plan.epoch(step) for step in range(12)]
    assert steps[-1].epoch > 1
    for step in steps:
        for batch, numbers in zip(step.batches, plan.packs(step.step), strict=True):
            assert _same(batch, pack([samples[number] for number in numbers]), equal)


@pytest.mark.parametrize("start", [1, 5, 11, 12])
def test_it_resumes_at_any_step(cache, equal, start):
    whole, rest = _load(cache, start=0, stop=12), _load(cache, start=start, stop=12)
    assert [step.step for step in rest] == list(range(start, 12))
    for mine, theirs in zip(rest, whole[start:], strict=True):
        assert mine.epoch == theirs.epoch
        assert all(_same(a, b, equal) for a, b in zip(mine.batches, theirs.batches, strict=True))


@pytest.mark.parametrize("max_prefetch", [1, 7, 100])
def test_how_far_it_reads_ahead_changes_nothing(cache, equal, max_prefetch):
    for mine, theirs in zip(_load(cache, start=0, stop=9, max_prefetch=max_prefetch), _load(cache, start=0, stop=9), strict=True):
        assert all(_same(a, b, equal) for a, b in zip(mine.batches, theirs.batches, strict=True))


def test_two_ranks_share_what_one_has(cache, equal):
    alone = _load(cache, start=0, stop=9)
    first, second = (_load(cache, start=0, stop=9, rank=rank, world_size=2) for rank in range(2))
    for whole, a, b in zip(alone, first, second, strict=True):
        assert all(_same(mine, theirs, equal) for mine, theirs in zip(whole.batches, a.batches + b.batches, strict=True))


def test_it_reads_no_further_ahead_than_it_may(cache):
    class Counting(CacheReader):
        reads = 0

        def __getitem__(self, number):
            type(self).reads += 1
            return super().__getitem__(number)

    reader = Counting(cache, verify="first_read")
    plan = _plan(reader)
    with StepLoader(reader=reader, plan=plan, rank=0, world_size=1, start_step=0, stop_step=50, max_prefetch=3) as loader:
        steps = iter(loader)
        next(steps)
    allowed = sum(len(numbers) for step in range(4) for numbers in plan.packs(step))
    assert 0 < Counting.reads <= allowed


def test_an_error_comes_where_its_step_would_have_come(cache):
    reader = CacheReader(cache, verify="first_read")
    plan = _plan(reader)
    broken = len(reader.manifest.shards) - 1
    first = sum(len(shard.sample_ids) for shard in reader.manifest.shards[:broken])
    bad_step = next(step for step in range(50) if any(number >= first for numbers in plan.packs(step) for number in numbers))
    (cache / reader.manifest.shards[broken].name).write_bytes(b"damaged")
    seen = []
    with (
        StepLoader(reader=reader, plan=plan, rank=0, world_size=1, start_step=0, stop_step=50, max_prefetch=4) as loader,
        pytest.raises(ValueError, match=r"shard-\d+.*rerun precompute"),
    ):
        seen.extend(step.step for step in loader)
    assert seen == list(range(bad_step))


def test_closing_early_leaves_no_thread(cache):
    reader = CacheReader(cache, verify="first_read")
    before = threading.active_count()
    loader = StepLoader(reader=reader, plan=_plan(reader), rank=0, world_size=1, start_step=0, stop_step=10**6, max_prefetch=2)
    next(iter(loader))
    loader.close()
    loader.close()
    assert threading.active_count() == before
    assert list(loader) == []


def test_more_processes_than_packs_are_refused_at_once(cache):
    with pytest.raises(ValueError, match="at least 4, one for each of as many processes, found 2"):
        _load(cache, start=0, stop=1, world_size=4)
