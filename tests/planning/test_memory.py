"""Memory by source: counted on tensors without memory, spread over processes as hand arithmetic has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.planning.live import COPIES, LiveBytes
from mtp_train.planning.memory import MODES, process_memory
from mtp_train.planning.step import ACTIVATIONS, BACKWARD, CHUNK, StepMemory, StepShape, measure_step
from mtp_train.trainer.objective import Objective, Term

PROCESSES = 8
OBJECTIVE = Objective(terms={"topk_kl": Term(0.1, TopkKl()), "hidden_l1": Term(1.0, HiddenL1())}, draft_steps=1, decay=1.0, chunk_rows=512)


def shape_of(target: Any, *, num_tokens: int = 4096, answer_share: float = 0.5, recompute: bool = False, context: int = 1) -> StepShape:
    return StepShape(
        num_tokens=num_tokens,
        answer_share=answer_share,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        tied=target.tied,
        top_k=64,
        precision="bf16",
        noise=True,
        recompute=recompute,
        context=context,
        device="gpu",
    )


@pytest.fixture(scope="module")
def steps(planned: Callable[..., Any]) -> dict[str, StepMemory]:
    """One step of the two heads of real size."""
    words = ("llama3_70b", "deepseek_v2_lite")
    return {word: measure_step(planned(word).make_head, OBJECTIVE, shape_of(planned(word).target)) for word in words}


def test_storages_count_from_their_first_tensor_to_their_last() -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    live = LiveBytes(phase="one", parameters=[weight], others=[])
    with live:
        first = torch.zeros(1000)
        view = first[:10]  # no new storage
        del first
        assert live.now == 4000
        live.phase = "two"
        copy = weight.to(torch.bfloat16)
        out = copy @ copy
        del view
        assert live.now == 2 * 2 * 256 * 256
        del copy, out
        assert live.now == 0
    size, alive = live.peaks["two"]
    assert size == 4000 + 2 * 2 * 256 * 256
    assert sorted(alive.values()) == sorted([("one", 4000), (COPIES, 2 * 256 * 256), ("two", 2 * 256 * 256)])


@pytest.mark.parametrize("word", ["llama3_70b", "deepseek_v2_lite"])
def test_what_belongs_to_the_weights_by_hand(planned: Callable[..., Any], steps: dict[str, StepMemory], word: str) -> None:
    """Float32 weights 4 bytes, gradients 4, AdamW's two moments 8, whole or divided by eight."""
    head, step = planned(word).head, replace(steps[word], start=0)
    p = head.weights.total
    assert step.parameters == 4 * p
    expected = {  # weights, optimizer
        "single": (4 * p, 8 * p),
        "ddp": (4 * p, 8 * p),
        "zero1": (4 * p + 4 * p / 8, 8 * p / 8),
        "zero2": (4 * p + 4 * p / 8, 8 * p / 8),
        "fsdp2": (4 * p / 8, 8 * p / 8),
        "zero3": (2 * 4 * p / 8, 8 * p / 8),
    }
    assert expected.keys() == MODES.keys()
    for mode, (weights, optimizer) in expected.items():
        found = process_memory(step, head, mode=mode, rule="adamw", num_processes=PROCESSES, packs_per_process=1)
        assert found.sources["weights"] == pytest.approx(weights, abs=8)
        assert found.sources["optimizer"] == pytest.approx(optimizer, abs=100)  # and a count of steps for each parameter
        assert found.total == sum(found.sources.values())
        assert found.sources.get("gathered weights", 0) == (4 * p if mode in ("fsdp2", "zero3") else 0)
    target = planned(word).target
    assert found.sources["embedding, lm_head"] == 2 * (2 * target.vocab_size * target.hidden_size + target.hidden_size)


def test_with_several_packs_gradients_are_there_from_the_start(planned: Callable[..., Any], steps: dict[str, StepMemory]) -> None:
    head, step = planned("llama3_70b").head, steps["llama3_70b"]
    one, four = (process_memory(step, head, mode="single", rule="adamw", num_processes=1, packs_per_process=packs) for packs in (1, 4))
    assert four.sources["gradients"] == 4 * head.weights.total
    assert 0 < four.total - one.total <= 4 * head.weights.total


def test_muon_keeps_one_moment_of_the_matrices_and_multiplies_them(planned: Callable[..., Any], steps: dict[str, StepMemory]) -> None:
    """Newton-Schulz (Jordan et al. 2024): five times X X', its square, and a product with X, of each matrix's shorter side."""
    for word, matrices in (
        ("llama3_70b", [(8192, 16384), *[(8192, 8192)] * 2, *[(1024, 8192)] * 2, *[(8192, 28672)] * 3]),
        (
            "deepseek_v2_lite",
            [(2048, 4096), (2048, 3072), (576, 2048), (512, 4096), (2048, 2048), (64, 2048), *[(2048, 2816)] * 3],
        ),
    ):
        weights, found = planned(word).head.weights, steps[word].optimizers
        assert sum(short * long for short, long in matrices) == weights.num_matrix
        rest = weights.num_expert + weights.num_other
        scalars = 4 * sum(1 for _ in range(200))  # AdamW's step counters, one number per parameter
        assert 8 * weights.total <= found["adamw"].state <= 8 * weights.total + scalars and found["adamw"].flops == 0
        assert 4 * weights.num_matrix + 8 * rest <= found["muon"].state <= 4 * weights.num_matrix + 8 * rest + scalars
        flops = sum(5 * (4 * short**2 * long + 2 * short**3) for short, long in matrices)
        assert found["muon"].flops == pytest.approx(flops)
        assert found["muon"].working > found["adamw"].working


