"""One stage's run on disk: its output folder, kept from other processes, and the record of what it was told and what made it."""

from __future__ import annotations

import atexit
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.lock import alone
from mtp_train.runtime import atomic_write_json, is_main, provenance, read_object

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
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
