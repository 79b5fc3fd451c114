"""Every order is decided by the seed and by what is known before the hidden states are."""

from __future__ import annotations

import pytest

from mtp_train.batch.order import Mixture, Shuffle
from mtp_train.batch.plan import DataPlan
from mtp_train.batch.upcoming import ShardUse

# 60 shards of 7 samples of 1 to 40 tokens.
SHARDS = [number // 7 for number in range(420)]
LENGTHS = [1 + (11 * number) % 40 for number in range(420)]


def plan(*, window: int | None, packs_per_step: int = 3, tokens_per_pack: int = 100) -> DataPlan:
    return DataPlan(
        lengths=LENGTHS,
        sample_ids=[str(number) for number in range(420)],
        seed=0,
        tokens_per_pack=tokens_per_pack,
        packs_per_step=packs_per_step,
        order=Shuffle(shards=SHARDS, window=window, seed=0),
    )


@pytest.mark.parametrize("window", [1, 2, 8, 1000, None])
def test_every_sample_once_and_another_order_each_epoch(window: int | None) -> None:
    order = Shuffle(shards=SHARDS, window=window, seed=3)
    epochs = [order.epoch(number) for number in range(3)]
    assert all(sorted(epoch) == list(range(420)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert Shuffle(shards=SHARDS, window=window, seed=3).epoch(1) == epochs[1]
    assert Shuffle(shards=SHARDS, window=window, seed=4).epoch(1) != epochs[1]
    assert Shuffle(shards=SHARDS, window=window, seed=3, stream=0).epoch(1) != epochs[1]


@pytest.mark.parametrize("window", [1, 4, 16])
def test_a_shard_is_read_within_its_window(window: int) -> None:
    order = Shuffle(shards=SHARDS, window=window, seed=0).epoch(0)
    visited = [SHARDS[number] for number in order]
    assert len(set(visited[:80])) <= window + 80 / 7 + 8
    open_at_once = [len(set(visited[: i + 1]) & set(visited[i:])) for i in range(len(visited))]
    assert max(open_at_once) <= window + 1
    if window > 1:
        assert max(open_at_once) >= window - 1
        assert visited != sorted(visited, key=visited.index)  # shards are mixed, not read one behind the other
    else:
        assert visited == sorted(visited, key=visited.index)


def test_the_windowed_permutation_is_pinned() -> None:
    """A resume with another numpy must see the same order."""
    assert Shuffle(shards=[0, 0, 1, 1, 2, 2], window=2, seed=0).epoch(0) == [1, 4, 5, 3, 2, 0]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="shuffle_shards: expected at least 1"):
        Shuffle(shards=SHARDS, window=0, seed=0)
    with pytest.raises(ValueError, match="seed: expected at least 0"):
        Shuffle(shards=SHARDS, window=None, seed=-1)
    with pytest.raises(ValueError, match="expected shares above 0"):
        Mixture(parts=[Shuffle(shards=[0], window=None, seed=0)], lengths=[1], shares=[0.0])


SIZES = (300, 40, 80)
PART_OF = [part for part, size in enumerate(SIZES) for _ in range(size)]


def mixture(shares: tuple[float, ...] = (0.5, 0.3, 0.2), seed: int = 0) -> tuple[Mixture, list[int]]:
    lengths = [10 + (13 * number) % 50 for number in range(sum(SIZES))]
    parts = [Shuffle(shards=[0] * size, window=None, seed=seed, stream=index) for index, size in enumerate(SIZES)]
    return Mixture(parts=parts, lengths=lengths, shares=shares), lengths


def test_a_mixture_keeps_its_shares_to_within_a_sample_at_every_moment() -> None:
    order, lengths = mixture()
    tokens = [0, 0, 0]
    for number in [number for epoch in range(3) for number in order.epoch(epoch)]:
        tokens[PART_OF[number]] += lengths[number]
        total = sum(tokens)
        assert all(abs(held - share * total) <= max(lengths) for held, share in zip(tokens, (0.5, 0.3, 0.2), strict=True))
    assert 3 * sum(lengths) <= total < 3 * sum(lengths) + max(lengths)


def test_no_sample_of_a_part_comes_again_before_all_others_of_it() -> None:
    order, _ = mixture()
    stream = [number for epoch in range(4) for number in order.epoch(epoch)]
    for part, size in enumerate(SIZES):
        own = [number for number in stream if PART_OF[number] == part]
        for start in range(0, len(own) - size, size):
            assert len(set(own[start : start + size])) == size
        assert own[:size] != own[size : 2 * size] or len(own) < 2 * size


def test_a_mixture_is_at_random_access_and_shares_are_relative() -> None:
    order, _ = mixture()
    epochs = [order.epoch(number) for number in range(4)]
    assert [mixture()[0].epoch(number) for number in (3, 1)] == [epochs[3], epochs[1]]
    assert mixture((5.0, 3.0, 2.0))[0].epoch(2) == epochs[2]
    assert mixture(seed=1)[0].epoch(2) != epochs[2]
    assert mixture((1.0, 1.0, 1.0))[0].epoch(2) != epochs[2]


@pytest.mark.parametrize("window", [2, 8, None])
def test_wanted_is_all_that_is_read_and_in_the_order_of_its_first_use(window: int | None) -> None:
    data = plan(window=window)
    num_steps = data.steps_of(3)
    use = ShardUse(data, shards=SHARDS)
    for step in (0, 1, 17, data.steps_of(1) - 1, data.steps_of(1), num_steps - 1, num_steps):
        wanted = use.wanted(step, stop_step=num_steps)
        assert len(wanted) == len(set(wanted))
        horizon = min(num_steps, data.steps_of(data.epoch(step) + 2))
        read = {SHARDS[number] for s in range(step, horizon) for numbers in data.packs(s) for number in numbers}
        assert read <= set(wanted)
        epoch = data.epoch(step)
        visited = [SHARDS[number] for numbers in data.epoch_packs(epoch) for number in numbers]
        left = data.epoch_packs(epoch)[step * 3 - data.first_pack(epoch) :]
        still = {SHARDS[number] for numbers in left for number in numbers} if step < num_steps - 1 else set()
        if step < data.steps_of(2):
            assert wanted[: len(still)] == sorted(still, key=visited.index)  # those begun first, in this epoch, come first
    assert use.wanted(num_steps, stop_step=num_steps) == []


@pytest.mark.parametrize(("window", "num_steps"), [(2, 1), (8, 1), (8, 5)])
def test_so_much_room_is_enough_at_every_step(window: int, num_steps: int) -> None:
    """The first of the wanted shards that fit into ``most_bytes`` always hold those of the steps at hand."""
    data = plan(window=window)
    use, sizes = ShardUse(data, shards=SHARDS), {shard: 100 + 17 * (shard % 5) for shard in range(60)}
    last = data.steps_of(4)
    most = use.most_bytes(sizes, num_steps=num_steps, stop_step=last)
    assert most < sum(sizes.values())
    for step in range(last):
        room, held = most, set()
        for shard in use.wanted(step, stop_step=last):
            room -= sizes[shard]
            if room < 0:
                break
            held.add(shard)
        needed = {SHARDS[n] for s in range(step, min(last, step + num_steps)) for numbers in data.packs(s) for n in numbers}
        assert needed <= held, step
    assert sum(sizes[shard] for shard in use.leading(sizes, room_bytes=most)) <= most
    assert use.leading(sizes, room_bytes=most) == use.wanted(0, stop_step=last)[: len(use.leading(sizes, room_bytes=most))]


@pytest.mark.parametrize("tokens_per_pack", [100, 10_000])
def test_where_an_epoch_is_shorter_than_the_steps_at_hand_no_more_than_all_shards_are_needed(tokens_per_pack: int) -> None:
    data = plan(window=None, packs_per_step=1, tokens_per_pack=tokens_per_pack)
    use, sizes = ShardUse(data, shards=SHARDS), {shard: 100 + 17 * (shard % 5) for shard in range(60)}
    assert use.most_bytes(sizes, num_steps=2 * data.steps_of(1), stop_step=data.steps_of(5)) == sum(sizes.values())
