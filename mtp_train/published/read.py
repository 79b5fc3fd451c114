"""Reads a published head as ours: its tensors under our names, and the settings that its graph calls for.

A head has a folder of its own, in safetensors or as ``pytorch_model.bin`` (read with ``weights_only=True``), or lies inside the
target's checkpoint, of which only its tensors are read. Whatever is neither the head's, nor a copy of the target's, nor follows
from the config is refused by name, as is what is missing.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_train.checkpoint import CONFIG, read_head_config, read_head_tensors
from mtp_train.nn.experts import stack_experts, unstack_experts
from mtp_train.published.layout import Layout, find_layout
from mtp_train.runtime import log
from mtp_train.target.draft_vocabulary import from_mask, from_offsets
from mtp_train.target.files import read_model_config, read_tensor, tensor_files
from mtp_train.target.spec import default_tap_ids, fingerprint
from mtp_train.target.weights import SharedWeights
from mtp_train.typed import fit

OURS = "mtp_train"
PICKLE = "pytorch_model.bin"
DRAFT_IDS, D2T, T2D = "draft_ids", "d2t", "t2d"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = "decoder.layer."
# Settings of ours that say what the weights began as, and nothing of the graph.
_BEGINNINGS = ("init", "seed", "checkpoint", "revision")
# How files begin that torch wrote before version 1.6, a pickled magic number: they cannot be mapped into memory.
_BEFORE_ZIP = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
# Copies of the target's tensors may have been rounded to another 16-bit dtype; another model's differ by as much as they are large.
_ROUNDING = 0.02
_ROWS = 8192  # of a copy, compared at once


@dataclass(frozen=True, kw_only=True)
class Published:
    """A head on disk. ``names``: its tensors there, ``read`` gives one; ``settings``: what a head of ours must be built with, for the
    same drafts. ``layout`` None: it is one of ours (``head.json``), whose names are ours."""

    path: Path
    layout: Layout | None
    word: str
    heads: tuple[str, ...]
    names: tuple[str, ...]
    read: Callable[[str], torch.Tensor]
    settings: Mapping[str, Any]

    def check(self, *, head: str, settings: Mapping[str, Any]) -> None:
        """ValueError unless a head of this word with these settings computes what this one does."""
        if head not in self.heads:
            raise ValueError(f"{self.path}: expected a head that head={head} can begin as, found {self.word}; choose head={self.heads[0]}")
        odd = {key: value for key, value in self.settings.items() if settings.get(key) != value}
        if odd:
            found = ", ".join(f"head.{key}={_shown(settings.get(key))}" for key in odd)
            remedy = " ".join(f"head.{key}={_shown(value)}" for key, value in odd.items())
            raise ValueError(f"{self.path}: expected the settings of this head ({self.word}), found {found}; set {remedy}")

    def tensors(self, expected: Mapping[str, torch.Tensor], *, column_order: str | None, shared: SharedWeights) -> dict[str, torch.Tensor]:
        """The head's tensors as ours, in float32, those of ``expected`` (a head's ``state_dict``) in name and shape.

        Errors: ValueError that names tensors of no row in the table, those missing, those of another shape, and quantized ones.
        """
        if self.layout is None:
            found = {name: self.read(name) for name in self.names}
        else:
            found = self._renamed(self.layout, column_order=column_order)
            self._compare_copies(self.layout, shared)
            if D2T in self.names:
                found[DRAFT_IDS] = self._draft_ids(vocab_size=shared.embedding_VD.shape[0])
        self._check_shapes(expected, found)
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}

    def stored_names(self, ours: Mapping[str, torch.Tensor], *, column_order: str | None) -> dict[str, torch.Tensor]:
        """A head's tensors as they lie in this layout: ``tensors`` undone."""
        assert self.layout is not None
        stored = {}
        for name, tensor in _by_layer(_in_order(ours, self.layout, column_order), unstack_experts).items():
            theirs = self.layout.theirs(name)
            if theirs is None:
                raise ValueError(f"{self.path}: expected tensors that {self.word} holds, found the head's {name}; it is of another graph")
            stored[theirs] = tensor
        return stored

    def _renamed(self, layout: Layout, *, column_order: str | None) -> dict[str, torch.Tensor]:
        found = {}
        for name in self.names:
            if not layout.holds(name) or name in (D2T, T2D):
                continue
            ours = layout.ours(name)
            if ours is None:
                raise ValueError(
                    f"{self.path}: expected tensors of {self.word}, found {name}, which it does not have; nothing is left out unread"
                )
            found[ours] = self.read(name)
            self._check_numbers(name, found[ours])
        return _in_order(_by_layer(found, stack_experts), layout, column_order)

    def _check_numbers(self, name: str, tensor: torch.Tensor) -> None:
        """ValueError unless a tensor holds finite floats, each in its place."""
        if tensor.dtype not in _FLOATS or tensor.layout != torch.strided:
            found = f"{tensor.dtype}, quantized" if tensor.layout == torch.strided else f"a {tensor.layout} one"
            raise ValueError(
                f"{self.path}: expected {name} in float32, bfloat16 or float16, found {found}; "
                "begin from a checkpoint whose head is in floats"
            )
        if num_odd := tensor.numel() - int(tensor.isfinite().sum()):
            raise ValueError(
                f"{self.path}: expected finite numbers in {name}, found {num_odd} of {tensor.numel()} infinite or none; "
                "its training broke, or the file is damaged: get it anew"
            )

    def _check_shapes(self, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
        shapes, there = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (expected, found))
        odd = [name for name in sorted(shapes.keys() | there.keys()) if shapes.get(name) != there.get(name)]
        if odd:
            said = [f"{self._named(name)} {shapes.get(name, 'absent')}, found {there.get(name, 'none')}" for name in odd[:4]]
            raise ValueError(
                f"{self.path}: expected the tensors of this target's own decoder layer and sizes ({'; '.join(said)}); "
                f"{len(odd)} differ: the head is of another target, or its layer is not the target's"
            )

    def _named(self, ours: str) -> str:
        """What the file calls a tensor."""
        return ours if self.layout is None else self.layout.theirs(ours) or ours

    def _draft_ids(self, *, vocab_size: int) -> torch.Tensor:
        """The draft vocabulary, which ``t2d`` must agree with where it is there."""
        try:
            ids_U = from_offsets(self.read(D2T), vocab_size=vocab_size)
        except ValueError as fault:
            raise ValueError(f"{self.path}: {fault}") from None
        if not bool((ids_U.diff() > 0).all()):
            raise ValueError(f"{self.path}: expected d2t to name ascending tokens, found others; such a head is not supported")
        if T2D in self.names and not torch.equal(from_mask(self.read(T2D)), ids_U):
            raise ValueError(f"{self.path}: expected d2t and t2d to name the same tokens, found others; the file is damaged")
        return ids_U

    def _compare_copies(self, layout: Layout, shared: SharedWeights) -> None:
        """Say where the head was trained beside other embeddings than this target's: it reads these from now on."""
        for name, what in layout.copies.items():
            if name not in self.names:
                continue
            copy_VD = self.read(name)
            own_VD = shared.embedding_VD if what == "embedding" else shared.lm_head_VD
            if copy_VD.shape != own_VD.shape:
                raise ValueError(f"{self.path}: expected {name} of the target's shape {tuple(own_VD.shape)}, found {tuple(copy_VD.shape)}")
            pieces = zip(copy_VD.split(_ROWS), own_VD.split(_ROWS), strict=True)
            largest = max(float((copy.float() - own.cpu().float()).abs().max()) for copy, own in pieces)
            apart = largest / float(own_VD.abs().max())
            if not apart <= _ROUNDING:
                log(f"{self.path}: {name} is not this target's {what} (up to {apart:.0%} apart): the head was trained for another model")


