"""What ``auto`` comes to: bfloat16 where the device has instructions for its products, float32 elsewhere, which is said."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.engine import hf_model, vllm_settings
from mtp_train.nn.bf16 import multiplies_bf16
from mtp_train.trainer.module import choose_precision

CPU = torch.device("cpu")


@dataclass
class Processes:
    """What accelerate says of a training of so many processes, of which this one's answer is summed with the others'."""

    device: torch.device = CPU
    num_processes: int = 1
    others: float = 0.0

    def reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        assert how == "sum"
        return tensor + self.others


def chosen(precision: Any, processes: Processes | None = None) -> str:
    return choose_precision(precision, processes or Processes())  # type: ignore[arg-type]


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the processor the instructions that these words name, and no others."""

    def make(*words: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False} | dict.fromkeys(words, True))

    return make


@pytest.mark.parametrize(
    ("words", "found"), [((), False), (("avx512_f",), False), (("avx512_bf16",), True), (("amx_bf16",), True), (("neon", "bf16"), True)]
)
def test_a_processor_s_instructions_decide(has: Any, tmp_path: Path, words: tuple[str, ...], found: bool) -> None:
    has(*words)
    assert multiplies_bf16(CPU) is found
    (tmp_path / "config.json").write_text("{}")
    assert hf_model.choose_dtype("auto", CPU) == vllm_settings.choose_dtype("auto", tmp_path) == ("bfloat16" if found else "float32")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert vllm_settings.choose_dtype("auto", tmp_path) == "bfloat16"  # whose kernels take no other
    assert chosen("auto") == ("bf16" if found else "fp32")


def test_the_choice_of_float32_is_said_with_its_setting(has: Any, capsys: pytest.CaptureFixture[str]) -> None:
    has()
    hf_model.choose_dtype("auto", CPU), chosen("auto")
    said = capsys.readouterr().err
    assert "engine.dtype=auto: float32, since" in said and "precision=auto: float32, since" in said
    has("amx_bf16")
    hf_model.choose_dtype("auto", CPU), chosen("auto")
    assert capsys.readouterr().err == ""


def test_a_word_that_was_named_is_taken_whatever_the_device_has(has: Any) -> None:
    has()
    assert hf_model.choose_dtype("bfloat16", CPU) == vllm_settings.choose_dtype("bfloat16", Path("nowhere")) == "bfloat16"
    assert (chosen("bf16"), chosen("fp32")) == ("bf16", "fp32")
    with pytest.raises(ValueError, match=r"engine.dtype: expected auto or one of .*'bfloat16'.*, found 'fp16'"):
        hf_model.choose_dtype("fp16", CPU)


@pytest.mark.parametrize("found", [True, False])
def test_a_gpu_is_asked_by_torch_and_not_for_what_it_would_emulate(monkeypatch: pytest.MonkeyPatch, has: Any, found: bool) -> None:
    has()
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(including_emulation) or found)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert hf_model.choose_dtype("auto", torch.device("cuda:1")) == ("bfloat16" if found else "float32")
    assert multiplies_bf16(torch.device("cuda")) is found
    assert asked == [False, False]
    assert vllm_settings.choose_dtype("auto", Path("nowhere")) == "bfloat16" and len(asked) == 2  # asks nothing of the GPU in this process


@pytest.mark.parametrize(("others", "found"), [(3.0, "bf16"), (2.0, "fp32")])
def test_one_process_whose_device_does_not_makes_all_train_in_float32(has: Any, others: float, found: str) -> None:
    has("amx_bf16")
    assert chosen("auto", Processes(num_processes=4, others=others)) == found
    has()
    assert chosen("auto", Processes(num_processes=4, others=others)) == "fp32"


def test_an_engine_of_auto_states_what_it_came_to(has: Any, tiny_llama: Path) -> None:
    from mtp_train.engine.hf import HfEngine

    common: Any = {"trust_remote_code": False, "load_head": None, "dtype": "auto", "device": "cpu"}
    sizes: Any = {"batch_size": 1, "max_prefill_tokens": 8, "max_cache_tokens": 64}
    for words, dtype in (((), "float32"), (("amx_bf16",), "bfloat16")):
        has(*words)
        engine = HfEngine(target_path=tiny_llama, **common, **sizes)
        assert engine.dtype == engine.describe()["dtype"] == dtype and engine.target.model.dtype == getattr(torch, dtype)
