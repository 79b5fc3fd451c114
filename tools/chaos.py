"""Train once in peace and once under kill -9, and compare what comes of it to the last bit.

python tools/chaos.py --kills 20 --out runs/chaos -- run=runs/demo num_steps=200 checkpoint.every=5
python tools/chaos.py --kills 20 --processes 2 --out runs/chaos2 -- run=runs/demo num_steps=200 checkpoint.every=5 packs_per_step=2 \\
    parallel=fsdp2

Behind ``--``: the settings of ``mtp_train.train``, its output folder excepted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--processes", type=int, default=1, help="more than one: under torchrun")
    parser.add_argument("--out", type=Path, required=True, help="a folder for both trainings (whole/ and killed/) and their logs")
    parser.add_argument("settings", nargs="+", help="settings of mtp_train.train")
    return parser.parse_args()


class Group:
    """A command and all processes that it starts."""

    def __init__(self, words: list[str], log: Path) -> None:
        with open(log, "ab") as stream:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True)

    def poll(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main() -> None:
    from mtp_train.trainer.chaos import differences, harass

    arguments = parse()
    launcher = [sys.executable, "-m"]
    if arguments.processes > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes), "-m"]

    def command(name: str) -> list[str]:
        return [*launcher, "mtp_train.train", *arguments.settings, f"out={arguments.out / name}"]

    arguments.out.mkdir(parents=True, exist_ok=True)
    began_s = time.perf_counter()
    whole, killed = arguments.out / "whole", arguments.out / "killed"
    harass(lambda: Group(command("whole"), arguments.out / "whole.log"), out=whole, num_kills=0, seed=0)
    whole_s = time.perf_counter() - began_s
    kills = harass(
        lambda: Group(command("killed"), arguments.out / "killed.log"), out=killed, num_kills=arguments.kills, seed=arguments.seed
    )
    print(f"in peace {whole_s:.0f} s; killed {len(kills)} times, {time.perf_counter() - began_s - whole_s:.0f} s")
    for kill in kills:
        print(f"  {kill.moment:>6}, {kill.after_s:6.2f} s after its start, newest whole state: step {kill.saved_step}")
    found = differences(whole, killed)
    print("\n".join(found) if found else "the same head, the same log, nothing left over")
    if found or len(kills) < arguments.kills:
        sys.exit(f"expected {arguments.kills} kills and no difference, found {len(kills)} and {len(found)}")


if __name__ == "__main__":
    main()
