"""A cut model computes what its layers compute in the model that they came from, and can be trained on as a draft model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtp_train.target.cut import write_cut_model
from tests.conftest import write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("layers", [[0, 3], [1], [0, 1, 2, 3]])
def test_the_layers_compute_what_they_did(tmp_path: Path, layers: list[int]) -> None:
    from transformers import AutoModelForCausalLM

    source = write_tiny_llama(tmp_path / "source", num_layers=4)
    out = write_cut_model(source, tmp_path / "out", layers=layers)
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    whole, cut = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (source, out))
    assert len(cut.model.layers) == len(layers)
    with torch.inference_mode():
        full = whole(ids).logits
        kept = torch.nn.ModuleList(whole.model.layers[layer] for layer in layers)
        for number, layer in enumerate(kept):
            layer.self_attn.layer_idx = number
        whole.model.layers = kept
        expected, found = whole(ids, use_cache=False).logits, cut(ids, use_cache=False).logits
    assert torch.equal(expected, found)
    assert torch.equal(full, found) == (len(layers) == 4)


def test_the_command_writes_it_once_and_refuses_plainly(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", num_layers=4)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tools" / "cut_model.py"), "--target", "local", f"path={source}"]
        command += ["--out", str(tmp_path / "out"), *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    done = call("--layers", "0", "3")
    assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "out"), done.stderr
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert call("--layers", "0", "3").returncode == 0 and (tmp_path / "out" / "model.safetensors").read_bytes() == before
    refused = call("--layers", "0", "4")
    assert refused.returncode == 2 and "expected some of 0 to 3, each once and rising, found [0, 4]" in refused.stderr
    assert "Traceback" not in refused.stderr
    with pytest.raises(ValueError, match="rising"):
        write_cut_model(source, tmp_path / "other", layers=[3, 0])
