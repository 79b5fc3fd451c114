"""The state of a training run on disk: all that a killed run needs to go on as if it had not been killed.

``<checkpoint>/step-000123/`` holds one ``shard-00000-of-00002.safetensors`` per process, with what that process owns: stretches
of parameters and of the optimizer's state (``parameter/<parameter>/<entry>``, float32), and what is its alone
(``own/<name>``): its random generators' states, its part of the sums that are to be reported. ``state.json``, written last and
sealed, names the shards with their sha256 and says where in its parameter each stretch begins. So any number of processes,
however they share the work, can read what is theirs; a folder without it was never finished. The folder is filled under a
temporary name, which no other start of the run uses, and renamed, so that it is seen whole or not at all.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_train.runtime import SEAL, atomic_path, atomic_write_json, check_seal, fsync_directory, read_object, seal, sha256_file

FORMAT_VERSION = 3
STATE = "state.json"
WEIGHT = "weight"
_OWN = "own/"
_PARAMETER = "parameter/"
_FOLDER = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".step-*.tmp"
_KINDS: dict[str, Any] = {
    "format_version": int,
    "step": int,
    "counters": dict,
    "settings": dict,
    "shapes": dict[str, list[int]],
    "shards": list[dict[str, Any]],
    SEAL: str,
}


@dataclass(frozen=True, kw_only=True)
class HeadFile:
    """What ``checkpoint.save_head`` writes beside the weights."""

    config: Mapping[str, Any]
    target: Mapping[str, Any]
    made_by: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of one flattened parameter, from element ``start`` on, with the optimizer's state over the same stretch.

    ``tensors``: ``weight`` and the optimizer's entries, flat and equally long; one number for the whole parameter has no axis.
    """

    start: int
    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        lengths = {name: tensor.shape[0] for name, tensor in self.tensors.items() if tensor.ndim}
        assert all(tensor.ndim <= 1 for tensor in self.tensors.values()) and len(set(lengths.values())) == 1, lengths


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What ``state.json`` says of one process' file: its sha256, and the first element of each of its stretches."""

    name: str
    sha256: str
    starts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Position:
    """A training run between two steps, but for its tensors. ``step`` steps are done. ``shapes`` of the trained parameters;
    ``settings`` what a continuation must share; ``counters`` what the loop counts (plain JSON)."""

    step: int
    shapes: dict[str, tuple[int, ...]]
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


def begin_state(folder: Path, step: int) -> Path:
    """The empty temporary folder in which the processes leave their shards; one process calls, the others wait for it. What
    killed writers left goes first, since there may be room for no more."""
    for leftover in (*folder.glob(_UNFINISHED), folder / folder_name(step)):
        if leftover.exists():
            shutil.rmtree(leftover)
    # Named by the writer: a process that outlived an earlier start of the run must not put its shard among ours.
    temporary = folder / f".{folder_name(step)}.{os.getpid()}.tmp"
    temporary.mkdir(parents=True)
    return temporary


def write_shard(temporary: Path, *, rank: int, num_processes: int, pieces: Mapping[str, Piece], own: Mapping[str, torch.Tensor]) -> Shard:
    """Write one process' file: ``pieces`` by parameter, and what is its ``own``, by name."""
    from safetensors.torch import save_file

    tensors = {f"{_PARAMETER}{name}/{entry}": tensor for name, piece in pieces.items() for entry, tensor in piece.tensors.items()}
    tensors |= {f"{_OWN}{name}": tensor for name, tensor in own.items()}
    path = temporary / f"shard-{rank:05d}-of-{num_processes:05d}.safetensors"
    with atomic_path(path) as unfinished:
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, unfinished)
    return Shard(name=path.name, sha256=sha256_file(path), starts={name: piece.start for name, piece in pieces.items()})


def finish_state(temporary: Path, position: Position, shards: Sequence[Shard]) -> Path:
    """Write ``state.json`` and give the folder its name; one process calls when all shards are there.

    Errors: ValueError where a shard is not: the processes do not see one filesystem.
    """
    missing = [shard.name for shard in shards if not (temporary / shard.name).is_file()]
    if missing:
        raise ValueError(
            f"{temporary}: expected the shards of all processes, found none named {missing}; out= must lie where all machines see it"
        )
    document = {
        "format_version": FORMAT_VERSION,
        "step": position.step,
        "counters": position.counters,
        "settings": position.settings,
        "shapes": position.shapes,
        "shards": [{"name": shard.name, "sha256": shard.sha256, "starts": shard.starts} for shard in shards],
    }
    atomic_write_json(temporary / STATE, {**document, SEAL: seal(document)})
    final = temporary.with_name(folder_name(position.step))
    temporary.rename(final)
    fsync_directory(final.parent)
    return final


