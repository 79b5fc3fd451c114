"""The vLLM export without vLLM: the right class for each graph, its names and fillers, proofs, refusals, what is ready to paste."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_train.checkpoint import save_head
from mtp_train.engine.base import PrefillSettings
from mtp_train.engine.hf import HfEngine
from mtp_train.export import describe
from mtp_train.exporter.served import read_served
from mtp_train.exporter.vllm import VllmExporter
from mtp_train.exporter.vllm_choice import choose_class
from mtp_train.exporter.vllm_classes import CLASSES, PLUGIN
from mtp_train.head.mtp import Mtp
from mtp_train.records import Response
from mtp_train.runtime import read_json
from mtp_train.target.spec import fingerprint
from mtp_train.target.weights import read_shared
from mtp_train.trainer.probe import write_probe

NAMES = ("embed", "hidden", "input", "output", "feedback")


def norms(*on: str) -> dict[str, bool]:
    return {name: name in on for name in NAMES}


def write_target(path: Path, family: str = "llama", **changes) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.eval().save_pretrained(path)
    return path


def save_checkpoint(folder: Path, target: Path, *, switches: dict[str, bool], zero: bool, order: str = "hidden_embed") -> Path:
    head = Mtp(
        target_path=target,
        shared=read_shared(target),
        norms=switches,
        column_order=order,
        zero_first_embedding=zero,
        init="target_last_layer",
        seed=1,
        trust_remote_code=False,
    )
    with torch.no_grad():
        head.projection.weight.copy_(torch.randn(head.projection.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
        for index, parameter in enumerate(p for p in head.parameters() if p.ndim == 1):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    save_head(
        folder,
        head.state_dict(),
        config=head.draft_config(),
        target={"target_name": "tiny", "target_fingerprint": fingerprint(target)},
        made_by={},
    )
    engine = HfEngine(
        target_path=target,
        trust_remote_code=False,
        load_head=None,
        dtype="float32",
        device="cpu",
        batch_size=2,
        max_prefill_tokens=64,
        max_cache_tokens=8192,
    )
    ids = torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    responses = [
        Response(
            prompt_id=name,
            token_ids=tuple(ids[:n]),
            loss_mask=(False,) + (True,) * (n - 1),
            messages=(),
            finish_reason="given",
            category="c",
            source="s",
        )
        for name, n in (("a", 20), ("b", 9))
    ]
    write_probe(folder, head, list(engine.prefill(responses, PrefillSettings(target_layer_ids=(), top_k=None))))
    return folder


def exporter(**changes) -> VllmExporter:
    return VllmExporter(**{"dtype": "float32", "allow_plugin": True, "trust_remote_code": False, "overwrite": False, **changes})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "llama")


def test_every_mixture_has_one_class_and_stock_ones_come_first(llama: Path) -> None:
    from transformers import AutoConfig

    config, found = AutoConfig.from_pretrained(llama), {}
    for values in itertools.product((False, True), repeat=5):
        switches = dict(zip(NAMES, values, strict=True))
        if switches["feedback"] and not switches["output"]:
            continue
        for zero in (False, True):
            row = choose_class(norms=switches, zero_first_embedding=zero, tensors=frozenset(), target=config, allow_plugin=True)
            found.setdefault(row.name, []).append((switches, zero))
            assert row.norms is None or (dict(row.norms), row.zero_first_embedding) == (switches, zero)
    assert {name for name, cases in found.items() if len(cases) == 1} == {row.name for row in CLASSES}
    assert len(found[PLUGIN.name]) == 48 - len(CLASSES)


@pytest.mark.parametrize("row", CLASSES, ids=lambda row: row.name)
@pytest.mark.parametrize("order", ["hidden_embed", "embed_hidden"])
def test_export_to_each_stock_class(row, order: str, llama: Path, tmp_path: Path) -> None:
    """The export is proven on the trainer's probe; projection columns stand in the class's order; nothing shared is shipped."""
    checkpoint = save_checkpoint(tmp_path / "head", llama, switches=dict(row.norms), zero=row.zero_first_embedding, order=order)
    result = exporter().export(checkpoint, llama, tmp_path / "served")
    assert result.proof["largest_difference"]["logits"] < 1e-5
    served = load_file(result.path / "model.safetensors")
    assert not any("embed_tokens" in name or "lm_head" in name for name in served)
    ours, theirs = load_file(checkpoint / "head.safetensors")["projection.weight"], served[row.projection]
    assert torch.equal(theirs, ours if order == row.column_order else torch.cat(ours.chunk(2, dim=1)[::-1], dim=1))
    for name, value in row.fillers(tensors=frozenset(load_file(checkpoint / "head.safetensors"))).items():
        assert bool((served[name] == value).all())
    document = read_served(result.path)
    assert document.class_name == row.name and document.plugin is None
    assert document.speculative_config == {"method": row.method, "model": str(result.path.resolve())}
    assert (document.hf_overrides == {"num_nextn_predict_layers": 1}) is row.reads_target_config
    words = shlex.split(result.serve)
    assert words[:3] == ["vllm", "serve", str(llama)] and json.loads(words[4])["method"] == row.method
    assert result.serve in (result.path / "README.md").read_text()
    assert exporter().export(checkpoint, llama, tmp_path / "served").reused


def test_a_mixture_goes_to_the_plugin_or_is_refused(llama: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "head", llama, switches=norms("hidden", "output"), zero=False)
    with pytest.raises(ValueError, match=r"no stock class has norms embed=false, hidden=true.*allow_plugin"):
        exporter(allow_plugin=False).export(checkpoint, llama, tmp_path / "served")
    assert not (tmp_path / "served").exists()
    result = exporter().export(checkpoint, llama, tmp_path / "served")
    assert read_served(result.path).plugin == "mtp-train"
    assert read_json(result.path / "config.json")["mtp_train"]["norms"] == norms("hidden", "output")
    assert "needs our plugin" in (result.path / "README.md").read_text()


def test_the_command_that_is_printed_works_from_anywhere(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_checkpoint(tmp_path / "head", llama, switches=norms(*NAMES), zero=True)
    monkeypatch.chdir(tmp_path)
    (load,) = (
        line for line in describe(exporter().export(checkpoint, llama, Path("served")), run=Path("it")).splitlines() if "load: " in line
    )
    config = json.loads(shlex.split(load)[5])
    assert config == {"method": "mtp", "model": str(tmp_path / "served"), "num_speculative_tokens": 3}
    again = describe(exporter().export(checkpoint, llama, Path("served")), run=Path("it"))
    assert load in again and again.splitlines()[-1].startswith("num_speculative_tokens=3 is where to start;")
    assert again.endswith("says python -m mtp_train.advise 'runs=[it]'")


def test_qwen2_biases_are_shipped_and_others_zero(tmp_path: Path, llama: Path) -> None:
    """MiMo's layer has biases on q, k and v: a Qwen2 head's own, or zeros, which vLLM would not fill in by itself."""
    target = write_target(tmp_path / "qwen2", "qwen2")
    checkpoint = save_checkpoint(tmp_path / "head", target, switches=norms(*NAMES), zero=True)
    served = load_file(exporter().export(checkpoint, target, tmp_path / "served").path / "model.safetensors")
    own = load_file(checkpoint / "head.safetensors")
    assert torch.equal(served["model.mtp_layers.0.self_attn.q_proj.bias"], own["decoder.layer.self_attn.q_proj.bias"])
    assert own["decoder.layer.self_attn.q_proj.bias"].abs().min() > 0
    checkpoint = save_checkpoint(tmp_path / "plain", llama, switches=norms(*NAMES), zero=True)
    served = load_file(exporter().export(checkpoint, llama, tmp_path / "served-plain").path / "model.safetensors")
    assert not served["model.mtp_layers.0.self_attn.k_proj.bias"].any()


def test_qwen3_norms_need_the_plugin(tmp_path: Path) -> None:
    target = write_target(tmp_path / "qwen3", "qwen3", head_dim=32)
    checkpoint = save_checkpoint(tmp_path / "head", target, switches=norms(*NAMES), zero=True)
    with pytest.raises(ValueError, match=r"MiMoMTP does not read .*k_norm"):
        exporter(allow_plugin=False).export(checkpoint, target, tmp_path / "served")
    result = exporter().export(checkpoint, target, tmp_path / "served")
    assert read_json(result.path / "config.json")["mtp_train"]["qk_norm"] is True


def test_what_no_class_computes_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    gemma = AutoConfig.for_model("gemma", hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=32)
    with pytest.raises(ValueError, match="expected a target of model_type"):
        choose_class(norms=norms(*NAMES), zero_first_embedding=True, tensors=frozenset(), target=gemma, allow_plugin=True)
    slides = AutoConfig.for_model("mistral", hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=32, sliding_window=16)
    with pytest.raises(ValueError, match="sliding window"):
        choose_class(norms=norms(*NAMES), zero_first_embedding=True, tensors=frozenset(), target=slides, allow_plugin=True)


def test_more_blocks_than_one_are_refused_with_what_vllm_does_of_them(llama: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "head", llama, switches=dict.fromkeys(NAMES, True), zero=True)
    document = json.loads((checkpoint / "head.json").read_text())
    document["settings"]["num_blocks"] = 2
    (checkpoint / "head.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"found num_blocks=2; MiMoMTP.* asserts .* engine=hf, or export with exporter=hf"):
        exporter().export(checkpoint, llama, tmp_path / "served")


def test_a_tensor_without_a_place_is_refused(llama: Path, tmp_path: Path) -> None:
    """Most of vLLM's classes skip unknown tensors without a word; the export doesn't."""
    checkpoint = save_checkpoint(tmp_path / "head", llama, switches=norms(), zero=False)
    tensors = load_file(checkpoint / "head.safetensors")
    document = read_json(checkpoint / "head.json")
    tensors["output_norm.weight"] = torch.ones(32)
    save_head(
        checkpoint,
        tensors,
        config={key: document[key] for key in ("head", "method", "hidden_state", "settings")},
        target=document["target"],
        made_by={},
    )
    with pytest.raises(ValueError, match=r"output_norm\.weight"):
        exporter().export(checkpoint, llama, tmp_path / "served")


def test_a_probe_that_disagrees_stops_the_export(llama: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "head", llama, switches=norms(*NAMES), zero=True)
    probe = load_file(checkpoint / "probe.safetensors")
    probe["logits_1_TV"] = probe["logits_1_TV"] * 1.01
    save_file(probe, checkpoint / "probe.safetensors")
    with pytest.raises(ValueError, match="logits of probe sample 0 at depth 1"):
        exporter().export(checkpoint, llama, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_rotary_settings_and_longest_position_are_the_target_s(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    target = write_target(tmp_path / "target", rope_parameters=rope, max_position_embeddings=512)
    checkpoint = save_checkpoint(tmp_path / "head", target, switches=norms(), zero=False)
    config = read_json(exporter().export(checkpoint, target, tmp_path / "served").path / "config.json")
    assert config["rope_parameters"] == rope and config["max_position_embeddings"] == 512


def test_bfloat16_export_is_within_its_tolerance(llama: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "head", llama, switches=norms(*NAMES), zero=True)
    result = exporter(dtype="bfloat16").export(checkpoint, llama, tmp_path / "served")
    assert 1e-4 < result.proof["largest_difference"]["logits"] < result.proof["tolerance"]
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(result.path / "model.safetensors").values())
