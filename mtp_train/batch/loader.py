"""Reads the batches of each step ahead of the training loop, in a thread, in an order that only the plan decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from mtp_train.batch.packing import pack
from mtp_train.batch.plan import DataPlan, check_packs
from mtp_train.records import Batch, Sample


class Samples(Protocol):
    """A ``CacheReader``, or some of its samples numbered anew."""

    def __getitem__(self, number: int) -> Sample: ...


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """One rank's share of a global step: ``batches`` are accumulated, one after the other. ``epoch``: the step's first pack's."""

    step: int
    epoch: int
    batches: list[Batch]


class StepLoader:
    """Iterates the steps from ``start_step`` up to ``stop_step`` (not included) for one rank.

    At most ``max_prefetch`` steps are read ahead, one after the other, in one thread, beginning at once. Use it as a context
    manager, or call ``close``, which stops the thread. ``before_read`` is called there with each step that is about to be read.
    An error in the thread (a damaged shard) is raised where the step would have come.
    """

    def __init__(
        self,
        *,
        reader: Samples,
        plan: DataPlan,
        rank: int,
        world_size: int,
        start_step: int,
        stop_step: int,
        max_prefetch: int,
        before_read: Callable[[int], None] | None = None,
    ) -> None:
        if max_prefetch < 1:
            raise ValueError(f"max_prefetch: expected at least 1 step, found {max_prefetch}")
        assert 0 <= rank < world_size, (rank, world_size)
        assert 0 <= start_step <= stop_step, (start_step, stop_step)
        check_packs(plan.packs_per_step, world_size=world_size)
        self._reader = reader
        self._plan = plan
        self._rank = rank
        self._world_size = world_size
        self._before_read = before_read
        self._steps = iter(range(start_step, stop_step))
        self._ahead: deque[Future[StepBatches]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-loader")
        for _ in range(max_prefetch):
            self._read_ahead()

    def __iter__(self) -> Iterator[StepBatches]:
        while self._ahead:
            batches = self._ahead.popleft().result()
            self._read_ahead()
            yield batches

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next step's batches for so long at the most; whether they, or an error in their place, are there."""
        return not self._ahead or bool(wait([self._ahead[0]], timeout=timeout_s).done)

    def close(self, *, wait: bool = True) -> None:
        """Drop what was read ahead and stop the thread; harmless when repeated. ``wait`` for what it is reading."""
        self._ahead.clear()
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(wait=error is None)  # else it may be waiting for what never comes

    def _read_ahead(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._ahead.append(self._thread.submit(self._read, step))

    def _read(self, step: int) -> StepBatches:
        if self._before_read is not None:
            self._before_read(step)
        packs = self._plan.rank_packs(step, rank=self._rank, world_size=self._world_size)
        batches = [pack([self._reader[number] for number in numbers]) for numbers in packs]
        return StepBatches(step=step, epoch=self._plan.epoch(step), batches=batches)