def open_published(path: Path, *, target_path: Path) -> Published:
    """Look at the head in a folder: one of ours, a published one, or the target's own block where it is the target's folder.

    Errors: ValueError where there is no head of a layout that is known.
    """
    if (path / CONFIG).is_file():
        return _open_ours(path, target_path)
    if not path.is_dir():
        raise ValueError(f"start_from: expected a head's folder, or the word target, found none at {path}")
    target = read_model_config(target_path)
    names, read = _reader(path)
    own = read_model_config(path) if (path / "config.json").is_file() else {}
    try:
        layout = find_layout(names, num_layers=_stated(own, "num_hidden_layers", int | None, where=path))
    except ValueError as fault:
        raise ValueError(f"{path}: {fault}") from None
    if layout is None:
        raise ValueError(
            f"{path}: expected the tensors of one of ours (head.json), EAGLE-1 (fc, layers.0), EAGLE-3 (midlayer, hidden_norm), or of the "
            "block of DeepSeek-V3 (model.layers.N.eh_proj) or Qwen3-Next (mtp.fc), found none of these"
        )
    if own and (mine := _rotary(own, where=path)) != (theirs := _rotary(target, where=target_path)):
        log(f"{path}: its rotary settings {mine} are not the target's {theirs}, which are taken: its drafts begin worse than they were")
    if layout.word == "eagle3":
        settings = _eagle3_settings(path, names, read, own, target)
    else:
        settings = {"norms": dict(layout.norms or {}), "zero_first_embedding": layout.zero_first_embedding, "num_blocks": layout.num_blocks}
        settings |= {"projection_bias": layout.theirs("projection.bias") in names}
    return Published(path=path, layout=layout, word=layout.word, heads=layout.heads, names=tuple(names), read=read, settings=settings)


def sha256_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names and bytes, for what a training began from."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _open_ours(path: Path, target_path: Path) -> Published:
    document = read_head_config(path)
    if document["target"].get("target_fingerprint") != fingerprint(target_path):
        log(f"{path}: the head was trained for {document['target'].get('target_name')}, not for this target: its drafts begin worse")
    tensors = read_head_tensors(path)
    settings = {key: value for key, value in document["settings"].items() if key not in _BEGINNINGS}
    return Published(
        path=path, layout=None, word=OURS, heads=(document["head"],), names=tuple(tensors), read=tensors.__getitem__, settings=settings
    )


