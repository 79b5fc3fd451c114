"""The cells of a norm ablation, one training each, and the trainings run side by side, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtp_train.checkpoint import is_whole
from mtp_train.commandline import quoted
from mtp_train.head.pair import NORMS
from mtp_train.runtime import atomic_write_json, environment_apart, progress, read_json, read_object
from mtp_train.trainer.module import choose_precision, make_accelerator
from mtp_train.trainer.settings import Device, Precision
from mtp_train.typed import fit

# Mixtures by name. ``feedback`` has no weights and says nothing at depth 0; it goes with all.
MIXTURES: dict[str, tuple[str, ...]] = {
    "none": (),
    "embed": ("embed",),
    "hidden": ("hidden",),
    "input": ("input",),
    "output": ("output",),
    "all": NORMS,
}
LOG, STOPPED, SETTINGS = "train.log", "stopped.json", "settings.ablation.json"
# As trainer/finite.py words it.
_NOT_FINITE = re.compile(r"(step \d+: expected a finite loss and gradient.*)")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training: ``target`` a name of ``Place``s, ``mixture`` one of ``MIXTURES``, ``seed`` of the weights and of the data order."""

    target: str
    mixture: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.target}-{self.mixture}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A target and its cache to train on. ``words`` choose the target on a command line."""

    words: tuple[str, ...]
    cache: Path


def cells(targets: Sequence[str], mixtures: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Every combination, seed by seed, so that what is there after an interruption can be compared.

    Errors: ValueError for a mixture that is none, or a seed given twice.
    """
    if unknown := [mixture for mixture in mixtures if mixture not in MIXTURES]:
        raise ValueError(f"mixtures: expected some of {list(MIXTURES)}, found {unknown}")
    if len(set(seeds)) != len(seeds) or not seeds:
        raise ValueError(f"seeds: expected different numbers, found {list(seeds)}")
    return [Cell(target=target, mixture=mixture, seed=seed) for seed in seeds for target in targets for mixture in mixtures]


def keep_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write what all cells of an ablation share into its folder. ValueError where it was begun with other settings: what is trained and
    measured there already would be shown as if it were theirs."""
    path = out / SETTINGS
    remedy = f"choose another --out, or delete {out}"
    there = read_object(path, {"settings": dict}, remedy=remedy)["settings"] if path.is_file() else settings
    if odd := sorted(key for key in {*there, *settings} if there.get(key) != settings.get(key)):
        said = "; ".join(f"{key}: there {there.get(key)}, now {settings.get(key)}" for key in odd)
        raise ValueError(f"{out}: expected the settings that the ablation was begun with, found others ({said}); {remedy}")
    atomic_write_json(path, {"settings": dict(settings)})


def trained_in(settings: Sequence[str]) -> Precision:
    """What the precision of trainings with these settings comes to on this machine: ``auto``, train's default, goes by the device."""
    given = {key: value for key, _, value in (word.partition("=") for word in settings)}
    precision, device = given.get("precision", "auto"), given.get("device", "auto")
    word: Literal["auto"] | Precision = fit(Literal["auto", "bf16", "fp32"], precision, "precision")
    return choose_precision(word, make_accelerator(fit(Device, device, "device")))


def command(cell: Cell, place: Place, *, out: Path, settings: Sequence[str]) -> list[str]:
    """The command line of a cell's training. Everything but the norms is the same for all mixtures; ``settings`` may not name them."""
    on = MIXTURES[cell.mixture]
    norms = ",".join(f"{norm}:{str(norm in on).lower()}" for norm in NORMS)
    return [
        sys.executable,
        "-m",
        "mtp_train.train",
        "head=mtp",
        *settings,
        *place.words,
        f"cache={quoted(place.cache)}",
        f"out={quoted(out / cell.name)}",
        f"head.norms={{{norms}}}",
        f"head.seed={cell.seed}",
        f"seed={cell.seed}",
    ]


def train_all(wanted: Sequence[Cell], places: Mapping[str, Place], *, out: Path, settings: Sequence[str], side_by_side: int) -> None:
    """Train every cell that is not trained yet, ``side_by_side`` at a time. Killed, the same call continues.

    A training that a number that is not finite ends is a result, kept in ``stopped.json`` of its folder. Errors: ValueError
    where one ends otherwise, with the end of its log; the others are finished first.
    """
    left = [cell for cell in wanted if not ended(out / cell.name)]
    with ThreadPoolExecutor(side_by_side) as pool, progress(desc="norm ablation", unit="head", total=len(wanted)) as bar:
        bar.update(len(wanted) - len(left))

        def one(cell: Cell) -> str | None:
            fault = _train(command(cell, places[cell.target], out=out, settings=settings), out / cell.name)
            bar.update(1)
            return fault

        faults = [fault for fault in pool.map(one, left) if fault is not None]
    if faults:
        raise ValueError("; ".join(faults))


def ended(folder: Path) -> bool:
    """True where a cell's training has come to its end, or to a number that is not finite."""
    return is_whole(folder) or (folder / STOPPED).is_file()


def stopped_at(folder: Path) -> str | None:
    """What ended a cell's training before its last step; None where it came to its end."""
    path = folder / STOPPED
    return str(read_json(path)["message"]) if path.is_file() else None


def _train(words: list[str], folder: Path) -> str | None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOG, "wb") as stream:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment_apart(), check=False)
    if done.returncode == 0:
        return None
    wrote = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    if found := _NOT_FINITE.search(wrote):
        atomic_write_json(folder / STOPPED, {"message": found[1][:400], "command": words})
        return None
    return f"{folder.name}: expected exit status 0, found {done.returncode}; {json.dumps(' '.join(wrote.split())[-300:])} ({folder / LOG})"
