"""A quantized target through vLLM: what the engine runs is what is kept, with embedding and lm_head as the engine has them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_train.engine.base import PrefillSettings
from mtp_train.engine.vllm import VllmEngine
from mtp_train.records import Response
from mtp_train.target.spec import quantization_of
from mtp_train.target.weights import read_layer, read_shared

SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
        }
    },
}


def quantize(source: Path, out: Path) -> Path:
    """int8 weights per row, int8 activations per token: every linear map of the layers; and the same rounded, in floats."""
    tensors, rounded = load_file(source / "model.safetensors"), {}
    quantized = {}
    for name, weight in tensors.items():
        if "_proj." not in name:
            quantized[name] = rounded[name] = weight
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        quantized[name] = (weight / scale).round().to(torch.int8)
        quantized[name.replace(".weight", ".weight_scale")] = scale
        rounded[name] = quantized[name].float() * scale
    for folder, held in ((out / "int8", quantized), (out / "rounded", rounded)):
        shutil.copytree(source, folder)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (out / "int8" / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEME}), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def folders(served_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(served_llama, tmp_path_factory.mktemp("quantized") / "of")


def test_the_scheme_is_stated_and_shared_weights_are_floats(folders: Path, tmp_path: Path) -> None:
    assert quantization_of(folders / "int8") == "compressed-tensors int-quantized" and quantization_of(folders / "rounded") is None
    ours, plain = read_shared(folders / "int8"), read_shared(folders / "rounded")
    assert torch.equal(ours.lm_head_VD, plain.lm_head_VD) and torch.equal(ours.embedding_VD, plain.embedding_VD)
    with pytest.raises(ValueError, match=r"torch\.int8, quantized"):
        read_layer(folders / "int8", 1)
    shutil.copytree(folders / "int8", tmp_path / "all")
    tensors = load_file(tmp_path / "all" / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "all" / "model.safetensors")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight in float32, bfloat16 or float16, found torch\.float8_e4m3fn"):
        read_shared(tmp_path / "all")
    (tmp_path / "all" / "config.json").write_text('{"quantization_config": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match="quant_method"):
        quantization_of(tmp_path / "all")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install mtp-train[vllm])")
def test_what_vllm_runs_is_what_is_kept(folders: Path) -> None:
    """Hidden states are those of the int8 weights times their scales, to int8 activations and bfloat16; the teacher is the float
    lm_head over them. The folder holds no other weights of the layers, so that nothing else can have run."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3))
    engine = VllmEngine(
        target_path=folders / "int8",
        trust_remote_code=False,
        load_head=None,
        dtype="bfloat16",  # the CPU build's int8 kernel takes bfloat16 or half, not float32
        tensor_parallel_size=1,
        data_parallel_size=1,
        batch_size=4,
        max_prefill_tokens=256,
        max_length_tokens=None,
        enforce_eager=True,
        gpu_memory_utilization=0.5,
        cpu_kv_cache_gib=1,
        cpu_threads=1,
        scratch=None,
    )
    mask = tuple(i >= 4 for i in range(40))
    asked = Response(
        prompt_id="a", token_ids=tuple(ids.tolist()), loss_mask=mask, messages=(), finish_reason="given", category="", source=""
    )
    (sample,) = engine.prefill([asked], PrefillSettings(target_layer_ids=(), top_k=4))

    def hidden(path: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            return model.model(ids[None]).last_hidden_state[0]

    def error(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).norm() / other.norm())

    found, rounded = sample.hidden_TD.float(), hidden(folders / "rounded")
    assert 0 < error(found, rounded) < 0.1, error(found, rounded)  # 0.041 was measured
    assert sample.teacher is not None
    logits = found[sample.teacher.row_M] @ read_shared(folders / "int8").lm_head_VD.float().T
    torch.testing.assert_close(sample.teacher.log_probs_MC, logits.log_softmax(-1).gather(1, sample.teacher.ids_MC), rtol=0, atol=0.05)
