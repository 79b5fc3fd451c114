"""From when to when the training reads each shard, so that shards can be fetched or made in time, and dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mtp_train.batch.plan import DataPlan


class _Span(NamedTuple):
    """The packs, numbered from the first one of training, that read a shard within an epoch."""

    first: int
    last: int
    shard: int


class ShardUse:
    """When each shard is read; ``shards``: the shard that each sample of the plan lies in."""

    def __init__(self, plan: DataPlan, *, shards: Sequence[int]) -> None:
        self._plan, self._shards = plan, list(shards)
        self._spans: dict[int, list[_Span]] = {}

    def wanted(self, step: int, *, stop_step: int) -> list[int]:
        """The shards that steps from ``step`` up to ``stop_step`` (not included) read, within two epochs: those begun come first,
        then the others in the order in which they are begun."""
        start, stop = step * self._plan.packs_per_step, stop_step * self._plan.packs_per_step
        epoch = self._plan.epoch(step)
        found = dict.fromkeys(
            span.shard for number in (epoch, epoch + 1) for span in self._of_epoch(number) if span.last >= start and span.first < stop
        )
        return list(found)

    def most_bytes(self, shard_bytes: Mapping[int, int], *, num_steps: int, stop_step: int) -> int:
        """The most that the shards of ``num_steps`` consecutive steps, and those begun and not done with, take together, up to
        ``stop_step``: with less room, training cannot go on."""
        behind = num_steps * self._plan.packs_per_step
        events: list[tuple[int, int, int]] = []
        for epoch in range(self._plan.epoch(max(0, stop_step - 1)) + 1):
            for span in self._of_epoch(epoch):
                events += [(span.first, 1, span.shard), (span.last + behind, -1, span.shard)]
        held = most = 0
        uses = dict[int, int]()  # where an epoch is shorter than these steps, several at once: the shard lies there once
        for _, change, shard in sorted(events, key=lambda event: (event[0], -event[1])):
            before = uses.get(shard, 0)
            uses[shard] = before + change
            if 0 in (before, uses[shard]):
                held += change * shard_bytes[shard]
            most = max(most, held)
        return most

    def leading(self, shard_bytes: Mapping[int, int], *, room_bytes: int) -> list[int]:
        """The first shards that training reads, as many as fit into so much room."""
        chosen, held = [], 0
        for span in self._of_epoch(0):
            held += shard_bytes[span.shard]
            if held > room_bytes:
                break
            chosen.append(span.shard)
        return chosen

    def _of_epoch(self, epoch: int) -> list[_Span]:
        """The shards of an epoch by the first pack that reads them."""
        if epoch not in self._spans:
            base, first, last = self._plan.first_pack(epoch), dict[int, int](), dict[int, int]()
            for place, numbers in enumerate(self._plan.epoch_packs(epoch)):
                for number in numbers:
                    shard = self._shards[number]
                    first.setdefault(shard, base + place)
                    last[shard] = base + place
            while len(self._spans) >= 2:
                del self._spans[next(iter(self._spans))]
            self._spans[epoch] = [_Span(first[shard], last[shard], shard) for shard in first]
        return self._spans[epoch]
