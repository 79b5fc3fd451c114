"""Operations and times: the formulas against a count of a real head's products, and against each other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.batch.packing import pack
from mtp_train.batch.shift import loss_rows
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.planning.hardware import Hardware
from mtp_train.planning.step import OptimizerStep
from mtp_train.planning.work import (
    Assumptions,
    Workload,
    engine_layouts,
    evaluate_work,
    muon_exchange_bytes,
    precompute_work,
    regenerate_work,
    train_work,
)
from mtp_train.records import Sample, Teacher
from mtp_train.target.weights import read_shared
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.rows import align

HARDWARE = Hardware(
    name="test",
    device="test",
    kind="gpu",
    num_devices=8,
    memory_bytes=80 * 10**9,
    usable_share=0.9,
    flops_per_s=1e15,
    memory_bytes_per_s=3e12,
    link_bytes_per_s=4e11,
    disk_bytes=30 * 10**12,
    disk_read_bytes_per_s=1e10,
    disk_write_bytes_per_s=1e10,
    usd_per_hour=None,
    source="made up",
)
WORK = Workload(
    num_tokens=500_000_000,
    answer_share=0.4,
    mean_length_tokens=1000,
    top_k=64,
    num_taps=0,
    num_epochs=2,
    draft_steps=1,
    exact_teacher=False,
    tokens_per_pack=4096,
    packs_per_step=8,
    num_eval_prompts=100,
    max_new_tokens=128,
    num_speculative_tokens=3,
    acceptance_length=2.0,
)
ALL = Assumptions(
    train=1.0,
    prefill=1.0,
    decode_compute=1.0,
    decode_memory=1.0,
    link=1.0,
    disk=1.0,
    engine_batch_size=64,
    engine_memory_share=0.9,
    weight_bytes=2,
    kv_bytes=2,
)


ADAMW = OptimizerStep(state=0, working=0, flops=0.0, matrices=(), bytes_each=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens_per_pack": 0}, "tokens_per_pack: expected at least 1, found 0"),
        ({"packs_per_step": 0}, "packs_per_step: expected at least 1, found 0"),
        ({"num_epochs": 0}, "num_epochs: expected at least 1, found 0"),
        ({"top_k": -1}, "top_k: expected at least 1, found -1"),
        ({"num_eval_prompts": 0}, r"evaluate\.num_prompts: expected at least 1, found 0"),
        ({"acceptance_length": 0.0}, r"evaluate\.acceptance_length: expected from 1 to 4, .* found 0\.0"),
        ({"acceptance_length": 4.5}, r"evaluate\.acceptance_length: expected from 1 to 4, .* found 4\.5"),
        ({"acceptance_length": float("nan")}, r"evaluate\.acceptance_length: .* found nan"),
    ],
)
def test_work_that_cannot_be_is_refused_by_its_setting(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(WORK, **changed)


@pytest.mark.parametrize("price", [-3.0, float("nan"), float("inf")])
def test_a_price_is_a_number_from_0_on(price: float) -> None:
    assert replace(HARDWARE, usd_per_hour=0.0).usd_per_hour == 0.0
    with pytest.raises(ValueError, match=r"hardware\.usd_per_hour: expected 0 or more, or null, found"):
        replace(HARDWARE, usd_per_hour=price)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_training_operations_are_those_of_a_real_heads_products(
    planned: Callable[..., Any], request: pytest.FixtureRequest, family: str
) -> None:
    """Six per weight and token, and four per entry of the lm_head and row that counts."""
    from torch.utils.flop_counter import FlopCounterMode

    path: Path = request.getfixturevalue(f"tiny_{family}")
    found = planned(path)
    head = found.make_head(read_shared(path))
    draw = torch.Generator().manual_seed(0)
    num_tokens, top_k = 40, 4
    mask_T = torch.arange(num_tokens) >= 10
    row_M = mask_T[1:].nonzero(as_tuple=True)[0]
    top = torch.randn((len(row_M), 320), generator=draw).log_softmax(-1).topk(top_k)
    teacher = Teacher(row_M=row_M, ids_MC=top.indices, log_probs_MC=top.values, log_sum_exp_M=torch.zeros(len(row_M)))
    sample = Sample(
        sample_id="s",
        token_ids_T=torch.randint(0, 320, (num_tokens,), generator=draw),
        loss_mask_T=mask_T,
        hidden_TD=torch.randn((num_tokens, 64), generator=draw),
        teacher=teacher,
    )
    objective = Objective(terms={"topk_kl": Term(1.0, TopkKl())}, draft_steps=1, decay=1.0, chunk_rows=16)
    packed = align(pack([sample]), draft_steps=1, need_top=True)
    with FlopCounterMode(display=False) as counter:
        objective(head, packed, torch.ones(1), measure=False).loss.backward()
    counted = sum(number for op, number in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    num_rows = len(loss_rows(packed.batch, ahead=2).base_M)
    work = replace(WORK, num_tokens=num_tokens, answer_share=num_rows / num_tokens, num_epochs=1)
    free = replace(found.target, attention_flops=0)
    formula = train_work(free, found.head, HARDWARE, ALL, work, mode="single", optimizer=ADAMW, recompute=False, cache_bytes=0).flops
    assert counted == pytest.approx(formula, rel=1e-6)


def test_precompute_reads_each_token_once_or_waits_for_the_disk(planned: Callable[..., Any]) -> None:
    target = planned("llama3_70b").target
    quick = precompute_work(target, HARDWARE, ALL, WORK, cache_bytes=0)
    assert quick.flops == pytest.approx(2 * 68_451_041_280 * 5e8 + 500 * 32768 * 80 * 5e8 + 2 * 128256 * 8192 * 2e8)
    assert quick.seconds == pytest.approx(quick.flops / 8e15) and quick.bound_by == "compute"
    slow = precompute_work(target, HARDWARE, ALL, WORK, cache_bytes=1e16)
    assert slow.seconds == pytest.approx(1e6) and slow.bound_by == "disk"
    assert precompute_work(target, HARDWARE, ALL, replace(WORK, top_k=None), cache_bytes=0).flops < quick.flops


def test_training_time_by_hand(planned: Callable[..., Any]) -> None:
    found = planned("llama3_70b")
    p, steps = found.head.weights.total, WORK.num_steps
    adamw = replace(ADAMW, state=8 * p)
    assert steps == -(-2 * 500_000_000 // (8 * 4096))
    one, eight, sharded = (
        train_work(found.target, found.head, HARDWARE, ALL, WORK, mode=mode, optimizer=adamw, recompute=False, cache_bytes=1e12)
        for mode in ("single", "ddp", "zero3")
    )
    assert one.parts["compute"] == pytest.approx(8 * eight.parts["compute"]) and "exchange" not in one.parts
    assert eight.parts["exchange"] == pytest.approx(steps * 2 * 4 * p * 7 / 8 / 4e11)
    assert sharded.parts["exchange"] == pytest.approx(1.5 * eight.parts["exchange"])
    assert eight.parts["optimizer"] == pytest.approx(steps * 28 * p / 3e12)
    assert sharded.parts["optimizer"] == pytest.approx(eight.parts["optimizer"] / 8)
    assert eight.seconds == pytest.approx(sum(eight.parts[part] for part in ("compute", "optimizer", "exchange")))
    muon = OptimizerStep(state=4 * p, working=0, flops=2e14, matrices=((8192, 28672),), bytes_each=2)
    multiplied = train_work(found.target, found.head, HARDWARE, ALL, WORK, mode="ddp", optimizer=muon, recompute=False, cache_bytes=0)
    assert multiplied.parts["optimizer"] == pytest.approx(steps * (20 * p / 3e12 + 2e14 / 1e15))  # each process does all of it
    in_shards = train_work(found.target, found.head, HARDWARE, ALL, WORK, mode="fsdp2", optimizer=muon, recompute=False, cache_bytes=0)
    assert in_shards.parts["optimizer"] == pytest.approx(multiplied.parts["optimizer"] / 8)
    assert in_shards.parts["exchange"] == pytest.approx(
        sharded.parts["exchange"] + steps * muon_exchange_bytes(muon.matrices, processes=8, bytes_each=2) / 4e11
    )
    assert "exchange" in multiplied.parts and multiplied.parts["exchange"] == pytest.approx(eight.parts["exchange"])
    starved = train_work(found.target, found.head, HARDWARE, ALL, WORK, mode="ddp", optimizer=adamw, recompute=False, cache_bytes=1e15)
    assert starved.bound_by == "disk" and starved.seconds == pytest.approx(2 * 1e15 / 1e10)


# What torch exchanges for one step of Muon over each matrix, by eight processes of which only the first is there, on tensors without
# memory; a link carries what a process lacks of a whole, twice where it is added up and handed out.
EXCHANGED = """
import json, sys, torch, torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

