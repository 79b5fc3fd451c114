"""Train once in peace and once under kill -9, and compare what comes of it to the last bit.

python tools/chaos.py --kills 20 --out runs/chaos -- run=runs/demo num_steps=200 checkpoint.every=5
python tools/chaos.py --kills 20 --processes 2 --out runs/chaos2 -- run=runs/demo num_steps=200 checkpoint.every=5 packs_per_step=2 \\
    parallel=fsdp2

Behind ``--``: the settings of ``mtp_train.train``, its output folder excepted. Of several processes, torchrun among them, all at
once and each alone are killed in turn. Needs Linux, whose /proc tells which processes are torchrun's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mtp_train.faults import telling

# torchrun sends SIGTERM where one of its processes has ended, and SIGKILL half a minute later.
_PATIENCE_S = 90


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--processes", type=int, default=1, help="more than one: under torchrun")
    parser.add_argument("--out", type=Path, required=True, help="a folder for both trainings (whole/ and killed/) and their logs")
    parser.add_argument("settings", nargs="+", help="settings of mtp_train.train")
    return parser.parse_args()


def _children(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _frozen(process: int) -> Iterator[int]:
    """A process and all below it, each stopped before it is asked for its children, so that none can be added."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
    yield process
    for child in _children(process):
        yield from _frozen(child)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Group:
    """A command and all processes that it starts: torchrun puts each of its own into a session apart, so that no signal to a
    group of processes reaches them."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with open(log, "ab") as stream:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True)

    def poll(self) -> int | None:
        return self.process.poll()

    def kill(self, one: int | None) -> None:
        everyone = [*_frozen(self.process.pid)]
        launched = [self.process.pid, *_children(self.process.pid)]
        victims = everyone if one is None else [launched[one % len(launched)]]
        for process in victims:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in {*everyone} - {*victims}:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        self.process.wait(_PATIENCE_S)
        until_s = time.perf_counter() + _PATIENCE_S
        while left := [process for process in everyone if _runs(process)]:
            if time.perf_counter() > until_s:
                raise RuntimeError(f"expected all processes to be gone, found {left} running {_PATIENCE_S} s after a kill")
            time.sleep(0.01)


def main() -> None:
    arguments, started = parse(), list[Group]()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        try_it(arguments, started)
    except RuntimeError as error:
        sys.exit(f"chaos: {error}" + (f"; {started[-1].log} says why" if started else ""))
    finally:  # they are in sessions of their own: what ends this process does not reach them
        for group in started:
            if group.poll() is None:
                group.kill(None)


def try_it(arguments: argparse.Namespace, started: list[Group]) -> None:
    from mtp_train.trainer.chaos import differences, harass

    launcher = [sys.executable, "-m"]
    if arguments.processes > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes), "-m"]

    def start(name: str) -> Group:
        words = [*launcher, "mtp_train.train", *arguments.settings, f"out={arguments.out / name}"]
        started.append(Group(words, arguments.out / f"{name}.log"))
        return started[-1]

    arguments.out.mkdir(parents=True, exist_ok=True)
    began_s = time.perf_counter()
    whole, killed = arguments.out / "whole", arguments.out / "killed"
    num_processes = 1 if arguments.processes == 1 else 1 + arguments.processes
    harass(lambda: start("whole"), out=whole, num_processes=num_processes, num_kills=0, seed=0)
    whole_s = time.perf_counter() - began_s
    kills = harass(
        lambda: start("killed"),
        out=killed,
        num_processes=num_processes,
        num_kills=arguments.kills,
        seed=arguments.seed,
    )
    print(f"in peace {whole_s:.0f} s; killed {len(kills)} times, {time.perf_counter() - began_s - whole_s:.0f} s")
    for kill in kills:
        who = "all" if kill.one is None else "torchrun" if kill.one == 0 else f"process {kill.one}"
        print(f"  {kill.moment:>6}, {who:>9}, {kill.after_s:6.2f} s after its start, newest whole state: step {kill.saved_step}")
    found = differences(whole, killed)
    print("\n".join(found) if found else "the same head, the same log, nothing left over")
    if found or len(kills) < arguments.kills:
        sys.exit(f"expected {arguments.kills} kills and no difference, found {len(kills)} and {len(found)}")


if __name__ == "__main__":
    with telling("chaos"):
        main()
