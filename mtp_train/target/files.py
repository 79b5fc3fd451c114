"""Finds a model folder's safetensors files and reads single tensors from them, without building the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mtp_train.runtime import read_json, read_object

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_model_config(path: Path) -> dict[str, Any]:
    """A model folder's ``config.json``. ValueError where there is none."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: expected a model folder in transformers' layout (config.json and safetensors), found no config.json")
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'}: expected a JSON object, found {type(config).__name__}")
    return config


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it.

    Errors: ValueError where the folder has no safetensors, or its index names a file outside the folder.
    """
    from safetensors import safe_open

    if (path / _INDEX).is_file():
        weight_map = read_object(path / _INDEX, {"weight_map": dict}, remedy="download it again")["weight_map"]
        for file in set(weight_map.values()):
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{path / _INDEX}: expected names of safetensors files in this folder, found {file!r}")
            if not (path / file).is_file():
                raise ValueError(f"{path / file}: named in {_INDEX}, expected a file, found none; the download is not complete")
        return {name: path / file for name, file in weight_map.items()}
    if (path / _SINGLE).is_file():
        with _whole(path / _SINGLE), safe_open(path / _SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), path / _SINGLE)
    found = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    raise ValueError(
        f"{path}: expected {_SINGLE} or {_INDEX}, found {found or 'no weights'}; "
        "only safetensors are read: convert with transformers' save_pretrained"
    )


def read_tensor(files: dict[str, Path], name: str) -> torch.Tensor:
    """One tensor, memory-mapped from its file. ValueError where no file holds it."""
    from safetensors import safe_open

    if name not in files:
        near = [known for known in files if known.split(".")[-2:] == name.split(".")[-2:]][:5]
        raise ValueError(f"weights: expected a tensor named {name}, found none (alike: {near}); heads need a Llama-shaped target")
    with _whole(files[name]), safe_open(files[name], framework="pt") as opened:
        return opened.get_tensor(name)


@contextmanager
def _whole(file: Path) -> Iterator[None]:
    """ValueError where what is read in the block is cut off or damaged."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: expected a whole safetensors file, found {error}; download it again") from error
