"""Decides, from the lengths and the order of the samples alone, which samples are trained on together at every step.

All epochs form one endless row of packs: epoch 0's, then epoch 1's, and so on. Step s trains on packs
``s * packs_per_step`` to ``(s + 1) * packs_per_step`` of that row, over all ranks and accumulation. So no sample is lost
or repeated within an epoch (what is left over at an epoch's end begins the next one's first step), and how many
processes share the work decides nothing.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

from mtp_train.batch.order import Order, Shuffle

# Packs that are open at a time: a sample goes to the first with room. More fill better, and mix lengths less evenly in time.
_OPEN_PACKS = 16
# Epochs kept in memory; a step may straddle two.
_KEPT_EPOCHS = 2


def check_packs(packs_per_step: int, *, world_size: int) -> None:
    """ValueError where a step has no pack for some of ``world_size`` processes."""
    if packs_per_step < world_size:
        raise ValueError(
            f"packs_per_step: expected at least {world_size}, one for each of as many processes, found {packs_per_step}; "
            "raise it (and lower tokens_per_pack to keep the step as large), or start fewer processes"
        )


class DataPlan:
    """The packs of every step: lists of sample numbers, at random access.

    ``lengths`` and ``sample_ids`` describe the samples (``CacheReader`` has both); a pack holds at most
    ``tokens_per_pack`` tokens; ``packs_per_step`` counts all ranks and accumulation. ``order`` None shuffles all samples anew each
    epoch. Errors: ValueError for a sample longer than a pack, which it names.
    """

    def __init__(
        self,
        *,
        lengths: Sequence[int],
        sample_ids: Sequence[str],
        seed: int,
        tokens_per_pack: int,
        packs_per_step: int,
        order: Order | None = None,
    ) -> None:
        if not lengths:
            raise ValueError("data: expected at least one sample, found none")
        if packs_per_step < 1 or seed < 0:
            raise ValueError(f"data: expected packs_per_step of at least 1 and a seed of at least 0, found {packs_per_step} and {seed}")
        assert len(lengths) == len(sample_ids), (len(lengths), len(sample_ids))
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if lengths[longest] > tokens_per_pack:
            raise ValueError(
                f"tokens_per_pack: expected at least {lengths[longest]} (the tokens of sample {sample_ids[longest]!r}, the longest of "
                f"{sum(length > tokens_per_pack for length in lengths)} that do not fit), found {tokens_per_pack}; raise it, "
                "or precompute with a smaller max_length_tokens"
            )
        self.packs_per_step = packs_per_step
        self.tokens_per_pack = tokens_per_pack
        self._lengths = tuple(lengths)
        self._order = order or Shuffle(shards=[0] * len(lengths), window=None, seed=seed)
        self._first_pack = [0]  # number of the first pack of each epoch that was looked at, and of the one after
        self._epochs: dict[int, list[list[int]]] = {}
        self._lock = threading.RLock()  # the loader's thread and the training loop both ask

    def order(self, epoch: int) -> list[int]:
        """The samples of an epoch, in order."""
        return self._order.epoch(epoch)

    def epoch_packs(self, epoch: int) -> list[list[int]]:
        """All packs of one epoch, in order."""
        with self._lock:
            if epoch not in self._epochs:
                while len(self._epochs) >= _KEPT_EPOCHS:
                    del self._epochs[next(iter(self._epochs))]
                self._epochs[epoch] = _fill(self.order(epoch), self._lengths, self.tokens_per_pack)
            return self._epochs[epoch]

    def epoch(self, step: int) -> int:
        """The epoch that the first pack of ``step`` belongs to."""
        return self._epoch_of(step * self.packs_per_step)

    def packs(self, step: int) -> list[list[int]]:
        """The ``packs_per_step`` packs of ``step``, each a list of sample numbers."""
        assert step >= 0, step
        first = step * self.packs_per_step
        chosen: list[list[int]] = []
        epoch = self._epoch_of(first)
        while len(chosen) < self.packs_per_step:
            start = first + len(chosen) - self._first_pack[epoch]
            chosen += self.epoch_packs(epoch)[start : start + self.packs_per_step - len(chosen)]
            epoch += 1
            self._look_at(epoch)
        return chosen

    def rank_packs(self, step: int, *, rank: int, world_size: int) -> list[list[int]]:
        """The packs of ``step`` that one of ``world_size`` processes trains on: every ``world_size``-th, from ``rank``; where they
        do not come out even, the last ranks have one less."""
        check_packs(self.packs_per_step, world_size=world_size)
        return self.packs(step)[rank::world_size]

    def packs_per_process(self, world_size: int) -> int:
        """Packs per step of the process that has most of them."""
        return -(-self.packs_per_step // world_size)

    def steps_of(self, epochs: int) -> int:
        """Steps of so many epochs; the last one may reach into the epoch after."""
        assert epochs >= 0, epochs
        self._look_at(epochs)
        return -(-self._first_pack[epochs] // self.packs_per_step)

    def fill(self, epoch: int = 0) -> float:
        """Share of the packs' room that tokens take, over one epoch."""
        packs = self.epoch_packs(epoch)
        return sum(self._lengths[number] for numbers in packs for number in numbers) / (len(packs) * self.tokens_per_pack)

    def first_pack(self, epoch: int) -> int:
        """The number of an epoch's first pack in the endless row of packs."""
        self._look_at(epoch)
        return self._first_pack[epoch]

    def _look_at(self, epoch: int) -> None:
        """Know where ``epoch`` begins, which takes the number of packs of all before it."""
        with self._lock:
            while len(self._first_pack) <= epoch:
                self._first_pack.append(self._first_pack[-1] + len(self.epoch_packs(len(self._first_pack) - 1)))

    def _epoch_of(self, pack: int) -> int:
        while self._first_pack[-1] <= pack:
            self._look_at(len(self._first_pack))
        return bisect_right(self._first_pack, pack) - 1


def _fill(order: Sequence[int], lengths: Sequence[int], tokens_per_pack: int) -> list[list[int]]:
    """First fit over a window: where no open pack has room, the fullest is closed and a new one opened."""
    done: list[list[int]] = []
    packs: list[list[int]] = []
    room: list[int] = []
    for number in order:
        length = lengths[number]
        place = next((index for index, free in enumerate(room) if free >= length), None)
        if place is None:
            if len(packs) == _OPEN_PACKS:
                fullest = min(range(len(room)), key=room.__getitem__)
                done.append(packs.pop(fullest))
                room.pop(fullest)
            place = len(packs)
            packs.append([])
            room.append(tokens_per_pack)
        packs[place].append(number)
        room[place] -= length
    return done + packs
