"""What vLLM is started with, without vLLM and without its devices: every setting reaches it, every copy has devices of its own."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_for_tests as own

from mtp_train.engine.vllm_settings import VllmSettings
from mtp_train.exporter.served import Served, serve_command


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}), encoding="utf-8")
    return tmp_path


def settings(target: Path, **changes: Any) -> VllmSettings:
    plain: dict[str, Any] = {
        "target_path": target,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "batch_size": 32,
        "max_prefill_tokens": 256,
        "max_length_tokens": None,
        "enforce_eager": False,
        "attention_backend": None,
        "gpu_memory_utilization": 0.8,
        "cpu_kv_cache_gib": 3,
        "cpu_threads": None,
        "scratch": None,
    }
    return VllmSettings(**{**plain, **changes})


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def devices(found: VllmSettings) -> list[str | None]:
    return [found.environment(copy, probe=False).get("CUDA_VISIBLE_DEVICES") for copy in range(found.data_parallel_size)]


@pytest.mark.usefixtures("eight_gpus")
def test_every_copy_has_devices_of_its_own(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(settings(target, tensor_parallel_size=4)) == [None], "one copy: vLLM takes what it sees"
    assert devices(settings(target, tensor_parallel_size=2, data_parallel_size=4)) == ["0,1", "2,3", "4,5", "6,7"]
    with pytest.raises(ValueError, match=r"expected 12 devices .* found 8"):
        devices(settings(target, tensor_parallel_size=4, data_parallel_size=3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    assert devices(settings(target, data_parallel_size=2)) == ["GPU-a", "GPU-b"], "of those that this process may use"
    # The second of torchrun's two processes on this machine.
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert devices(settings(target, data_parallel_size=2)) == ["GPU-c", "GPU-d"]
    assert devices(settings(target, tensor_parallel_size=2)) == ["GPU-c,GPU-d"]


def test_copies_on_a_cpu_share_its_cores(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    found = settings(target, data_parallel_size=3).environment(0, probe=False)
    assert (found["OMP_NUM_THREADS"], found["VLLM_CPU_KVCACHE_SPACE"]) == ("4", "3") and "CUDA_VISIBLE_DEVICES" not in found
    assert settings(target, cpu_threads=5).environment(0, probe=False)["OMP_NUM_THREADS"] == "5"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in found and settings(target).environment(0, probe=True)["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_every_setting_reaches_vllm(target: Path) -> None:
    found = settings(target, tensor_parallel_size=4, attention_backend="FLASHINFER", max_length_tokens=300, trust_remote_code=True)
    llm = found.llm(drawn=False)
    stated = {
        "model": str(target),
        "dtype": "bfloat16",
        "tensor_parallel_size": 4,
        "attention_backend": "FLASHINFER",
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "enable_chunked_prefill": True,
        "max_model_len": 300,
        "gpu_memory_utilization": 0.8,
        "trust_remote_code": True,
    }
    assert stated.items() <= llm.items()
    assert settings(target).llm(drawn=False).keys().isdisjoint({"attention_backend", "max_model_len"})
    prefill = found.prefill_llm(taps=False)
    assert prefill["enable_prefix_caching"] is False and prefill["max_model_len"] == 301 and prefill["enforce_eager"] is False
    assert found.prefill_llm(taps=True)["enforce_eager"] is True, "hooks on single layers"


def test_speculation_is_set_as_measured_and_said_ready_to_paste(target: Path) -> None:
    found = settings(target, tensor_parallel_size=2, attention_backend="FLASHINFER", max_length_tokens=300, trust_remote_code=True)
    config = {"method": "mtp", "model": "/heads/mine"}
    served = Served(
        class_name="MiMoMTP", speculative_config=config, hf_overrides={"num_nextn_predict_layers": 1}, plugin=None, target_path=str(target)
    )
    llm = found.speculate_llm(served, own.settings(draft_sampling="probabilistic", batch_size=7))
    assert llm["speculative_config"] == {**config, "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    assert (llm["max_num_seqs"], llm["hf_overrides"]) == (7, {"num_nextn_predict_layers": 1})
    assert llm.items() >= found.baseline_llm(own.settings(batch_size=7)).items(), "the baseline: the same without the head"
    command = serve_command(
        target=str(target), speculative_config=llm["speculative_config"], hf_overrides=llm["hf_overrides"], flags=found.serve_flags()
    )
    words = shlex.split(command)
    assert words[:4] == ["vllm", "serve", str(target), "--speculative-config"] and json.loads(words[4]) == llm["speculative_config"]
    assert json.loads(words[6]) == llm["hf_overrides"]
    assert " ".join(words[7:]) == (
        "--dtype bfloat16 --trust-remote-code --tensor-parallel-size 2 --attention-backend FLASHINFER --max-model-len 300"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "int8"}, "engine.dtype: expected auto or one of"),
        ({"tensor_parallel_size": 0}, "engine.tensor_parallel_size: expected at least 1, found 0"),
        ({"target_path": Path("nowhere")}, "expected a folder with config.json"),
    ],
)
def test_a_wrong_setting_is_said(target: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(target, **changes)
