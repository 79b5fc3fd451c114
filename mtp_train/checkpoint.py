"""A head on disk: ``head.safetensors`` (float32 weights, integers as they are) and ``head.json`` (what rebuilds and identifies it)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtp_train.runtime import atomic_path, atomic_write_json, log, read_object, sha256_file
from mtp_train.typed import nearest

FORMAT_VERSION = 1
WEIGHTS = "head.safetensors"
CONFIG = "head.json"
_KINDS: dict[str, Any] = {
    "format_version": int,
    "head": str,
    "method": str,
    "hidden_state": Any,
    "settings": dict,
    "target": dict,
    "made_by": dict,
    "weights_sha256": str,
}


def save_head(
    path: Path, tensors: Mapping[str, torch.Tensor], *, config: Mapping[str, Any], target: Mapping[str, Any], made_by: Mapping[str, Any]
) -> None:
    """Write a head into the folder ``path``: weights first, ``head.json`` with their sha256 last (= complete).

    ``config`` is ``Head.draft_config()``; ``target`` the identity of the target that it was trained on (name,
    fingerprint, tokenizer, the model config); ``made_by`` provenance and training settings.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    with atomic_path(path / WEIGHTS) as temporary:
        save_file({name: _stored(tensor) for name, tensor in tensors.items()}, temporary)
    document = {"format_version": FORMAT_VERSION, **config, "target": dict(target), "made_by": dict(made_by)}
    atomic_write_json(path / CONFIG, {**document, "weights_sha256": sha256_file(path / WEIGHTS)})


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).contiguous()


def read_head_config(path: Path) -> dict[str, Any]:
    """Read and check ``head.json``.

    Errors: ValueError where the folder holds no head, a field is missing or of another type, or the format is of another
    version.
    """
    if not (path / CONFIG).is_file():
        there = sorted(found.parent.name for found in path.parent.glob(f"*/{CONFIG}"))
        others = f"{nearest(path.name, there)}heads there: {', '.join(there)} (name=); or " if there else ""
        raise ValueError(
            f"{path}: expected a head ({CONFIG} and {WEIGHTS}), found no {CONFIG}; {others}run train first, or point checkpoint= at a "
            "head's folder"
        )
    document = read_object(path / CONFIG, _KINDS, remedy="it is damaged, or was not written by mtp-train: restore it, or train again")
    if document["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path / CONFIG}: expected format_version {FORMAT_VERSION}, found {document['format_version']}; retrain or convert the head"
        )
    if document["hidden_state"] not in ("post_norm", "pre_norm"):
        raise ValueError(f"{path / CONFIG}: expected hidden_state post_norm or pre_norm, found {document['hidden_state']!r}")
    return document


def check_head(config: Mapping[str, Any], identity: Mapping[str, str], *, where: Path) -> None:
    """ValueError where a head (its ``head.json``) was trained on another target, tokenizer or chat template than that of ``identity``
    (``OpenTarget.identity``)."""
    if config["hidden_state"] != "post_norm":
        raise ValueError(
            f"{where}: expected a head that reads post_norm hidden states (what the lm_head reads), found {config['hidden_state']!r}; "
            "train one here: another state is not handed out"
        )
    stated = config["target"]
    for key, expected in identity.items():
        found = str(stated.get(key, "not stated"))
        if key != "target_name" and found != expected:
            raise ValueError(
                f"{where}: expected a head of this target ({identity['target_name']}, {key} {expected[:16]}), found one trained on "
                f"{stated.get('target_name')} ({key} {found[:16]}); choose that target, or train a head for this one"
            )


def read_head_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a head's weights, checked against the sha256 that ``head.json`` states. ValueError where they are not those."""
    return read_tensors(path / WEIGHTS, sha256=read_head_config(path)["weights_sha256"], remedy="copy it again, or train again")


def is_whole(path: Path) -> bool:
    """Whether the folder holds a head, undamaged: a training that is done makes one that is not anew from its state."""
    if not (path / CONFIG).is_file():
        return False
    try:
        read_head_tensors(path)
    except ValueError as fault:
        log(str(fault))
        return False
    return True


def read_tensors(path: Path, *, sha256: str, remedy: str) -> dict[str, torch.Tensor]:
    """A safetensors file of these very bytes; ValueError, with the remedy, for any other."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ValueError(f"{path}: expected a file of sha256 {sha256}, found none; {remedy}")
    if (found := sha256_file(path)) != sha256:
        raise ValueError(f"{path}: expected sha256 {sha256}, found {found}; the file is damaged or another: {remedy}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: expected safetensors, found another format ({error}); pickles are not read: {remedy}") from error


def check_states(path: Path, *, stated: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """ValueError unless ``head.json`` states what the head rebuilt from it and the weights says of itself (``draft_config``):
    a draft vocabulary of other tokens would be noticed by nothing else."""
    for key, value in found.items():
        if stated.get(key) != value:
            raise ValueError(
                f"{path}: expected {CONFIG} and {WEIGHTS} to agree on {key}, found {stated.get(key)} and {value}; "
                "they are of different heads: copy the folder again, or train anew"
            )