def test_the_start_from_data_is_a_moment_of_its_own(planned: Callable[..., Any], steps: dict[str, StepMemory]) -> None:
    head, step = planned("llama3_70b").head, steps["llama3_70b"]
    assert step.start == 8 * 16384 * (3 * 16384 + 8192)  # float64: X'X three times, X'Y
    tight = process_memory(step, head, mode="zero2", rule="adamw", num_processes=PROCESSES, packs_per_process=1)
    assert tight.moment == "start from data" and tight.sources["weights"] == 4 * head.weights.total


def test_autocasts_copies_are_the_matrices_in_bf16(planned: Callable[..., Any], steps: dict[str, StepMemory]) -> None:
    for word, step in steps.items():
        weights = planned(word).head.weights
        assert step.moments[CHUNK][COPIES] == pytest.approx(2 * (weights.num_matrix + weights.num_expert), rel=0.01)


def test_nothing_grows_with_tokens_times_vocabulary(planned: Callable[..., Any], steps: dict[str, StepMemory]) -> None:
    word = "llama3_70b"
    one = steps[word]
    four = measure_step(planned(word).make_head, OBJECTIVE, shape_of(planned(word).target, num_tokens=4 * 4096))
    assert four.moments[CHUNK][ACTIVATIONS] == pytest.approx(4 * one.moments[CHUNK][ACTIVATIONS], rel=0.01)
    assert four.moments[BACKWARD][BACKWARD] == pytest.approx(4 * one.moments[BACKWARD][BACKWARD], rel=0.3)
    # What a chunk takes is its own, but for the gradient to the hidden states, which is T x D.
    grown = four.moments[CHUNK][CHUNK] - one.moments[CHUNK][CHUNK]
    assert grown <= 4 * 3 * 4096 * 8192 * 2
    assert one.moments[CHUNK][CHUNK] >= 8 * 512 * 128256


def test_long_packs_are_computed_again_or_by_several(planned: Callable[..., Any]) -> None:
    found = planned("llama3_8b")
    cases = ((False, 1), (True, 1), (False, 4))
    shapes = (shape_of(found.target, num_tokens=32768, answer_share=1.0, recompute=again, context=n) for again, n in cases)
    plain, again, shared = (measure_step(found.make_head, OBJECTIVE, shape).moments[CHUNK][ACTIVATIONS] for shape in shapes)
    assert again < 0.55 * plain
    # A quarter of the rows, and keys and values of all, which are an eighth of the hidden size each, repeated for the queries' heads.
    assert 0.25 * plain < shared < 0.25 * plain + 4 * 2 * 32768 * 4096


def test_an_exact_teacher_holds_a_second_projection(planned: Callable[..., Any]) -> None:
    from mtp_train.loss.forward_kl import ForwardKl

    found = planned("llama3_1b")
    exact = replace(OBJECTIVE, terms={"forward_kl": Term(1.0, ForwardKl())})
    plain, second = (
        measure_step(found.make_head, objective, shape_of(found.target)).moments[CHUNK][CHUNK] for objective in (OBJECTIVE, exact)
    )
    assert second > plain + 2 * 512 * found.target.vocab_size


@pytest.mark.parametrize(("word", "depths", "start"), [("medusa", 5, 8 * 2048 * (3 * 2048 + 5 * 2048)), ("draft_model", 1, 0)])
def test_parallel_heads_and_draft_models_are_run_as_any_other(planned: Callable[..., Any], word: str, depths: int, start: int) -> None:
    """Medusa's start fits all heads in one system."""
    from mtp_train.loss.forward_kl import ForwardKl

    found = planned("llama3_1b", word)
    objective = replace(OBJECTIVE, terms={"forward_kl": Term(1.0, ForwardKl())}, draft_steps=depths)
    step = measure_step(found.make_head, objective, shape_of(found.target, num_tokens=1024))
    assert step.parameters == 4 * found.head.weights.total and step.start == start
    assert step.moments[CHUNK][COPIES] == pytest.approx(2 * found.head.weights.num_matrix, rel=0.01)
    assert step.optimizers["muon"].state < step.optimizers["adamw"].state


def test_an_lm_head_of_its_own_has_one_gradient_however_many_rows_a_chunk_has(planned: Callable[..., Any]) -> None:
    found = planned("llama3_8b", "eagle3")
    few, many = (
        measure_step(found.make_head, replace(OBJECTIVE, chunk_rows=rows), shape_of(found.target)).moments[CHUNK][CHUNK]
        for rows in (256, 512)
    )
    lm_head = 4 * found.head.num_lm_head
    assert 2 * lm_head < few < 5 * lm_head  # kept for the backward, and a chunk's own, in bf16 too, before it is added
    assert many - few < 256 * 16 * found.head.num_lm_head / found.target.hidden_size, "and a chunk's rows take what rows take"


def test_a_mode_that_is_none_is_refused(planned: Callable[..., Any], steps: dict[str, StepMemory]) -> None:
    with pytest.raises(ValueError, match=r"parallel: expected one of .*'zero3'.*found 'zero4'"):
        process_memory(steps["llama3_70b"], planned("llama3_70b").head, mode="zero4", rule="adamw", num_processes=2, packs_per_process=1)