class StateReader:
    """One complete state: any stretch of any parameter, whichever processes wrote it."""

    def __init__(self, path: Path) -> None:
        document = _read_document(path)
        self.path = path
        self.shards = [Shard(**shard) for shard in document["shards"]]
        self.position = Position(
            step=document["step"],
            shapes={name: tuple(shape) for name, shape in document["shapes"].items()},
            settings=document["settings"],
            counters=document["counters"],
        )

    def verify(self, *, rank: int = 0, num_processes: int = 1) -> None:
        """Compare every ``num_processes``-th shard with its sha256; ValueError names one that is damaged."""
        for shard in self.shards[rank::num_processes]:
            found = sha256_file(self.path / shard.name) if (self.path / shard.name).is_file() else "no file"
            if found != shard.sha256:
                raise ValueError(
                    f"{self.path / shard.name}: expected sha256 {shard.sha256}, found {found}; the file is damaged: {_remedy(self.path)}"
                )

    def entries(self, name: str) -> list[str]:
        """What is kept of a parameter: ``weight`` and the optimizer's entries. ValueError where the state has no such one."""
        from safetensors import safe_open

        for shard in self.shards:
            if name in shard.starts:
                with safe_open(self.path / shard.name, framework="pt") as file:
                    prefix = f"{_PARAMETER}{name}/"
                    return sorted(key.removeprefix(prefix) for key in file.keys() if key.startswith(prefix))  # noqa: SIM118
        raise ValueError(f"{self.path}: expected the parameter {name}, found {sorted(self.position.shapes)}; it is of another head")

    def read(self, name: str, entry: str, *, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of a flattened parameter's entry; a number without axis as it is."""
        from safetensors import safe_open

        parts: list[tuple[int, torch.Tensor]] = []
        for shard in self.shards:
            if name not in shard.starts:
                continue
            with safe_open(self.path / shard.name, framework="pt") as file:
                kept = file.get_slice(f"{_PARAMETER}{name}/{entry}")
                if not kept.get_shape():
                    return file.get_tensor(f"{_PARAMETER}{name}/{entry}")
                begin = shard.starts[name]
                first, last = max(start, begin), min(stop, begin + kept.get_shape()[0])
                if first < last:
                    parts.append((first, kept[first - begin : last - begin]))
        parts.sort(key=lambda part: part[0])
        whole = torch.cat([part for _, part in parts]) if parts else torch.empty(0)
        assert whole.shape[0] == max(0, stop - start), (self.path, name, entry, start, stop)
        return whole

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained parameters, whole."""
        return {
            name: self.read(name, WEIGHT, start=0, stop=torch.Size(shape).numel()).view(shape)
            for name, shape in self.position.shapes.items()
        }

    def own(self, rank: int) -> dict[str, torch.Tensor]:
        """What was one writer's alone, by name; ``rank`` is among theirs."""
        from safetensors import safe_open

        with safe_open(self.path / self.shards[rank].name, framework="pt") as file:
            return {key.removeprefix(_OWN): file.get_tensor(key) for key in file.keys() if key.startswith(_OWN)}  # noqa: SIM118


def _read_document(path: Path) -> dict[str, Any]:
    """``state.json`` of a state, checked. ValueError where it is damaged, or of another version."""
    where = path / STATE
    document = read_object(where, {"format_version": int}, remedy=_remedy(path))
    if document["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{where}: expected format_version {FORMAT_VERSION}, found {document['format_version']}; train anew")
    document = read_object(where, _KINDS, remedy=_remedy(path))
    check_seal(document, where=where, remedy=_remedy(path))
    return document


def _remedy(path: Path) -> str:
    return f"delete {path} to continue from the state before"


def check_continues(folder: Path, settings: Mapping[str, Any], *, only_these: bool = False) -> None:
    """ValueError where ``folder`` holds a training that was begun with other settings; reads no weights, writes nothing.
    ``only_these``: the others are not known yet, and may be anything."""
    steps = complete_steps(folder)
    if steps:
        path = folder / folder_name(steps[-1])
        found = _read_document(path)["settings"]
        check_settings(settings, {key: found[key] for key in found.keys() & settings.keys()} if only_these else found, where=path)


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
    """Delete all states but the ``keep_last`` newest complete ones and those in ``keep``, and what killed writers left."""
    steps = complete_steps(folder)
    kept = {*steps[max(0, len(steps) - keep_last) :], *keep}
    for entry in sorted(folder.iterdir()):
        match = _FOLDER.fullmatch(entry.name)
        if match and int(match.group(1)) not in kept:
            # Unmark first: a half deleted folder must not look complete.
            (entry / STATE).unlink(missing_ok=True)
            shutil.rmtree(entry)
    for leftover in folder.glob(_UNFINISHED):
        shutil.rmtree(leftover)
