"""Models of real size on the meta device: parameters as published, heads as hand arithmetic has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.planning.hardware import Hardware
from mtp_train.planning.sizes import count_weights, read_target_sizes, target_folder
from mtp_train.stage import conf_dir, load_word

# As the hub's model pages have them, counted from the safetensors' headers.
PUBLISHED = {
    "smollm2_135m": 134_515_008,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_32b": 32_762_123_264,
    "deepseek_v2_lite": 15_706_484_224,
}


@pytest.mark.parametrize(("word", "parameters"), PUBLISHED.items())
def test_a_target_has_the_published_number_of_parameters(word: str, parameters: int) -> None:
    with target_folder(load_word("target", word)) as folder:
        assert read_target_sizes(folder, name=word).num_parameters == parameters


def test_every_target_with_sizes_is_checked_above() -> None:
    words = {path.stem for path in (conf_dir() / "target").glob("*.yaml") if load_or_none(path.stem)}
    assert words == PUBLISHED.keys()


def load_or_none(word: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.load(conf_dir() / "target" / f"{word}.yaml").get("sizes")


def llama_layer(d: int, inner: int, kv: int) -> int:
    return 2 * d * d + 2 * d * kv + 3 * d * inner  # q and o, k and v, gate up down


@pytest.mark.parametrize(
    ("word", "d", "inner", "kv"),
    [("llama3_1b", 2048, 8192, 8 * 64), ("llama3_8b", 4096, 14336, 8 * 128), ("llama3_70b", 8192, 28672, 8 * 128)],
)
def test_a_llama_head_is_its_projection_and_one_layer(planned: Callable[..., Any], word: str, d: int, inner: int, kv: int) -> None:
    mtp, eagle = planned(word, "mtp").head, planned(word, "eagle").head
    assert mtp.weights.num_matrix == eagle.weights.num_matrix == 2 * d * d + llama_layer(d, inner, kv)
    # Norms on the embedding, the hidden state, before attention and MLP, and at the end; EAGLE-1 keeps the one before the MLP.
    assert (mtp.weights.num_other, eagle.weights.num_other) == (5 * d, d)
    assert mtp.weights.num_expert == 0 and mtp.largest == d * inner and mtp.num_layers == 1


def test_medusas_heads_are_a_matrix_each_of_which_a_depth_goes_through_one(planned: Callable[..., Any]) -> None:
    found = planned("llama3_8b", "medusa").head
    assert found.weights.num_matrix == found.weights.total == 5 * 4096 * 4096
    assert (found.num_blocks, found.num_layers, found.num_lm_head, found.num_embedding) == (5, 0, 0, 0)


def test_a_draft_model_is_counted_by_its_own_config(planned: Callable[..., Any]) -> None:
    """Its embedding is its lm_head where they are tied, and no product of its layers either way."""
    found = planned("llama3_8b", "draft_model").head
    d, inner, layers, kv, vocabulary = 192, 512, 4, 64, 128256
    assert found.weights.num_matrix == layers * llama_layer(d, inner, kv) + vocabulary * d
    assert (found.num_layers, found.num_lm_head, found.num_embedding) == (layers, vocabulary * d, 0)
    assert found.attention_flops == 4 * 3 * 64 and found.num_blocks == 1


def test_a_deepseek_v2_lite_head_has_the_targets_latent_attention_and_experts(planned: Callable[..., Any]) -> None:
    d, heads, latent, rotary, key, value, inner = 2048, 16, 512, 64, 128, 128, 1408
    attention = d * heads * (key + rotary) + d * (latent + rotary) + latent * heads * (key + value) + heads * value * d
    shared, router = 3 * d * 2 * inner, 64 * d
    found = planned("deepseek_v2_lite", "mtp")
    assert found.head.weights.num_matrix == 2 * d * d + attention + shared + router
    assert found.head.weights.num_expert == 64 * 3 * d * inner
    assert found.head.weights.num_other == 5 * d + latent
    assert found.head.weights.chosen == 6 / 64
    assert found.head.weights.num_active == pytest.approx(found.head.weights.num_matrix + 6 * 3 * d * inner)
    assert found.target.num_kv == 27 * (latent + rotary) and found.target.num_kv_parts == 1
    assert found.target.attention_flops == 2 * heads * (key + rotary + value)


def test_kv_cache_and_attention_of_grouped_queries(planned: Callable[..., Any]) -> None:
    target = planned("llama3_70b").target
    assert target.num_kv == 80 * 2 * 8 * 128 and target.num_kv_parts == 8
    assert target.attention_flops == 4 * 64 * 128
    assert target.num_shared == 2 * 128256 * 8192 + 8192 and planned("llama3_1b").target.num_shared == 128256 * 2048 + 2048


def test_a_folder_with_a_config_is_enough(planned: Callable[..., Any], tiny_deepseek: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_deepseek, dtype=torch.float32)
    assert planned(tiny_deepseek).target.num_parameters == model.num_parameters()


def test_experts_are_read_as_tokens_choose_them() -> None:
    weights = count_weights([("experts.up", torch.empty(4, 2, 3)), ("gate", torch.empty(4, 2)), ("norm", torch.empty(5))], chosen=0.25)
    assert (weights.num_expert, weights.num_matrix, weights.num_other, weights.total) == (24, 8, 5, 37)
    assert weights.num_active == 8 + 6
    assert weights.num_read(1) == 13 + 6 and weights.num_read(2) == 13 + 24 * (1 - 0.75**2) and weights.num_read(1000) == pytest.approx(37)


def test_a_target_that_is_not_here_and_states_no_sizes_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"expected the sizes of mine .* target=local target\.path="),
        target_folder({"kind": "hub", "name": "mine"}),
    ):
        pass


def test_hardware_without_the_key_is_of_bfloat16() -> None:
    """A file that was written before the key was there; a machine measured in float32 trains in it, where nothing is said."""
    settings = load_word("hardware", "2cpu")
    del settings["flops_dtype"]
    found = Hardware.read(settings)
    assert (found.flops_dtype, found.precision("auto"), found.precision("fp32")) == ("bfloat16", "bf16", "fp32")
    assert Hardware.read({**settings, "flops_dtype": "float32"}).precision("auto") == "fp32"
    with pytest.raises(ValueError, match=r"missing \['source'\], unknown \[\]"):
        Hardware.read({key: value for key, value in settings.items() if key != "source"})
