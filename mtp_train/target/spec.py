"""What a target is: sizes, identity, and what a layer's id means to us and to the engines."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_train.runtime import atomic_write_json, read_json
from mtp_train.target.files import read_model_config, tensor_files
from mtp_train.target.weights import EMBEDDING, FINAL_NORM

_FINGERPRINT_CACHE = ".mtp_train_fingerprint.json"


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Sizes and identity of a target. ``fingerprint`` is a sha256 over its weight files' bytes."""

    name: str
    model_type: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rms_norm_eps: float
    tied: bool
    max_positions: int
    dtype: str
    fingerprint: str

    def check_layer_ids(self, target_layer_ids: tuple[int, ...]) -> None:
        """ValueError unless every id names a decoder layer: i is the output of layer i, 0-based, before the final norm."""
        wrong = [i for i in target_layer_ids if not 0 <= i < self.num_layers]
        if wrong or len(set(target_layer_ids)) != len(target_layer_ids):
            raise ValueError(
                f"target_layer_ids: expected different ids from 0 to {self.num_layers - 1} (output of layer i, before the final norm), "
                f"found {list(target_layer_ids)}"
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def vllm_layer_id(target_layer_id: int) -> int:
    """vLLM's id of the same state: the residual stream after i + 1 layers."""
    return target_layer_id + 1


def transformers_hidden_index(target_layer_id: int, *, num_layers: int) -> int:
    """Index into transformers' ``hidden_states``. ValueError for the last layer, whose entry there is post-norm."""
    if target_layer_id == num_layers - 1:
        raise ValueError(
            f"target_layer_id {target_layer_id}: transformers' last hidden_states entry is after the final norm; take the state before it with a forward hook"
        )
    return target_layer_id + 1


def read_spec(path: Path, *, name: str) -> TargetSpec:
    """Read a target's spec from its folder, without building the model.

    Errors: ValueError where the model is not a Llama-shaped decoder (``model.layers``, ``model.norm``,
    ``model.embed_tokens``) or a size is missing.
    """
    config = read_model_config(path)
    files = tensor_files(path)
    for needed in (EMBEDDING, FINAL_NORM):
        if needed not in files:
            raise ValueError(
                f"{path}: expected a Llama-shaped decoder with a tensor {needed}, found model_type {config.get('model_type')!r} without it; "
                "this architecture is not supported"
            )
    missing = [
        key for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "rms_norm_eps") if key not in config
    ]
    if missing:
        raise ValueError(f"{path / 'config.json'}: expected the keys of a Llama-shaped decoder, found none named {missing}")
    heads = int(config["num_attention_heads"])
    return TargetSpec(
        name=name,
        model_type=str(config["model_type"]),
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        hidden_size=int(config["hidden_size"]),
        num_layers=int(config["num_hidden_layers"]),
        vocab_size=int(config["vocab_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate_size=int(config["intermediate_size"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        tied="lm_head.weight" not in files if config.get("tie_word_embeddings") is None else bool(config["tie_word_embeddings"]),
        max_positions=int(config["max_position_embeddings"]),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        fingerprint=fingerprint(path),
    )


def fingerprint(path: Path) -> str:
    """sha256 over the weight files' bytes, in the order of their names.

    Remembered beside the weights with each file's size and time of change, so that 140 GB are hashed once; a folder
    that cannot be written to is hashed every time.
    """
    files = sorted(set(tensor_files(path).values()))
    state = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    remembered = path / _FINGERPRINT_CACHE
    if remembered.is_file():
        known = read_json(remembered)
        if known.get("files") == state:
            return str(known["sha256"])
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            digest.update(json.dumps([file.name, hashlib.file_digest(stream, "sha256").hexdigest()]).encode())
    try:
        atomic_write_json(remembered, {"files": state, "sha256": digest.hexdigest()})
    except OSError:
        return digest.hexdigest()
    return digest.hexdigest()
