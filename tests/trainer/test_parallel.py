"""Two processes, in every mode, against one: the same losses, the same weights, states that any number of them continues.

One pair goes through all runs, since starting costs more than training. Rows of a matrix, samples of a step and answers of a
pack are all shared unevenly: 67 rows, three packs a step, and packs in which nothing counts; there the pair computes its
activations again, too, which the single process does not.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import processes
import pytest
import torch

from mtp_train.batch.plan import DataPlan
from mtp_train.cache.reader import CacheReader
from mtp_train.checkpoint import read_head_tensors
from mtp_train.trainer.data import split
from mtp_train.trainer.metrics import read_metrics
from mtp_train.trainer.optim import build_optimizer
from mtp_train.trainer.parallel import ParallelSettings, check_elementwise, check_projection
from mtp_train.trainer.settings import OptimizerSettings
from mtp_train.trainer.state import StateReader, complete_steps

pytestmark = pytest.mark.timeout(600)
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
MODES = ("ddp", "fsdp2", *(("zero1", "zero2", "zero3") if HAS_DEEPSPEED else ()))
NUM_STEPS, STOPPED_AT = 4, 3  # stopped in the measurement after step 2, so that step 3 is done
LAST = f"step-{NUM_STEPS:06d}"


class Pair(NamedTuple):
    """The recipes, and the folder in which both the pair's runs and the single process' lie, by name."""

    exact: Any
    uneven: Any
    folder: Path


@pytest.fixture(scope="module")
def pair(recipes: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = recipes.write_odd_target(folder / "target")
    texts = recipes.random_texts(num_texts=40, vocab_size=250)
    cache = recipes.write_cache(folder / "cache", target=target, texts=texts, answer_from=4, top_k=8, silent=range(0, 40, 3))
    common = {"target": target, "cache": cache, "num_steps": NUM_STEPS, "validate_every": 2, "save_every": 2, "keep_last": 9}
    uneven = recipes.Recipe(**common, packs_per_step=3, tokens_per_pack=32, log_every=1)
    # One pack each: the two gradients are added in either order to the same sum, and nothing is clipped.
    exact = recipes.Recipe(**common, packs_per_step=2, tokens_per_pack=64, log_every=1, clip_norm=None)
    muon = replace(exact, num_steps=2, rule="muon", word="eagle3")  # whose lm_head is its own
    for name, recipe in (("exact", exact), ("uneven", uneven), ("muon", muon)):
        recipe.trainer(folder / f"{name}-single").run()
    with pytest.raises(SystemExit):
        uneven.trainer(folder / "begun", on_validate=recipes.stop_after(2)).run()
    shutil.rmtree(folder / "begun" / f"step-{STOPPED_AT:06d}")  # the state after step 2 is left
    runs = [
        processes.run_of(replace(muon, parallel="fsdp2"), folder / "muon-fsdp2"),
        processes.run_of(replace(uneven, parallel="fsdp2", context=2, recompute=True), folder / "context"),
    ]
    for mode in MODES:
        shutil.copytree(folder / "begun", folder / f"taken-over-{mode}")
        runs.append(processes.run_of(replace(exact, parallel=mode), folder / f"parts-{mode}", stop_after=2))
        runs.append(processes.run_of(replace(exact, parallel=mode), folder / f"parts-{mode}"))
        runs.append(processes.run_of(replace(uneven, parallel=mode, recompute=True), folder / f"taken-over-{mode}"))
    if HAS_DEEPSPEED:
        runs.append(processes.run_of(replace(exact, parallel="zero3"), folder / "whole-zero3"))
    ranks = processes.Ranks(runs, num_ranks=2, logs=folder)
    assert ranks.wait() == [0, 0], ranks.said()[-6000:]
    return Pair(exact, uneven, folder)


def lines(out: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in read_metrics(out / "metrics.jsonl")]


def same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def assert_close_runs(one: Path, two: Path) -> None:
    """The same losses, counts and weights. Gradients are summed in another order, and Adam divides by their size: a fiftieth of
    one step of lr 1e-2."""
    for mine, theirs in zip(lines(one), lines(two), strict=True):
        assert (mine["step"], mine["split"], mine["tokens"], mine["rows"]) == (
            theirs["step"],
            theirs["split"],
            theirs["tokens"],
            theirs["rows"],
        )
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        for word in mine["losses"]:
            assert mine["losses"][word] == pytest.approx(theirs["losses"][word], rel=1e-4)
    one_weights, two_weights = read_head_tensors(one), read_head_tensors(two)
    assert one_weights.keys() == two_weights.keys()
    for name, tensor in one_weights.items():
        torch.testing.assert_close(two_weights[name], tensor, rtol=1e-4, atol=2e-4)


def optimizer_of(folder: Path) -> dict[str, torch.Tensor]:
    """All of a state's optimizer, put together from whatever shards."""
    state = StateReader(folder)
    return {
        f"{name}/{entry}": state.read(name, entry, start=0, stop=torch.Size(shape).numel())
        for name, shape in state.position.shapes.items()
        for entry in state.entries(name)
    }


