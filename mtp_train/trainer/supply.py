"""Has the shards at hand that training is about to read, where they are fetched from afar or made by a precompute beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtp_train.batch.order import Mixture, Order, Shuffle
from mtp_train.batch.plan import DataPlan
from mtp_train.batch.upcoming import ShardUse
from mtp_train.quantity import show_bytes
from mtp_train.runtime import log
from mtp_train.trainer.data import Subset
from mtp_train.trainer.mixture import MixedCache
from mtp_train.trainer.state import complete_steps


def make_order(train: Subset, *, window: int | None, shares: Sequence[float] | None, seed: int) -> Order:
    """The order of the samples to train on. ``shares``: of each part of a ``MixedCache``, None for any other."""
    if shares is None:
        return Shuffle(shards=train.shards, window=window, seed=seed)
    assert isinstance(train.cache, MixedCache)
    own: list[list[int]] = [[] for _ in shares]
    for shard, number in zip(train.shards, train.numbers, strict=True):
        own[train.cache.parts[number]].append(shard)
    if empty := [index for index, shards in enumerate(own) if not shards]:
        raise ValueError(f"mixture.{train.cache.names[empty[0]]}: expected samples to train on, found none; leave it out")
    orders = [
        Shuffle(shards=[shard - min(shards) for shard in shards], window=window, seed=seed, stream=index)
        for index, shards in enumerate(own)
    ]
    return Mixture(parts=orders, lengths=train.lengths, shares=shares)


class Supply:
    """Tells a cache what training reads from step to step; see ``Cache``.

    ``before_read`` is called as a step is about to be read, up to ``max_prefetch`` steps before it is trained on, so that all
    steps but the last ``max_prefetch`` + 1 have been trained on by every process. ``first_step``: where the training begins, or goes
    on.
    """

    def __init__(self, *, train: Subset, plan: DataPlan, first_step: int, num_steps: int, max_prefetch: int) -> None:
        self._cache, self._use = train.cache, ShardUse(plan, shards=train.shards)
        self._first_step, self._num_steps, self._behind = first_step, num_steps, max_prefetch + 1
        sizes = dict(enumerate(train.cache.shard_bytes()))
        steps_at_once = self._behind + max_prefetch + 1
        self.most_bytes = max(
            self._use.most_bytes(sizes, num_steps=steps_at_once, stop_step=num_steps),
            sum(sizes[shard] for shard in leading_shards(train, plan, num_steps=num_steps)),
        )
        train.cache.prepare(self.most_bytes)
        self.before_read(first_step)

    def before_read(self, step: int) -> None:
        self._cache.expect(self._use.wanted(max(self._first_step, step - self._behind), stop_step=self._num_steps))


def leading_shards(train: Subset, plan: DataPlan, *, num_steps: int) -> list[int]:
    """The first shards that are trained on, as many as training ever has in use at once, in tokens: known before there are any,
    and the same whether they lie on the disk, are fetched or still made."""
    use = ShardUse(plan, shards=train.shards)
    tokens: dict[int, int] = {}
    for shard, length in zip(train.shards, train.lengths, strict=True):
        tokens[shard] = tokens.get(shard, 0) + length
    return use.leading(tokens, room_bytes=use.most_bytes(tokens, num_steps=1, stop_step=num_steps))


def at_hand(train: Subset, plan: DataPlan, *, window: int | None, num_steps: int) -> Sequence[int]:
    """The samples that a head may be started from: all, or those that are trained on first, where the others may not be there yet."""
    if window is None:
        return range(len(train))
    leading = set(leading_shards(train, plan, num_steps=num_steps))
    return [number for number, shard in enumerate(train.shards) if shard in leading]


def make_supply(train: Subset, plan: DataPlan, *, out: Path, num_steps: int, max_prefetch: int) -> Supply | None:
    """What tells a cache that is not local what a training in ``out`` reads next; None where nobody need know."""
    if train.cache.is_local:
        return None
    first_step = min(num_steps, max(complete_steps(out), default=0))
    supply = Supply(train=train, plan=plan, first_step=first_step, num_steps=num_steps, max_prefetch=max_prefetch)
    log(f"shards of up to {show_bytes(supply.most_bytes)} are in use at once, of {show_bytes(sum(train.cache.shard_bytes()))} in all")
    return supply
