"""Writes a model folder whose weights are made from another's: whole or not at all, its tokenizer and templates copied."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from mtp_train.runtime import atomic_write_json, fsync_directory

WEIGHTS = "model.safetensors"


def is_there(out: Path) -> bool:
    """True where ``out`` is such a folder already, False where nothing is. ValueError where something else stands there."""
    if not out.exists():
        return False
    if (out / WEIGHTS).is_file():
        return True
    raise ValueError(f"{out}: expected a model folder or nothing, found something else; choose another folder")


def write_model_folder(out: Path, *, source: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """Write ``tensors`` and ``config`` (a config.json's entries) to the folder ``out``, with ``source``'s tokenizer beside them."""
    from safetensors.torch import save_file

    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for path in source.iterdir():
            kept = path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.startswith(".") and "safetensors" not in path.name
            if kept and path.is_file():
                shutil.copyfile(path, scratch / path.name)
        save_file(dict(tensors), scratch / WEIGHTS, metadata={"format": "pt"})
        atomic_write_json(scratch / "config.json", dict(config))
        fsync_directory(scratch)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    fsync_directory(out.parent)
    return out
