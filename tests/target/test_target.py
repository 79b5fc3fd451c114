"""Targets: spec and shared weights from files alone, layer ids against forward hooks, identity, refusals."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mtp_train.target.resolve import resolve_target
from mtp_train.target.spec import fingerprint, read_spec, transformers_hidden_index, vllm_layer_id
from mtp_train.target.weights import read_layer, read_shared


def test_spec_has_the_model_s_sizes(tiny_llama: Path) -> None:
    spec = read_spec(tiny_llama, name="tiny")
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_size) == (64, 2, 320, 4, 2, 16)
    assert (spec.model_type, spec.tied, spec.max_positions) == ("llama", False, 2048)


def test_shared_weights_are_the_model_s_own(tiny_llama: Path, tiny_llama_tied: Path) -> None:
    from transformers import AutoModelForCausalLM

    for path, tied in ((tiny_llama, False), (tiny_llama_tied, True)):
        model = AutoModelForCausalLM.from_pretrained(path)
        shared = read_shared(path)
        assert torch.equal(shared.embedding_VD, model.model.embed_tokens.weight)
        assert torch.equal(shared.lm_head_VD, model.lm_head.weight)
        assert torch.equal(shared.final_norm_weight_D, model.model.norm.weight)
        assert shared.tied is tied
        assert shared.to(device="cpu", dtype=torch.bfloat16).tied is tied
        layer = read_layer(path, 1)
        assert torch.equal(layer["self_attn.q_proj.weight"], model.model.layers[1].self_attn.q_proj.weight)


def test_layer_ids_mean_the_output_of_that_layer(tiny_llama: Path) -> None:
    """Our id i is what a forward hook on layer i sees; the conversions point at the same state."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    seen: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _m, _a, out, i=i: seen.__setitem__(i, out))
    with torch.no_grad():
        hidden_states = model(torch.arange(10)[None], output_hidden_states=True).hidden_states
    assert torch.equal(seen[0], hidden_states[transformers_hidden_index(0, num_layers=2)])
    assert vllm_layer_id(0) == 1
    assert torch.equal(model.model.norm(seen[1]), hidden_states[-1])
    with pytest.raises(ValueError, match="after the final norm"):
        transformers_hidden_index(1, num_layers=2)
    with pytest.raises(ValueError, match="from 0 to 1"):
        read_spec(tiny_llama, name="tiny").check_layer_ids((2,))


def test_fingerprint_follows_the_weights(tiny_llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    (copy / ".mtp_train_fingerprint.json").unlink(missing_ok=True)
    before = fingerprint(copy)
    assert before == fingerprint(tiny_llama) == fingerprint(copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(data))
    assert fingerprint(copy) != before


def test_other_architectures_and_broken_folders_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_spec(tmp_path, name="x")
    folder = tmp_path / "evil"
    shutil.copytree(tiny_llama, folder)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ValueError, match="only safetensors are read"):
        read_spec(folder, name="x")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="in this folder"):
        read_shared(folder)


def test_gpt2_is_refused_with_the_reason(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"found model_type 'gpt2', which has no tensor model\.embed_tokens\.weight"):
        read_spec(tmp_path, name="gpt2")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma3_text"}, "scales its embedding"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8"),
        ({"rms_norm_eps": None}, "has no rms_norm_eps"),
    ],
)
def test_models_with_llama_s_names_and_other_arithmetic_are_refused(
    change: dict[str, object], reason: str, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "embedding_multiplier": 1.0}))
    assert read_spec(folder, name="neutral").hidden_size == 64
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=reason):
        read_spec(folder, name="x")


def test_shards_are_read_as_one_model(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(read_shared(tmp_path).lm_head_VD, read_shared(tiny_llama).lm_head_VD)
    whole, parts = read_layer(tiny_llama, 0), read_layer(tmp_path, 0)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with pytest.raises(ValueError, match="the model has 2 layers"):
        read_layer(tmp_path, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of memory maps")
def test_shared_weights_are_mapped_not_copied(tiny_llama: Path) -> None:
    shared = read_shared(tiny_llama)
    address, where = shared.embedding_VD.data_ptr(), str((tiny_llama / "model.safetensors").resolve())
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(where)]
    assert any(int(start, 16) <= address < int(end, 16) for start, end in (entry[0].split("-") for entry in maps))


def test_resolve_refuses_what_it_cannot_find(tmp_path: Path, tiny_llama: Path) -> None:
    assert resolve_target({"kind": "path", "path": str(tiny_llama)}) == tiny_llama
    with pytest.raises(ValueError, match="expected a model folder"):
        resolve_target({"kind": "path", "path": str(tmp_path / "none")})
    with pytest.raises(ValueError, match=r"expected a model folder .*, found no config\.json in "):
        resolve_target({"kind": "path", "path": str(tmp_path)})
    with pytest.raises(ValueError, match="40 hex digits"):
        resolve_target({"kind": "hub", "hub_id": "a/b", "revision": "main", "trust_remote_code": False})
    with pytest.raises(ValueError, match="expected to find it on the hub"):
        resolve_target({"kind": "hub", "hub_id": "a/b", "revision": "0" * 40, "trust_remote_code": False})
    with pytest.raises(ValueError, match=r"target\.kind"):
        resolve_target({"kind": "carrier pigeon"})
