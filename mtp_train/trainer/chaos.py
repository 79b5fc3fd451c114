"""Kills a training again and again, at moments that hurt, and starts it anew: how the promise to survive kill -9 is tried."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from mtp_train.checkpoint import CONFIG, WEIGHTS, read_head_config
from mtp_train.runtime import log, sha256_file
from mtp_train.trainer.metrics import METRICS, read_metrics
from mtp_train.trainer.state import complete_steps

# Some time after the start (imports, reading the state back); some logged steps later; while a state is written; just after
# one has got its name (older ones are being deleted).
Moment = Literal["start", "steps", "saving", "saved"]
MOMENTS: tuple[Moment, ...] = ("start", "steps", "saving", "saved")
_LOOK_EVERY_S = 0.001
_MOST_STEPS = 4
# Longer than a small state takes to write: kills fall on every part of it.
_LONGEST_DELAY_S = 0.05


class Process(Protocol):
    """A training that runs: all of its processes, where it has several."""

    def poll(self) -> int | None:
        """None while it runs, else its exit status."""
        ...

    def kill(self, one: int | None) -> None:
        """SIGKILL to all of its processes at once, or to ``one`` alone, by a number taken modulo how many there are: the others
        must then end by themselves. Returns when all are gone. Errors: RuntimeError where some do not go."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kill:
    """``one``: the process that was killed, None for all at once; ``after_s`` from the start; ``saved_step``: the newest whole
    state then, 0 for none."""

    moment: Moment
    one: int | None
    after_s: float
    saved_step: int


def harass(start: Callable[[], Process], *, out: Path, num_processes: int, num_kills: int, seed: int) -> list[Kill]:
    """Start a training of ``num_processes`` that writes to ``out``, kill it ``num_kills`` times, let it come to its end. Where it
    has several processes, all at once and each alone are killed in turn. Returns the kills, fewer where it was done before.
    Errors: RuntimeError where it ends by itself in another way than well."""
    kills: list[Kill] = []
    draw, longest_start_s = random.Random(seed), 1.0
    victims: list[int | None] = [None, *(range(num_processes) if num_processes > 1 else ())]
    for number in range(num_kills):
        moment = MOMENTS[number % len(MOMENTS)]
        one = victims[(number + number // len(MOMENTS)) % len(victims)]  # shifted, so that each meets each moment
        began_s, process = time.perf_counter(), start()
        until_s = began_s + draw.uniform(0, longest_start_s)
        passed = iter(_moments(moment, out, until_s=until_s, num_steps=draw.randint(1, _MOST_STEPS)))
        while process.poll() is None and next(passed, True) is False:
            time.sleep(_LOOK_EVERY_S)
        if moment != "start":
            longest_start_s = max(longest_start_s, time.perf_counter() - began_s)
            time.sleep(draw.uniform(0, _LONGEST_DELAY_S))
        if _ended(process):
            return kills
        after_s = time.perf_counter() - began_s
        process.kill(one)
        kills.append(Kill(moment=moment, one=one, after_s=after_s, saved_step=(complete_steps(out) or [0])[-1]))
        log(f"kill {len(kills)} of {num_kills}: {kills[-1]}")
    process = start()
    while not _ended(process):
        time.sleep(_LOOK_EVERY_S)
    return kills


def _ended(process: Process) -> bool:
    status = process.poll()
    if status not in (None, 0):
        raise RuntimeError(f"training: expected it to run or to end well, found exit status {status}")
    return status == 0


def _moments(moment: Moment, out: Path, *, until_s: float, num_steps: int) -> Iterator[bool]:
    """False as often as it is looked at, until the moment has come."""
    before, states, left = _metrics_bytes(out), complete_steps(out), _unfinished(out)
    lines = 0
    while True:
        if moment == "start":
            come = time.perf_counter() >= until_s
        elif moment == "steps":
            now = _metrics_bytes(out)
            lines, before = lines + (now > before), now
            come = lines >= num_steps
        elif moment == "saving":
            come = bool(_unfinished(out) - left)
        else:
            come = bool(set(complete_steps(out)) - set(states))
        if come:
            return
        yield False


def _unfinished(out: Path) -> set[Path]:
    return set(out.glob(".step-*.tmp"))


def _metrics_bytes(out: Path) -> int:
    path = out / METRICS
    return path.stat().st_size if path.exists() else 0


def differences(one: Path, two: Path) -> list[str]:
    """What two finished trainings differ in, in words: the head's bytes, what was logged but for the time it took, which states
    are there, and whatever a killed one left over."""
    found = []
    if (one / WEIGHTS).read_bytes() != (two / WEIGHTS).read_bytes():
        found.append(f"{WEIGHTS}: other bytes")
    if read_head_config(two)["weights_sha256"] != sha256_file(two / WEIGHTS):
        found.append(f"{CONFIG}: of other weights")
    if complete_steps(one) != complete_steps(two):
        found.append(f"states: {complete_steps(one)} and {complete_steps(two)}")
    mine, theirs = (_lines(path) for path in (one, two))
    if len(mine) != len(theirs):
        found.append(f"{METRICS}: {len(mine)} and {len(theirs)} lines")
    found += [f"{METRICS}: {a} and {b}" for a, b in zip(mine, theirs, strict=False) if a != b]
    found += [f"{path}: left over" for path in sorted(two.glob(".*.tmp"))]
    return found


def _lines(out: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in read_metrics(out / METRICS)]
