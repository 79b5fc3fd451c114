"""What a target is: sizes, identity, and what a layer's id means to us and to the engines."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_train.runtime import atomic_write_json, log, read_object
from mtp_train.target.files import read_model_config, tensor_files
from mtp_train.target.weights import EMBEDDING, FINAL_NORM
from mtp_train.typed import fit

_FINGERPRINT_CACHE = ".mtp_train_fingerprint.json"
_LARGE_BYTES = 2 * 1024**3  # hashing takes long enough from here on to say so

# A head reads the target's embedding rows and lm_head as they are stored. Models that have Llama's tensor names but
# compute otherwise with them would get a head that trains on wrong numbers without a word.
_OTHER_ARITHMETIC = {
    "gemma": "scales its embedding by sqrt(hidden_size) and multiplies its norms by 1 + weight",
    "qwen3_next": "multiplies its norms by 1 + weight",
    "qwen3_5": "multiplies its norms by 1 + weight",
}
_NEEDED: dict[str, Any] = {
    "model_type": str,
    "hidden_size": int,
    "num_hidden_layers": int,
    "vocab_size": int,
    "num_attention_heads": int,
    "intermediate_size": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
}
_SCALED_BY = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "scale_emb": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}


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


def default_tap_ids(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 heads tap where nothing else is said: low, middle and high, as the engines choose them (their ids
    2, N / 2 and N - 3 are ours plus one).

    Errors: ValueError where the target has too few layers for three different ones.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if num_layers < 7:
        raise ValueError(
            f"target_layer_ids: expected ids for a target of {num_layers} layers, found null, which needs 7 at least; name them"
        )
    return ids


def vllm_layer_id(target_layer_id: int) -> int:
    """vLLM's id of the same state: the residual stream after i + 1 layers."""
    return target_layer_id + 1


def transformers_hidden_index(target_layer_id: int, *, num_layers: int) -> int:
    """Index into transformers' ``hidden_states``. ValueError for the last layer, whose entry there is post-norm."""
    if target_layer_id == num_layers - 1:
        raise ValueError(
            f"target_layer_id {target_layer_id}: transformers' last hidden_states entry is after the final norm; "
            "take the state before it with a forward hook"
        )
    return target_layer_id + 1


def read_spec(path: Path, *, name: str) -> TargetSpec:
    """Read a target's spec from its folder, without building the model.

    Errors: ValueError where the model is not a Llama-shaped decoder (``model.layers``, ``model.norm``,
    ``model.embed_tokens``) or a size is missing.
    """
    config = read_model_config(path)
    files = tensor_files(path)
    if reason := _unlike_llama(config, set(files)):
        raise ValueError(
            f"{path}: expected a Llama-shaped decoder (heads share its embedding, final RMSNorm and lm_head as stored), "
            f"found model_type {config.get('model_type')!r}, which {reason}; choose another target"
        )
    for key, kind in _NEEDED.items():
        fit(kind, config[key], f"{path / 'config.json'}: {key}")
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


def _unlike_llama(config: dict[str, Any], tensors: set[str]) -> str | None:
    """Why a head cannot share this model's weights; None where it can."""
    for needed in (EMBEDDING, FINAL_NORM, "model.layers.0.input_layernorm.weight"):
        if needed not in tensors:
            return f"has no tensor {needed}"
    for refused in ("model.norm.bias", "lm_head.bias"):
        if refused in tensors:
            return f"has a tensor {refused}"
    missing = [key for key in _NEEDED if config.get(key) is None]
    if missing:
        return f"has no {', '.join(missing)} in its config.json"
    for family, why in _OTHER_ARITHMETIC.items():
        if str(config["model_type"]).startswith(family):
            return why
    for key, neutral in _SCALED_BY.items():
        if config.get(key, neutral) not in (neutral, None):
            return f"has {key} = {config[key]} in its config.json"
    return None


def fingerprint(path: Path) -> str:
    """sha256 over the weight files' bytes, in the order of their names.

    Remembered beside the weights with each file's size and time of change, so that 140 GB are hashed once; a folder
    that cannot be written to is hashed every time.
    """
    files = sorted(set(tensor_files(path).values()))
    sizes = [file.stat().st_size for file in files]
    state = [[file.name, size, file.stat().st_mtime_ns] for file, size in zip(files, sizes, strict=True)]
    remembered = path / _FINGERPRINT_CACHE
    if remembered.is_file():
        known = _remembered(remembered)
        if known.get("files") == state:
            return str(known["sha256"])
    if (total := sum(sizes)) > _LARGE_BYTES:
        log(f"hashing {total / 1e9:.0f} GB of weights in {path} (once)")
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            digest.update(json.dumps([file.name, hashlib.file_digest(stream, "sha256").hexdigest()]).encode())
    try:
        atomic_write_json(remembered, {"files": state, "sha256": digest.hexdigest()})
    except OSError:
        return digest.hexdigest()
    return digest.hexdigest()


def _remembered(path: Path) -> dict[str, Any]:
    """The hashes remembered from an earlier run; none where the file is damaged: the weights are hashed again."""
    try:
        return read_object(path, {"files": list, "sha256": str}, remedy="the weights are hashed again")
    except ValueError as fault:
        log(str(fault))
        return {}


def quantization_of(path: Path) -> str | None:
    """The scheme that a target's ``config.json`` states, as a cache's identity states it; None for none.

    The method and its format or bits, such as ``compressed-tensors int-quantized`` or ``awq 4``; the weights themselves
    are in the fingerprint. Errors: ValueError where a scheme doesn't name its method.
    """
    found = read_model_config(path).get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("quant_method"), str):
        raise ValueError(f"{path / 'config.json'}: expected quantization_config to name its quant_method, found {found!r}")
    details = [str(found[key]) for key in ("format", "bits") if found.get(key) is not None]
    return " ".join([found["quant_method"], *details])
