"""A target with enough layers for EAGLE-3's three taps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="session")
def deep_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with its second layer seven times."""
    path = tmp_path_factory.mktemp("deep") / "llama"
    shutil.copytree(tiny_llama, path, ignore=shutil.ignore_patterns(".*"))
    tensors = load_file(path / "model.safetensors")
    again = {
        name.replace(".1.", f".{layer}.", 1): tensor.clone() for name, tensor in tensors.items() for layer in range(2, 8) if ".1." in name
    }
    save_file({**tensors, **again}, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}))
    return path
