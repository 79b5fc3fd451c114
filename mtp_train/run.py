"""One stage's run on disk: its output folder, kept from other processes, the record of what it was told and what made it, and the one
target that all of it is of."""

from __future__ import annotations

import atexit
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.commandline import conf_dir
from mtp_train.lock import alone
from mtp_train.runtime import atomic_write_json, is_main, provenance, read_object

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What of a run states the identity of its target, and under which key, small files first: of the others one is read where these are not.
_STATED = (
    ("responses/meta.json", "identity"),
    ("checkpoint/*/head.json", "target"),
    ("cache/manifest.json", "identity"),
    ("cache/plan.json", "identity"),
    ("report/pieces/*/head*.json", "target"),
)
# The locks of the folders that this process writes to, until it ends.
_held: dict[Path, ExitStack] = {}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One stage's run: where it writes, what it was told, what machine and code it is."""

    out: Path
    settings: dict[str, Any]
    provenance: dict[str, Any]


def check_name(name: str, *, key: str = "name") -> str:
    """A name that becomes a folder or file of the run, such as a head's: ValueError unless it is one plain word."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{key}: expected letters, digits, '.', '_' or '-' (it becomes a folder of the run), found {name!r}; out= writes elsewhere"
        )
    return name


def open_run(out: Path, *, lock: str | None, settings: dict[str, Any]) -> Run:
    """Make the folder ``out`` where it is missing, and keep other processes that use the same ``lock`` (the stage's name)
    from it until this one ends; with None several may write there.

    Errors: ValueError where there is a file, or where another process writes there.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, found a file at {out}; choose another run= or out=")
    out.mkdir(parents=True, exist_ok=True)
    if is_main() and lock is not None:  # of the processes of one torchrun, the first holds the folder for all
        path = out.resolve() / f".{lock}.lock"
        if path not in _held:  # a sweep runs a stage several times in one process
            _held[path] = ExitStack()
            atexit.register(_held[path].close)
            _held[path].enter_context(alone(path, writes=out, wait=False, instead="name=" if "name" in settings else "run="))
    return Run(out=out, settings=settings, provenance=provenance())


def record(run: Run, *, stage_name: str) -> None:
    """Write the settings and what produced them beside a stage's output; what says the same but for its time is left."""
    if not is_main():
        return
    path = run.out / f"settings.{stage_name}.json"
    try:
        there = read_object(path, {"settings": dict, "provenance": dict}, remedy="") if path.is_file() else None
    except ValueError:
        there = None  # damaged, and about to be written again
    same_time = {**run.provenance, "written_utc": there["provenance"].get("written_utc")} if there is not None else {}
    if there is None or (there["settings"], there["provenance"]) != (run.settings, same_time):
        atomic_write_json(path, {"settings": run.settings, "provenance": run.provenance})


def check_target(run: Path, out: Path, identity: Mapping[str, str], *, tool: bool = False) -> None:
    """ValueError where ``out`` lies in the folder ``run``, and that holds what was made from another target, tokenizer or chat template
    than ``identity`` (``OpenTarget.identity``) states. ``tool``: the remedy is told as the options of tools have it."""
    if not out.resolve().is_relative_to(run.resolve()):
        return
    path, stated = next(_stated(run), (run, {}))
    differing = [key for key in identity if key != "target_name" and key in stated and stated[key] != identity[key]]
    if not differing:
        return
    key, (word, *settings) = differing[0], _words(path.parent, str(stated.get("target_name")))
    words = ["--target", word, *settings] if tool else [f"target={word}", *(f"target.{setting}" for setting in settings)]
    raise ValueError(
        f"target: expected that of {run}, {stated.get('target_name')} ({path.relative_to(run)}: {key} {str(stated[key])[:16]}), found "
        f"{identity['target_name']} ({key} {identity[key][:16]}); add {shlex.join(words)}, or choose another run"
    )


def _stated(run: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The identities that lie in a run. A damaged file is passed over: who reads it says so."""
    for pattern, key in _STATED:
        for path in sorted(run.glob(pattern)):
            try:
                yield path, read_object(path, {key: dict}, remedy="")[key]
            except ValueError:
                continue


def _words(folder: Path, name: str) -> list[str]:
    """The word of the target ``name`` and its settings, as the stage that wrote into ``folder`` was told them."""
    for path in sorted(folder.glob("settings.*.json")):
        try:
            told = read_object(path, {"settings": dict}, remedy="")["settings"].get("target")
        except ValueError:
            continue
        if isinstance(told, dict) and told.get("name") == name and "path" in told:
            return ["local", f"path={told['path']}", f"name={name}"]
    return [name] if (conf_dir() / "target" / f"{name}.yaml").is_file() else ["local", "path=...", f"name={name}"]
