"""Modelled costs are the roofline's: verifying is free while weights are what takes the time, and rows come in blocks on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mtp_train.acceptance.costs import CostTable, Shape
from mtp_train.advising.modelled import Rates, modelled_costs
from mtp_train.planning.hardware import Hardware
from mtp_train.planning.sizes import TargetSizes, Weights

RATES = Rates(decode_compute=0.5, decode_memory=0.5, weight_bytes=2.0, kv_bytes=2.0, tensor_parallel=1)
TARGET = TargetSizes(
    name="made up",
    hidden_size=1000,
    num_layers=10,
    vocab_size=50_000,
    tied=False,
    layers=Weights(num_matrix=100_000_000, num_expert=0, num_other=0, chosen=1.0),
    attention_flops=0,
    num_kv=0,
    num_kv_parts=1,
)
MACHINE = Hardware(
    name="made up",
    device="a device",
    kind="gpu",
    num_devices=2,
    memory_bytes=10**9,
    usable_share=0.9,
    flops_per_s=2e12,
    memory_bytes_per_s=2e9,
    link_bytes_per_s=1e9,
    disk_bytes=10**9,
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=1e9,
    usd_per_hour=None,
    source="nowhere",
)


def model(**changes: Any) -> CostTable:
    settings: dict[str, Any] = {
        "target": TARGET,
        "fingerprint": "f",
        "hardware": MACHINE,
        "rates": RATES,
        "head": "mtp",
        "context_tokens": 100,
        "most_sequences": 128,
    }
    return modelled_costs(**{**settings, **changes})


def test_the_roofline_by_hand() -> None:
    table = model()
    # 150e6 weights of 2 bytes at half of 2 GB/s; products of 64 rows take 64 x 2 x 150e6 / 1e12.
    assert table.verify_s(1, 1) == pytest.approx(0.3)
    assert table.verify_s(8, 8) == pytest.approx(0.3), "64 rows are one block, which memory still hides"
    rows = 1024 * 8
    assert table.verify_s(1024, 8) == pytest.approx(rows * 2 * 150e6 / 1e12)
    # A layer, a projection of two hidden sizes, the lm_head.
    drafted = 2 * (10e6 + 2e6 + 50e6) / 1e9
    assert table.draft_step_s(1) == pytest.approx(drafted)
    assert table.source == "modelled" and table.costs(1, Shape(3, 1, 4)).overhead == pytest.approx(0.0)


def test_rows_come_in_blocks_on_a_gpu_alone() -> None:
    fast = dataclasses.replace(MACHINE, memory_bytes_per_s=2e15)
    gpu, cpu = model(hardware=fast), model(hardware=dataclasses.replace(fast, kind="cpu"))
    assert gpu.verify_s(1, 1) == gpu.verify_s(16, 4) == pytest.approx(64 * cpu.verify_s(1, 1))
    assert gpu.verify_s(32, 3) == pytest.approx(128 / 96 * cpu.verify_s(32, 3))


def test_less_context_than_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"context_tokens: expected at least 0, found -5"):
        model(context_tokens=-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"at most 0\.1 GB of weights per device, found 0\.4 GB of made up on 1; raise assume\.tensor_parallel"
    ):
        model(hardware=dataclasses.replace(MACHINE, memory_bytes=10**8))
    with pytest.raises(ValueError, match="at most 2 devices, found 4"):
        model(rates=dataclasses.replace(RATES, tensor_parallel=4))
    with pytest.raises(ValueError, match=r"assume\.decode_memory: expected above 0"):
        dataclasses.replace(RATES, decode_memory=0.0)
    assert model(head=None).drafting == ()