processes, sent = 8, []
passes = {"all_gather_into_tensor": processes, "all_reduce": 2, "reduce_scatter_tensor": 1}

def turned(own, gather_dim, shard_dim, mesh, mesh_dim):  # on a CPU it gathers the whole, for want of gloo's exchange
    sent.append(own.nbytes * (processes - 1) / processes)
    size = [*own.shape]
    size[gather_dim], size[shard_dim] = size[gather_dim] * processes, size[shard_dim] // processes
    return own.new_empty(size)

placement_types.shard_dim_alltoall = turned

class Count(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first what it is made of
        name = func.name().removeprefix("_c10d_functional::")
        if name in passes:
            sent.append(passes[name] * args[0].nbytes * (processes - 1) / processes)
        else:
            assert "c10d" not in func.name() or "wait_tensor" in name, func.name()
        return func(*args, **(kwargs or {}))

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
mesh, found = init_device_mesh("cpu", (processes,)), []
for rows, columns in json.loads(sys.argv[1]):
    with FakeTensorMode(allow_non_fake_inputs=True):
        local = torch.empty(rows // processes, columns)
        parameter = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.Muon([parameter], lr=0.1, adjust_lr_fn="match_rms_adamw")
        sent.clear()
        with Count():
            optimizer.step()
    found.append(sum(sent))
print(json.dumps(found))
"""


def test_what_muon_exchanges_is_what_dtensor_exchanges() -> None:
    """Llama-70B's matrices, on their sides and upright."""
    shapes = [(8192, 16384), (8192, 8192), (1024, 8192), (28672, 8192)]
    done = subprocess.run([sys.executable, "-c", EXCHANGED, json.dumps(shapes)], check=True, capture_output=True, text=True)
    for shape, counted in zip(shapes, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert muon_exchange_bytes([shape], processes=8, bytes_each=2) == pytest.approx(counted, rel=0.1), shape


def test_a_depth_goes_through_one_block_of_several(planned: Callable[..., Any]) -> None:
    one, three = planned("llama3_8b"), planned("llama3_8b", num_blocks=3)
    assert three.head.weights.total == 3 * one.head.weights.total and three.head.largest == one.head.largest
    work = replace(WORK, draft_steps=3, answer_share=1.0)  # one block leaves out the rows that do not count, several do not
    flops = [
        train_work(found.target, found.head, HARDWARE, ALL, work, mode="ddp", optimizer=ADAMW, recompute=False, cache_bytes=0).flops
        for found in (one, three)
    ]
    assert flops[0] == pytest.approx(flops[1])


def test_a_target_takes_as_many_devices_as_it_needs(planned: Callable[..., Any]) -> None:
    layouts = {layout.tensor_parallel: layout for layout in engine_layouts(planned("llama3_70b").target, HARDWARE, ALL, WORK)}
    assert list(layouts) == [1, 2, 4, 8]
    assert layouts[1].batch_size == 0 and layouts[2].weight_bytes == 70_553_706_496
    # 72 GB less 70.55 GB of weights; 1000 tokens of 80 x 2 x 4 x 128 bfloat16 numbers on each of the two devices.
    assert layouts[2].batch_size == int((72e9 - 70_553_706_496) / (1000 * 163_840 / 2 * 2))
    assert layouts[8].batch_size == 64 and layouts[8].num_copies == 1
    latent = engine_layouts(planned("deepseek_v2_lite").target, HARDWARE, replace(ALL, engine_batch_size=10**6), WORK)
    assert latent[1].batch_size == int((72e9 - 15_706_484_224) / (1000 * 15_552 * 2))  # each of two devices keeps all of it


def test_decoding_is_bound_by_memory_until_the_batch_is_large(planned: Callable[..., Any]) -> None:
    target = planned("llama3_8b").target
    layouts = engine_layouts(target, HARDWARE, ALL, WORK)
    few = regenerate_work(target, HARDWARE, ALL, WORK, layouts)
    assert few is not None and few[0].bound_by == "memory" and few[1].tensor_parallel == 1
    short = replace(WORK, mean_length_tokens=10)
    many = replace(ALL, engine_batch_size=100_000)
    large = regenerate_work(target, HARDWARE, many, short, engine_layouts(target, HARDWARE, many, short))
    assert large is not None and large[0].bound_by == "compute"
    assert large[0].parts["writing answers"] < few[0].parts["writing answers"]
    none = replace(HARDWARE, memory_bytes=10**9)
    assert regenerate_work(target, none, ALL, WORK, engine_layouts(target, none, ALL, WORK)) is None


def test_drafts_that_are_accepted_save_verifications(planned: Callable[..., Any]) -> None:
    target = planned("llama3_8b").target
    (layout, *_) = engine_layouts(target, HARDWARE, ALL, WORK)
    one, two = (
        evaluate_work(target, HARDWARE, ALL, replace(WORK, acceptance_length=length), layout, batch_size=8).parts["with drafts"]
        for length in (1.0, 2.0)
    )
    assert two == pytest.approx(one / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": "80 barrels"}, "hardware.memory_bytes: expected a number such as 80GB"),
        ({"kind": "tpu"}, "gpu or cpu"),
        ({"num_devices": 0}, "num_devices of at least 1"),
        ({"link_bytes_per_s": 0}, "above 0"),
        ({"colour": "green"}, r"unknown \['colour'\]"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    from dataclasses import asdict

    with pytest.raises(ValueError, match=message):
        Hardware.read({**asdict(HARDWARE), **change})


def test_shares_and_counts_must_make_sense() -> None:
    with pytest.raises(ValueError, match=r"prompt\.answer_share"):
        replace(WORK, answer_share=0.0)
    with pytest.raises(ValueError, match="num_tokens"):
        replace(WORK, num_tokens=0)
    with pytest.raises(ValueError, match=r"assume\.train"):
        replace(ALL, train=0.0)