def test_the_data_is_shared_unevenly_and_leaves_one_process_without_answers(pair: Pair) -> None:
    train, _ = split(CacheReader(pair.uneven.cache, verify="none"), fraction=pair.uneven.validation_fraction, seed=0)
    plan = DataPlan(lengths=train.lengths, sample_ids=train.sample_ids, seed=0, tokens_per_pack=32, packs_per_step=3)

    def counts(rank: int, step: int) -> int:
        return sum(train.num_loss_tokens[number] for pack in plan.rank_packs(step, rank=rank, world_size=2) for number in pack)

    assert [len(plan.rank_packs(0, rank=rank, world_size=2)) for rank in (0, 1)] == [2, 1]
    assert any(counts(0, step) == 0 or counts(1, step) == 0 for step in range(NUM_STEPS))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "zero3"])
def test_two_processes_interrupted_midway_give_the_bits_of_one(pair: Pair, mode: str) -> None:
    """With a pack each; so both sharing out and continuing change no bit."""
    one, two = pair.folder / "exact-single", pair.folder / f"parts-{mode}"
    assert complete_steps(two) == [2, STOPPED_AT, NUM_STEPS]
    assert same_bits(read_head_tensors(one), read_head_tensors(two))
    assert same_bits(optimizer_of(one / LAST), optimizer_of(two / LAST))
    assert_close_runs(one, two)


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs deepspeed: tools/setup.sh --engine")
def test_zero3_gives_one_process_to_rounding_and_continues_to_the_bit(pair: Pair) -> None:
    """It gathers weights at other addresses in memory, for which matrix products round differently."""
    one, whole, parts = (pair.folder / name for name in ("exact-single", "whole-zero3", "parts-zero3"))
    assert complete_steps(parts) == [2, STOPPED_AT, NUM_STEPS]
    assert same_bits(read_head_tensors(whole), read_head_tensors(parts))
    assert same_bits(optimizer_of(whole / LAST), optimizer_of(parts / LAST))
    assert lines(whole) == lines(parts)
    torch.testing.assert_close(read_head_tensors(one), read_head_tensors(whole), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_one_process_is_continued_by_two_with_uneven_shares(pair: Pair, mode: str) -> None:
    assert_close_runs(pair.folder / "uneven-single", pair.folder / f"taken-over-{mode}")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_two_processes_is_continued_by_one(pair: Pair, mode: str, tmp_path: Path) -> None:
    shutil.copytree(pair.folder / f"parts-{mode}", tmp_path / "parts")
    for name in ("head.json", "head.safetensors"):
        (tmp_path / "parts" / name).unlink()
    shutil.rmtree(tmp_path / "parts" / LAST)
    replace(pair.exact, parallel="single").trainer(tmp_path / "parts").run()
    assert_close_runs(pair.folder / "exact-single", tmp_path / "parts")
    if mode != "zero3":
        assert same_bits(read_head_tensors(pair.folder / "exact-single"), read_head_tensors(tmp_path / "parts"))


def test_two_processes_that_share_each_sample_s_tokens_give_what_one_gives(pair: Pair) -> None:
    assert_close_runs(pair.folder / "uneven-single", pair.folder / "context")


def test_muon_s_products_of_whole_matrices_are_those_of_one_process(pair: Pair) -> None:
    """On shards, to the rounding of float32, which the pair trains in."""
    one, two = (read_head_tensors(pair.folder / name) for name in ("muon-single", "muon-fsdp2"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_muon_is_refused_where_matrices_are_cut_anywhere() -> None:
    settings = OptimizerSettings(rule="muon", lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=None)
    with pytest.raises(ValueError, match=r"parallel=zero2.*found MuonAdamW; set optimizer\.rule=adamw"):
        check_elementwise(build_optimizer(torch.nn.Linear(3, 3), settings, dtype=torch.float32), "zero2")


def test_a_head_with_an_lm_head_of_its_own_is_refused_by_zero3_alone(pair: Pair) -> None:
    check_projection(pair.exact.head(), "zero3")
    head = replace(pair.exact, word="eagle3").head()
    check_projection(head, "zero2")
    with pytest.raises(ValueError, match=r"parallel=zero3.*found eagle3.*choose parallel=zero2 or fsdp2"):
        check_projection(head, "zero3")


@pytest.mark.parametrize("mode", MODES)
def test_a_state_is_sharded_as_the_mode_is(pair: Pair, mode: str) -> None:
    state = StateReader(pair.folder / f"parts-{mode}" / LAST)
    assert [shard.name for shard in state.shards] == ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]
    sizes = [(state.path / shard.name).stat().st_size for shard in state.shards]
    assert (max(sizes) < 1.3 * min(sizes)) == (mode != "ddp"), sizes
    assert all(state.own(rank).keys() == {"random/cpu", "sums"} for rank in (0, 1))


@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_each_mode_is_a_word_of_conf(mode: str) -> None:
    from mtp_train.stage import build, load_word

    settings = build(load_word("parallel", mode))
    assert isinstance(settings, ParallelSettings) and (settings.mode, settings.context) == (mode, 1)


@pytest.mark.parametrize("change", [{"mode": "zero4"}, {"context": 0}])
def test_impossible_modes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="parallel"):
        ParallelSettings(**{"mode": "ddp", "context": 1, **change})


def test_one_process_shares_with_nobody(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a divisor of the 1 processes"):
        replace(pair.exact, context=2).trainer(tmp_path)
    replace(pair.exact, parallel="fsdp2").trainer(tmp_path / "alone").run()
    assert same_bits(read_head_tensors(pair.folder / "exact-single"), read_head_tensors(tmp_path / "alone"))
