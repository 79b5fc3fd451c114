"""What is timed is what speculation runs: under a clock that counts rows, every cell is the number of rows it should run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mtp_train.acceptance.costs import chain_shape, read_costs, write_costs
from mtp_train.engine import costs, hf_costs
from mtp_train.engine.base import CostsAsked
from mtp_train.engine.costs import measure_costs
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.hf_model import TargetModel
from mtp_train.head.medusa import Medusa
from mtp_train.target.spec import read_spec

ASKED = CostsAsked(batch_sizes=(1, 2, 5), num_tokens=(1, 2, 4), draft_lengths=(1, 3), context_tokens=70, num_repeats=3, seed=0)


class RowClock:
    """A clock that moves by 1 for each row of the target, by 0.25 for each row of the head, and by nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, easy_target: Path, make_engine: Any, leaning_head: Any) -> HfEngine:
    clock = RowClock()
    forward = TargetModel.forward

    def slow_forward(self: TargetModel, token_ids_T: Any, *words: Any) -> Any:
        clock.now += len(token_ids_T)
        return forward(self, token_ids_T, *words)

    load = leaning_head(easy_target, "mtp")

    def slow_head(path: Path, shared: Any) -> Any:
        head = load(path, shared)
        draft = head.draft

        def slow_draft(**words: Any) -> Any:
            clock.now += 0.25 * len(words["token_ids_T"])
            return draft(**words)

        head.draft = slow_draft
        return head

    monkeypatch.setattr(TargetModel, "forward", slow_forward)
    monkeypatch.setattr(hf_costs, "time", clock)
    made = make_engine(easy_target, load_head=slow_head)
    assert isinstance(made, HfEngine)
    return made


def test_every_cell_runs_the_rows_that_it_names(counted: HfEngine) -> None:
    found = counted.time_steps(Path("unused"), ASKED)
    assert {(cell.batch_size, cell.num_tokens): cell.seconds for cell in found.verify} == {
        (b, n): b * n for b in (1, 2, 5) for n in (1, 2, 4)
    }
    # Two bases are read, and then the head's own drafts but the last one.
    expected = {(b, k): 0.25 * b * (2 + k - 1) for b in (1, 2, 5) for k in (1, 3)}
    assert {(cell.batch_size, cell.num_tokens): cell.seconds for cell in found.drafting} == expected
    assert all(cell.low_s == cell.seconds == cell.high_s and cell.num_repeats == 3 for cell in (*found.verify, *found.drafting))
    assert found.device.startswith("cpu, 1 thread") and found.notes["threads"] == 1


def test_a_table_is_kept_with_what_it_depends_on(counted: HfEngine, easy_target: Path, tmp_path: Path) -> None:
    target = read_spec(easy_target, name="easy")
    alone = dataclasses.replace(ASKED, draft_lengths=())
    table = measure_costs(counted, target=target, checkpoint=None, draft=None, asked=alone)
    assert (table.source, table.engine, table.dtype, table.head, table.drafting) == ("measured", "hf", "float32", None, ())
    assert table.target_fingerprint == target.fingerprint and table.notes["head_sha256"] is None
    write_costs(table, tmp_path)
    assert read_costs(tmp_path) == (table,)
    assert table.verify_s(3, 3) == 9
    with pytest.raises(ValueError, match="expected the times of a head"):
        table.costs(1, chain_shape(2))


def test_times_of_weights_that_were_changed_meanwhile_are_nobody_s(
    counted: HfEngine, easy_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = iter(["a" * 64, "a" * 64, "a" * 64, "b" * 64])
    monkeypatch.setattr(costs, "read_head_config", lambda folder: {"weights_sha256": next(stated)})
    given: dict[str, Any] = {"target": read_spec(easy_target, name="easy"), "checkpoint": Path("mtp"), "draft": Path("mtp"), "asked": ASKED}
    assert measure_costs(counted, **given).notes["head_sha256"] == "a" * 64
    with pytest.raises(ValueError, match=r"expected the weights that were timed .*trained meanwhile; call again"):
        measure_costs(counted, **given)


def test_context_longer_than_a_forward(counted: HfEngine) -> None:
    """The engine reads 64 tokens at once; the context of 70 comes in two pieces."""
    assert counted.max_prefill_tokens < ASKED.context_tokens
    head = counted._head(Path("unused"))
    bench = hf_costs._Bench(counted.target, head, ASKED, max_prefill_tokens=64)
    assert bench.cache.lengths == [70] * 5
    assert all(drafter.cache.lengths == [70] * 5 for drafter in bench.drafters.values())  # type: ignore[attr-defined]
    bench.prepare(hf_costs._Cell("verify", 2, 4))()
    assert bench.cache.lengths == [70] * 5, "what was timed is not counted in"


def test_parallel_heads_are_timed_too(easy_target: Path, make_engine: Any) -> None:
    """Chains and trees of theirs run the heads once, however many tokens are taken of them."""
    engine: HfEngine = make_engine(
        easy_target,
        load_head=lambda _, shared: Medusa(
            target_path=easy_target, shared=shared, num_heads=3, num_layers=1, own_lm_heads=False, init="zeros", trust_remote_code=False
        ),
    )
    found = engine.time_steps(Path("unused"), ASKED)
    assert {(cell.batch_size, cell.num_tokens) for cell in found.drafting} == {(b, k) for b in (1, 2, 5) for k in (1, 3)}
    assert all(cell.seconds > 0 for cell in found.drafting)
    with pytest.raises(ValueError, match="expected at most 3, which this head speaks about at once, found 5"):
        engine.time_steps(Path("unused"), dataclasses.replace(ASKED, num_tokens=(1, 2, 6), draft_lengths=(1, 5)))


def test_more_context_than_the_target_has_positions_for_is_refused(counted: HfEngine, easy_target: Path) -> None:
    target = dataclasses.replace(read_spec(easy_target, name="easy"), max_positions=72)
    with pytest.raises(ValueError, match=r"context_tokens: expected at most 68 before 4 .*easy has 72 positions\), found 70, 74 in all"):
        measure_costs(counted, target=target, checkpoint=None, draft=None, asked=ASKED)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_sizes": (2, 1)}, "batch_sizes: expected different whole numbers of at least 1, ascending"),
        ({"batch_sizes": ()}, "batch_sizes: expected"),
        ({"num_tokens": (2, 4)}, "expected 1, plain decoding"),
        ({"draft_lengths": (1,)}, "draft_lengths: expected two or more"),
        ({"draft_lengths": (1, 2)}, "each less by one than one of num_tokens"),
        ({"num_repeats": 2}, "num_repeats: expected at least 3"),
    ],
)
def test_cells_that_cannot_be_timed_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(ASKED, **change)
