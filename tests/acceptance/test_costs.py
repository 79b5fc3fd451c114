"""A table of costs interpolates and never guesses beyond its cells; it survives its file and tells a damaged one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_train.acceptance.costs import CostTable, Shape, Timing, chain_shape, read_costs, write_costs
from mtp_train.acceptance.speedup import Costs


def test_between_cells_is_a_straight_line(cost_table: CostTable) -> None:
    """The fixture's cells are b (2 + n) for verifying and b (1 + 0.5 K) / 10 for drafting, so that lines are exact in each."""
    assert cost_table.batch_sizes == [1, 2, 4, 8] and cost_table.verified_tokens == [1, 2, 4, 6] and cost_table.longest == 5
    assert cost_table.verify_s(4, 6) == 32
    assert cost_table.verify_s(3, 5) == pytest.approx(3 * 7)
    assert cost_table.draft_step_s(6) == pytest.approx(0.3)
    assert cost_table.costs(2, chain_shape(3)) == pytest.approx(Costs(plain=6, draft_step=0.1, verify=12, overhead=0.2))
    assert cost_table.costs(2, Shape(0, 0, 4)) == Costs(plain=6, draft_step=0.0, verify=12, overhead=0.0), "no head"
    assert cost_table.costs(2, Shape(3, 4, 6)).draft_step == pytest.approx(0.4), "four rows of two sequences as one of eight"


@pytest.mark.parametrize(
    ("batch_size", "shape", "said"),
    [
        (9, chain_shape(1), "batch sizes from 1 to 8, which were timed, found 9"),
        (1, chain_shape(6), "tokens per sequence from 1 to 6, which were timed, found 7"),
        (4, Shape(2, 4, 3), "batch sizes from 1 to 8, which were timed, found 16"),
    ],
)
def test_beyond_the_cells_nothing_is_said(cost_table: CostTable, batch_size: int, shape: Shape, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cost_table.costs(batch_size, shape)


def test_a_head_that_was_not_timed_is_asked_for_in_vain(cost_table: CostTable) -> None:
    with pytest.raises(ValueError, match="expected the times of a head"):
        dataclasses.replace(cost_table, drafting=()).costs(1, chain_shape(1))


def cell(batch_size: int, num_tokens: int, seconds: float = 1.0) -> Timing:
    return Timing(batch_size=batch_size, num_tokens=num_tokens, seconds=seconds, low_s=seconds, high_s=seconds, num_repeats=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verify": (cell(1, 1), cell(1, 2), cell(2, 1))}, "each batch size with each number of tokens once"),
        ({"verify": (cell(1, 1), cell(1, 1))}, "each batch size with each number of tokens once"),
        ({"verify": (cell(1, 2),)}, "expected plain decoding"),
        ({"verify": (cell(1, 1, 0.0),)}, "times above 0"),
        ({"drafting": (cell(1, 3),)}, "two draft lengths"),
    ],
)
def test_tables_that_do_not_say_enough_are_refused(cost_table: CostTable, change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(cost_table, **change)


def test_noise_makes_no_cost_negative(cost_table: CostTable) -> None:
    noisy = dataclasses.replace(cost_table, drafting=(cell(1, 1, 2.0), cell(1, 5, 1.0)))
    found = noisy.costs(1, chain_shape(2))
    assert found.draft_step == 0 and found.overhead == 2.0


def test_a_table_survives_its_file(cost_table: CostTable, make_cost_table: Callable[..., CostTable], tmp_path: Path) -> None:
    assert read_costs(tmp_path) == ()
    other = make_cost_table(head=None, engine="vllm", drafting=())
    path = write_costs(cost_table, tmp_path)
    write_costs(other, tmp_path)
    assert read_costs(tmp_path) == (cost_table, other)
    write_costs(dataclasses.replace(cost_table, device="another"), tmp_path)
    assert [table.device for table in read_costs(tmp_path)] == ["another", "cpu"], "the same engine and head: replaced"
    whole = path.read_text(encoding="utf-8")
    for damaged in (whole.replace('"seconds": 3', '"seconds": 4'), whole[:-20], "[]", '{"costs": 3}'):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(ValueError, match=r"hf\.mtp\.json: .*measure_costs\.py again"):
            read_costs(tmp_path)