def _reader(path: Path) -> tuple[Sequence[str], Callable[[str], torch.Tensor]]:
    """The names of a folder's tensors, and what reads one."""
    if not (path / PICKLE).is_file() or any(path.glob("*.safetensors")):
        files = tensor_files(path)
        return list(files), lambda name: read_tensor(files, name)
    with open(path / PICKLE, "rb") as stream:
        old = stream.read(len(_BEFORE_ZIP)) == _BEFORE_ZIP
    if not old and not zipfile.is_zipfile(path / PICKLE):
        raise ValueError(f"{path / PICKLE}: expected tensors as torch.save writes them, found something else or a part of it; get it anew")
    try:
        held = torch.load(path / PICKLE, map_location="cpu", weights_only=True, mmap=not old)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path / PICKLE}: expected tensors and nothing else (no code is run), found {said}; it is damaged or holds other things: "
            "get it anew, or as safetensors"
        ) from error
    if not isinstance(held, dict) or not all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in held.items()):
        raise ValueError(f"{path / PICKLE}: expected tensors by their names, found other values; save the head's state_dict alone")
    return list(held), held.__getitem__


def _eagle3_settings(
    path: Path, names: Sequence[str], read: Callable[[str], torch.Tensor], own: Mapping[str, Any], target: Mapping[str, Any]
) -> dict[str, Any]:
    """What an EAGLE-3 folder says of its graph: its config.json, or the authors' choice where it is silent."""
    taps: list[int] = []
    if "fc.weight" in names:
        num_layers, key = int(target["num_hidden_layers"]), "eagle_aux_hidden_state_layer_ids"
        nested = _stated(own, "eagle_config", dict | None, where=path) or {}
        engines = _stated(own, key, list[int] | None, where=path) or _stated(nested, key, list[int] | None, where=path)
        taps = list(default_tap_ids(num_layers)) if engines is None else [number - 1 for number in engines]
        if not all(0 <= tap < num_layers for tap in taps):
            raise ValueError(
                f"{path / 'config.json'}: expected {key} from 1 to {num_layers}, the layers of this target, found {engines}; "
                "the head is of another target"
            )
    if T2D in names and D2T not in names:
        raise ValueError(f"{path}: expected {D2T} beside {T2D}, found none; the file is not whole")
    if D2T in names and (read(D2T).ndim != 1 or read(D2T).dtype not in (torch.int32, torch.int64) or not len(read(D2T))):
        found = f"{read(D2T).dtype} of shape {tuple(read(D2T).shape)}"
        raise ValueError(f"{path}: expected {D2T} as whole numbers, one for each token that can be drafted, found {found}")
    return {
        "target_layer_ids": taps,
        "draft_vocab_size": read(D2T).shape[0] if D2T in names else None,
        "norms": {
            "taps": any(name.startswith("fc_norm.") for name in names),
            "feedback": bool(_stated(own, "norm_output", bool | None, where=path)),
        },
    }


def _stated(config: Mapping[str, Any], key: str, kind: Any, *, where: Path) -> Any:
    """An entry of a folder's config.json, None where it is not there. ValueError where it is of another kind."""
    return fit(kind, config.get(key), f"{where / 'config.json'}: {key}")


def _by_layer(
    tensors: Mapping[str, torch.Tensor], change: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """``change`` applied to the tensors of each block's decoder layer, under their names inside it."""
    found: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, layer, inside = name.partition(_LAYER)
        if layer:
            layers.setdefault(before + layer, {})[inside] = tensor
        else:
            found[name] = tensor
    return found | {prefix + name: tensor for prefix, own in layers.items() for name, tensor in change(own).items()}


def _in_order(tensors: Mapping[str, torch.Tensor], layout: Layout, column_order: str | None) -> dict[str, torch.Tensor]:
    """The tensors with each projection's two halves of columns changed over, where ours and theirs differ; twice is once too many."""
    if layout.column_order == column_order or layout.column_order is None:
        return dict(tensors)
    return {
        name: torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) if name.split(".")[-2:] == ["projection", "weight"] else tensor
        for name, tensor in tensors.items()
    }


def _rotary(config: Mapping[str, Any], *, where: Path) -> dict[str, Any]:
    """A config's rotary settings in one spelling, ours and older ones alike."""
    stated_as = ("rope_parameters", "rope_scaling")
    given: dict[str, Any] = next((found for key in stated_as if (found := _stated(config, key, dict | None, where=where))), {})
    settings = {key: value for key, value in given.items() if key not in ("rope_theta", "rope_type", "type")}
    theta = next((found for stated in (given, config) if (found := _stated(stated, "rope_theta", float | None, where=where))), 10000.0)
    return {"rope_theta": theta, "type": given.get("rope_type") or given.get("type") or "default", **settings}


def _shown(value: Any) -> str:
    """A setting as one types it."""
    if isinstance(value, Mapping):
        return "'{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}'"
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value).replace(" ", "")
