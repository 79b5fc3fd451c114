"""An export loads back to the trained head's logits, holds nothing that does not count, and appears whole or not at all."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_train.exporter import hf
from mtp_train.exporter.base import MANIFEST
from mtp_train.exporter.hf import HfExporter, load_exported
from mtp_train.exporter.proof import PROBE, perturbed, read_probe
from mtp_train.runtime import sha256_file

Make = Callable[..., Path]
MIXTURES: list[dict[str, bool]] = [
    {"embed": True, "hidden": False, "input": True, "output": True, "feedback": False},
    {"embed": False, "hidden": True, "input": False, "output": True, "feedback": True},
]


def logits(folder: Path, target: Path, checkpoint: Path) -> torch.Tensor:
    """The exported head's logits at the probe's rows and depths."""
    graph = load_exported(folder, target_path=target)
    found = []
    for sample in read_probe(checkpoint):
        steps = graph.unroll(token_ids_T=sample.token_ids_T, hidden_TD=sample.hidden_TD, num_depths=len(sample.expected_logits))
        found += [step.logits_TV[: rows.shape[0]] for step, rows in zip(steps, sample.expected_logits, strict=True)]
    return torch.cat(found)


def expected_logits(checkpoint: Path) -> torch.Tensor:
    return torch.cat([rows for sample in read_probe(checkpoint) for rows in sample.expected_logits])


@pytest.mark.parametrize("word", ["mtp", "eagle"])
@pytest.mark.parametrize("tied", [False, True])
def test_export_loads_back_to_the_same_logits(
    checkpoint_of: Make, tiny_llama: Path, tiny_llama_tied: Path, tmp_path: Path, word: str, tied: bool
) -> None:
    target = tiny_llama_tied if tied else tiny_llama
    checkpoint = checkpoint_of(target, word=word)
    result = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, target, tmp_path / "served" / word)
    expected = expected_logits(checkpoint)
    assert expected.shape[0] == (15 + 14 + 13) + (7 + 6 + 5)
    assert torch.allclose(logits(result.path, target, checkpoint), expected, rtol=0, atol=5e-5 * float(expected.abs().max()))
    assert result.proof["num_rows"] == expected.shape[0]
    assert not result.reused


@pytest.mark.parametrize("norms", MIXTURES)
@pytest.mark.parametrize("column_order", ["hidden_embed", "embed_hidden"])
def test_any_mixture_of_norms(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path, norms: dict[str, bool], column_order: str) -> None:
    checkpoint = checkpoint_of(tiny_llama, word="mtp", norms=norms, column_order=column_order, zero_first_embedding=False)
    result = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")
    expected = expected_logits(checkpoint)
    assert torch.allclose(logits(result.path, tiny_llama, checkpoint), expected, rtol=0, atol=5e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_a_head_of_several_blocks_loads_back(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path, num_blocks: int) -> None:
    """The probe is as deep as there are blocks, so that each takes part; the card says which tensors serve which depth."""
    checkpoint = checkpoint_of(tiny_llama, word="mtp", num_blocks=num_blocks)
    result = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")
    expected = expected_logits(checkpoint)
    assert result.proof["num_depths"] == max(3, num_blocks)
    assert torch.allclose(logits(result.path, tiny_llama, checkpoint), expected, rtol=0, atol=5e-5 * float(expected.abs().max()))
    names = load_file(result.path / "model.safetensors").keys()
    assert {name.split(".")[1] for name in names if name.startswith("blocks.")} == {str(block) for block in range(1, num_blocks)}
    assert f"from {num_blocks - 1} on take those of `blocks.{num_blocks - 1}`" in (result.path / "README.md").read_text()


def test_embedding_and_lm_head_are_not_shipped(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path) -> None:
    result = HfExporter(overwrite=False, trust_remote_code=False).export(
        checkpoint_of(tiny_llama, word="mtp"), tiny_llama, tmp_path / "out"
    )
    tensors = load_file(result.path / "model.safetensors")
    assert sorted(tensors) == sorted(
        [
            "embed_norm.weight",
            "hidden_norm.weight",
            "fc.weight",
            "norm.weight",
            *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
            *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
            "layers.0.input_layernorm.weight",
            "layers.0.post_attention_layernorm.weight",
        ]
    )
    config = json.loads((result.path / "config.json").read_text())
    assert config["hidden_state"] == "post_norm"
    assert config["target_config"] == json.loads((tiny_llama / "config.json").read_text())
    card = (result.path / "README.md").read_text()
    assert config["head_weights_sha256"] in card
    assert config["target"]["target_fingerprint"] in card
    assert "concat(s, e)" in card


@pytest.mark.parametrize("word", ["mtp", "eagle"])
def test_each_exported_tensor_perturbed_changes_the_logits(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path, word: str) -> None:
    checkpoint = checkpoint_of(tiny_llama, word=word)
    result = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")
    plain = logits(result.path, tiny_llama, checkpoint)
    tensors = load_file(result.path / "model.safetensors")
    for number, name in enumerate(tensors):
        folder = tmp_path / f"changed-{number}"
        shutil.copytree(result.path, folder)
        save_file({**tensors, name: perturbed(tensors[name], seed=number)}, folder / "model.safetensors")
        assert float((logits(folder, tiny_llama, checkpoint) - plain).abs().max()) > 1e-3 * float(plain.abs().max()), name


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_probe_that_says_otherwise_is_refused(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path, depth: int) -> None:
    checkpoint = checkpoint_of(tiny_llama, word="mtp")
    tensors = load_file(checkpoint / PROBE)
    tensors[f"logits_{depth}_TV"][3, 5] += 1e-2 * tensors[f"logits_{depth}_TV"].abs().max()
    save_file(tensors, checkpoint / PROBE)
    with pytest.raises(ValueError, match=f"logits of probe sample 0 at depth {depth}"):
        HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"], "nothing is left behind"


@pytest.mark.parametrize(
    ("key", "value"), [("column_order", "embed_hidden"), ("zero_first_embedding", False), ("norms", {"feedback": False})]
)
def test_a_head_json_that_states_another_graph_is_refused(
    checkpoint_of: Make, tiny_llama: Path, tmp_path: Path, key: str, value: Any
) -> None:
    checkpoint = checkpoint_of(tiny_llama, word="mtp")
    document = json.loads((checkpoint / "head.json").read_text())
    settings = document["settings"]
    settings[key] = {**settings[key], **value} if isinstance(value, dict) else value
    (checkpoint / "head.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="the exported graph is not the trained one"):
        HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"num_heads": 3}}, "whose settings state"),
        ({"hidden_state": "pre_norm"}, "expected a head that reads post_norm"),
        ({"hidden_state": None}, "post_norm or pre_norm"),
        ({"format_version": 7}, "format_version 1, found 7"),
        ({"weights_sha256": "0" * 64}, "sha256"),
    ],
)
def test_a_wrong_head_json_is_refused(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    checkpoint = checkpoint_of(tiny_llama, word="mtp")
    document = json.loads((checkpoint / "head.json").read_text())
    (checkpoint / "head.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(ValueError, match=message):
        HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_too_many_or_too_few_is_refused(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tiny_llama, word="mtp")
    tensors = load_file(checkpoint / "head.safetensors")

    def export_with(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, checkpoint / "head.safetensors")
        document = json.loads((checkpoint / "head.json").read_text())
        document["weights_sha256"] = sha256_file(checkpoint / "head.safetensors")
        (checkpoint / "head.json").write_text(json.dumps(document))
        HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")

    with pytest.raises(ValueError, match=r"expected one rule for the tensor 'adapter\.weight'"):
        export_with({**tensors, "adapter.weight": torch.ones(3)})
    with pytest.raises(ValueError, match="expected the tensors of the graph"):
        export_with({**tensors, "decoder.layer.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ValueError, match="expected the tensors of the graph"):
        export_with({name: tensor for name, tensor in tensors.items() if name != "output_norm.weight"})


def test_another_target_is_refused(checkpoint_of: Make, tiny_llama: Path, tiny_llama_tied: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the target that"):
        HfExporter(overwrite=False, trust_remote_code=False).export(
            checkpoint_of(tiny_llama, word="mtp"), tiny_llama_tied, tmp_path / "out"
        )


def test_a_checkpoint_without_a_probe_is_refused(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tiny_llama, word="mtp")
    (checkpoint / PROBE).unlink()
    with pytest.raises(ValueError, match="expected the probe that train writes"):
        HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")


def test_same_export_twice_does_nothing_and_repairs_damage(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint, exporter, out = (
        checkpoint_of(tiny_llama, word="mtp"),
        HfExporter(overwrite=False, trust_remote_code=False),
        tmp_path / "out",
    )
    first = exporter.export(checkpoint, tiny_llama, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = exporter.export(checkpoint, tiny_llama, out)
    assert again.reused
    assert again.files == first.files
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / "model.safetensors").write_bytes(b"damaged")
    mended = exporter.export(checkpoint, tiny_llama, out)
    assert not mended.reused
    assert sha256_file(out / "model.safetensors") == first.files["model.safetensors"]


def test_another_heads_export_is_kept_unless_asked(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one, two = (checkpoint_of(tiny_llama, word="mtp", name=name, seed=seed) for name, seed in (("one", 1), ("two", 2)))
    first = HfExporter(overwrite=False, trust_remote_code=False).export(one, tiny_llama, out)
    with pytest.raises(ValueError, match=r"found another .*overwrite=true"):
        HfExporter(overwrite=False, trust_remote_code=False).export(two, tiny_llama, out)
    assert sha256_file(out / "model.safetensors") == first.files["model.safetensors"]
    second = HfExporter(overwrite=True, trust_remote_code=False).export(two, tiny_llama, out)
    assert second.files["model.safetensors"] != first.files["model.safetensors"]
    assert {path.name for path in out.parent.iterdir()} == {"checkpoint", "out"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_export_is_never_replaced(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="found something else"):
        HfExporter(overwrite=overwrite, trust_remote_code=False).export(checkpoint_of(tiny_llama, word="mtp"), tiny_llama, out)
    assert (out / "thesis.txt").read_text() == "years of work"


def test_killed_between_the_renames_loses_nothing(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path) -> None:
    """As a kill leaves it: the old export set aside, the new one not yet in place, and a half-written folder."""
    out = tmp_path / "out"
    one, two = (checkpoint_of(tiny_llama, word="mtp", name=name, seed=seed) for name, seed in (("one", 1), ("two", 2)))
    first = HfExporter(overwrite=False, trust_remote_code=False).export(one, tiny_llama, out)
    out.rename(tmp_path / ".out.replaced")
    (tmp_path / ".out.partial").mkdir()
    with pytest.raises(ValueError, match="found another"):
        HfExporter(overwrite=False, trust_remote_code=False).export(two, tiny_llama, out)
    assert sha256_file(out / "model.safetensors") == first.files["model.safetensors"], "the old one is back"
    second = HfExporter(overwrite=True, trust_remote_code=False).export(two, tiny_llama, out)
    assert sha256_file(out / "model.safetensors") == second.files["model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "out"}


def test_a_writer_that_damages_what_it_writes_is_noticed(
    checkpoint_of: Make, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = hf._write

    def damaging(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        changed = dict(tensors)
        changed["fc.weight"] = changed["fc.weight"].clone()
        changed["fc.weight"][0, 0] += 1e-7
        write(folder, config, changed)

    monkeypatch.setattr(hf, "_write", damaging)
    with pytest.raises(ValueError, match=r"expected fc.weight in the file as it was written"):
        HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint_of(tiny_llama, word="mtp"), tiny_llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_manifest_states_what_was_proven(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path) -> None:
    result = HfExporter(overwrite=False, trust_remote_code=False).export(
        checkpoint_of(tiny_llama, word="mtp"), tiny_llama, tmp_path / "out"
    )
    document = json.loads((result.path / MANIFEST).read_text())
    assert set(document["files"]) == {"config.json", "model.safetensors", "README.md"}
    assert document["proof"]["largest_difference"]["logits"] <= document["proof"]["tolerance"]
    assert document["proof"]["least_effect_of_a_tensor"][1] > 1e-5
    modes = {path.stat().st_mode for path in result.path.iterdir()}
    assert len(modes) == 1, "weights are as readable as the rest"
    assert all(document["files"][name] == sha256_file(result.path / name) for name in document["files"])


def test_unrolled_rows_do_not_see_one_another(checkpoint_of: Make, tiny_llama: Path, tmp_path: Path) -> None:
    """Depth k of base i must be the same whatever tokens lie beyond i + 1 + k: the mask lets no later base in."""
    checkpoint = checkpoint_of(tiny_llama, word="mtp")
    graph = load_exported(
        HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out").path, target_path=tiny_llama
    )
    sample = read_probe(checkpoint)[0]
    whole = list(graph.unroll(token_ids_T=sample.token_ids_T, hidden_TD=sample.hidden_TD, num_depths=3))
    for length, depth in itertools.product((5, 9), range(3)):
        cut = list(graph.unroll(token_ids_T=sample.token_ids_T[:length], hidden_TD=sample.hidden_TD[:length], num_depths=3))
        rows = length - 1 - depth
        assert torch.allclose(cut[depth].logits_TV[:rows], whole[depth].logits_TV[:rows], atol=1e-4), (length, depth)
