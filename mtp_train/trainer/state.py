"""The state of a training run on disk: all that a killed run needs to go on as if it had not been killed.

``<checkpoint>/step-000123/`` is itself a head (``head.safetensors``, ``head.json``) with ``optimizer.safetensors`` and
``random.safetensors`` beside it. ``state.json``, written last, names the files with their sha256; a folder without it was
never finished. The folder is filled under a temporary name and renamed, so that it is seen whole or not at all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtp_train.checkpoint import read_head_tensors, save_head
from mtp_train.runtime import atomic_path, atomic_write_json, fsync_directory, read_json, sha256_file

FORMAT_VERSION = 1
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
_FOLDER = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class HeadFile:
    """What ``checkpoint.save_head`` writes beside the weights."""

    config: Mapping[str, Any]
    target: Mapping[str, Any]
    made_by: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class State:
    """A training run between two steps. ``step`` steps are done. ``weights`` and ``optimizer`` by parameter name,
    float32; ``random`` the generators' states by rank; ``settings`` what a continuation must share; ``counters`` what
    the loop counts (plain JSON)."""

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    random: dict[str, torch.Tensor]
    settings: dict[str, Any]
    counters: dict[str, Any]


def folder_name(step: int) -> str:
    """The folder of the state after ``step`` steps."""
    return f"step-{step:06d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps whose state is complete, ascending."""
    if not folder.is_dir():
        return []
    matches = (_FOLDER.fullmatch(entry.name) for entry in folder.iterdir() if (entry / STATE).is_file())
    return sorted(int(match.group(1)) for match in matches if match)


def write_state(folder: Path, state: State, *, head: HeadFile) -> Path:
    """Write a state and return its folder; one that is there already is left as it is."""
    from safetensors.torch import save_file

    final = folder / folder_name(state.step)
    if (final / STATE).is_file():
        return final
    temporary = folder / f".{folder_name(state.step)}.tmp"
    for leftover in (temporary, final):
        if leftover.exists():
            shutil.rmtree(leftover)
    save_head(temporary, state.weights, config=head.config, target=head.target, made_by=head.made_by)
    for name, tensors in ((OPTIMIZER, state.optimizer), (RANDOM, state.random)):
        with atomic_path(temporary / name) as path:
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
    atomic_write_json(
        temporary / STATE,
        {
            "format_version": FORMAT_VERSION,
            "step": state.step,
            "counters": state.counters,
            "settings": state.settings,
            "sha256": {name: sha256_file(temporary / name) for name in (OPTIMIZER, RANDOM)},
        },
    )
    temporary.rename(final)
    fsync_directory(folder)
    return final


def read_state(path: Path) -> State:
    """Read the state in a ``step-...`` folder, every file checked against its sha256."""
    from safetensors.torch import load_file

    document = read_json(path / STATE)
    if document.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path / STATE}: expected format_version {FORMAT_VERSION}, found {document.get('format_version')}; train anew")
    for name, expected in document["sha256"].items():
        found = sha256_file(path / name)
        if found != expected:
            raise ValueError(
                f"{path / name}: expected sha256 {expected}, found {found}; the file is damaged: "
                f"delete {path} to continue from the state before"
            )
    return State(
        step=document["step"],
        weights=read_head_tensors(path),
        optimizer=load_file(path / OPTIMIZER),
        random=load_file(path / RANDOM),
        settings=document["settings"],
        counters=document["counters"],
    )


def check_continues(folder: Path, settings: Mapping[str, Any]) -> None:
    """ValueError where ``folder`` holds a training that was begun with other settings; reads no weights, writes nothing."""
    steps = complete_steps(folder)
    if steps:
        path = folder / folder_name(steps[-1])
        check_settings(settings, read_json(path / STATE)["settings"], where=path)


def check_settings(expected: Mapping[str, Any], found: Mapping[str, Any], *, where: Path) -> None:
    """Refuse to continue under other settings; ValueError lists each that differs, with both values."""
    mine, theirs = _flat(expected), _flat(found)
    lines = [
        f"  {key}: begun with {theirs.get(key, 'nothing')!r}, now {mine.get(key, 'nothing')!r}"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key, "nothing") != theirs.get(key, "nothing")
    ]
    if lines:
        raise ValueError(
            f"{where}: this training was begun with other settings:\n"
            + "\n".join(lines)
            + "\nset them back to continue it, or choose another name= to begin anew"
        )


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        flat.update(_flat(entry, f"{prefix}{key}.") if isinstance(entry, Mapping) else {f"{prefix}{key}": entry})
    return flat


def prune(folder: Path, *, keep_last: int, keep: set[int]) -> None:
    """Delete all complete states but the ``keep_last`` newest and those in ``keep``, and what killed writers left."""
    steps = complete_steps(folder)
    for step in steps[: max(0, len(steps) - keep_last)]:
        if step not in keep:
            # Unmark first: a half deleted folder must not look complete.
            (folder / folder_name(step) / STATE).unlink()
            shutil.rmtree(folder / folder_name(step))
    for leftover in folder.glob(".step-*.tmp"):
        shutil.rmtree(leftover)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, torch.Tensor]:
    """An optimizer's state as tensors by ``<parameter>/<entry>``; ``names`` gives each parameter's name."""
    return {f"{name}/{entry}": tensor for parameter, name in names.items() for entry, tensor in optimizer.state[parameter].items()}


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put back what ``optimizer_tensors`` gave, in place of whatever the optimizer holds."""
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, entry = key.rsplit("/", 1)
        by_name.setdefault(name, {})[entry] = tensor
    parameters = {name: parameter for parameter, name in names.items()}
    if by_name.keys() != parameters.keys():
        raise ValueError(f"optimizer state: expected the parameters {sorted(parameters)}, found {sorted(by_name)}; it is of another head")
    for name, held in by_name.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {entry: tensor.to(parameter.device).clone() for entry, tensor in held.items()}
