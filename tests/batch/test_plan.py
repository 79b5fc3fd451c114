"""The order of the data depends on the seed and the lengths, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from mtp_train.batch.plan import DataPlan

LENGTHS = [int(n) for n in torch.randint(20, 900, (97,), generator=torch.Generator().manual_seed(0))]


def _plan(*, seed: int = 3, packs_per_step: int = 4, tokens_per_pack: int = 1000, lengths: list[int] = LENGTHS) -> DataPlan:
    return DataPlan(
        lengths=lengths,
        sample_ids=[f"s{number}" for number in range(len(lengths))],
        seed=seed,
        tokens_per_pack=tokens_per_pack,
        packs_per_step=packs_per_step,
    )


def _steps(plan: DataPlan, count: int) -> list[list[list[int]]]:
    return [plan.packs(step) for step in range(count)]


def test_every_epoch_holds_each_sample_once_and_no_pack_is_too_long():
    plan = _plan()
    for epoch in range(4):
        packs = plan.epoch_packs(epoch)
        assert sorted(number for pack in packs for number in pack) == list(range(len(LENGTHS)))
        assert all(0 < sum(LENGTHS[number] for number in pack) <= 1000 for pack in packs)


def test_packs_are_filled_better_than_by_cutting_the_order():
    plan = _plan()
    packs, held = 1, 0
    for number in plan.order(0):  # next fit: a pack is closed by the first sample without room
        if held + LENGTHS[number] > 1000:
            packs, held = packs + 1, 0
        held += LENGTHS[number]
    cut = sum(LENGTHS) / (packs * 1000)
    assert plan.fill() > cut + 0.08
    assert plan.fill() == pytest.approx(sum(LENGTHS) / (len(plan.epoch_packs(0)) * 1000))
    assert _plan(tokens_per_pack=8000, lengths=LENGTHS * 20).fill() > 0.97


def test_steps_are_the_epochs_one_behind_the_other():
    plan = _plan()
    stream = [pack for epoch in range(6) for pack in plan.epoch_packs(epoch)]
    count = len(stream) // 4
    assert [pack for step in _steps(_plan(), count) for pack in step] == stream[: 4 * count]
    assert len(plan.epoch_packs(0)) % 4  # so that steps do straddle epochs here


def test_random_access_equals_sequential():
    sequential = _steps(_plan(), 60)
    for step in (59, 0, 31, 13, 12, 58):
        assert _plan().packs(step) == sequential[step]
    jumping = _plan()
    assert [jumping.packs(step) for step in (50, 2, 31, 2)] == [sequential[step] for step in (50, 2, 31, 2)]


def test_seed_and_epoch_change_the_order():
    assert _steps(_plan(), 5) == _steps(_plan(), 5)
    assert _steps(_plan(), 5) != _steps(_plan(seed=4), 5)
    orders = [tuple(_plan().order(epoch)) for epoch in range(5)]
    assert len(set(orders)) == 5
    assert _plan(seed=0).order(1) != _plan(seed=1).order(0)


def test_the_permutation_is_pinned():
    """A resume with another numpy must see the same order."""
    assert _plan(lengths=[1] * 8, seed=0).order(0) == [3, 2, 1, 6, 0, 7, 4, 5]


def test_world_sizes_share_one_order():
    alone = _steps(_plan(), 20)
    for world_size in (1, 2, 4):
        for step in range(20):
            shares = [_plan_shared.rank_packs(step, rank=rank, world_size=world_size) for rank in range(world_size)]
            assert {len(share) for share in shares} == {4 // world_size}
            together = [shares[index % world_size][index // world_size] for index in range(4)]
            assert together == alone[step]


_plan_shared = _plan()


def test_where_packs_do_not_come_out_even_the_last_ranks_have_one_less():
    for step in range(20):
        shares = [_plan().rank_packs(step, rank=rank, world_size=3) for rank in range(3)]
        assert [len(share) for share in shares] == [2, 1, 1] and _plan().packs_per_process(3) == 2
        assert [shares[index % 3][index // 3] for index in range(4)] == _plan().packs(step)


def test_more_processes_than_packs_are_refused():
    with pytest.raises(ValueError, match="at least 5, one for each of as many processes, found 4"):
        _plan().rank_packs(0, rank=0, world_size=5)


def test_epochs_and_steps():
    plan = _plan()
    for epochs in (1, 2, 3):
        steps = plan.steps_of(epochs)
        seen = [number for step in _steps(plan, steps) for pack in step for number in pack]
        assert min(seen.count(number) for number in range(len(LENGTHS))) == epochs
        before = [number for step in _steps(plan, steps - 1) for pack in step for number in pack]
        assert min(before.count(number) for number in range(len(LENGTHS))) < epochs
        assert plan.epoch(steps) == epochs
    assert plan.epoch(0) == 0


def test_less_data_than_one_step():
    plan = _plan(lengths=[10, 20], packs_per_step=8, tokens_per_pack=30)
    assert plan.steps_of(1) == 1
    packs = plan.packs(0)
    assert len(packs) == 8 and all(sorted(pack) == [0, 1] for pack in packs)
    assert plan.epoch(1) == 8


def test_a_sample_longer_than_a_pack_is_named():
    with pytest.raises(ValueError, match=r"at least 1200 \(the tokens of sample 's1', the longest of 2 that do not fit\), found 1000"):
        _plan(lengths=[10, 1200, 1100])
    _plan(lengths=[10, 1000])


def test_no_data_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        _plan(lengths=[])
