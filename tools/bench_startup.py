"""How long a stage takes to say its first line, against a bare ``import torch``; and ``--help``, which imports none.

The first line says what is opened; the second comes when it is open, and with it whatever its tokenizer needs imported.

python tools/bench_startup.py --run runs/demo            # a run whose stages are done: each is started anew into a folder of its own

Seconds are CPU time of the started process (other work on the machine disturbs them little) and, behind them, by the clock; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mtp_train.faults import telling
from mtp_train.results import add_results_option, keep, positive
from mtp_train.runtime import provenance

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of a running process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def until_lines(command: list[str]) -> tuple[float, float, float]:
    """CPU and wall seconds until the process has written a line, and CPU seconds until a second one (the first again where it ends
    without); it is then ended."""
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = cpu_s(process.pid), time.perf_counter() - begun
        second_s = cpu_s(process.pid) if process.stdout.readline() else found[0]
        process.kill()
    if not first:
        raise ValueError(f"{' '.join(command)}: expected a line, found none")
    return *found, second_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--repeats", type=positive, default=3)
    add_results_option(parser)
    words = parser.parse_args()
    if missing := [name for name in ("responses", "cache", "checkpoint") if not (words.run / name).is_dir()]:
        raise ValueError(
            f"{words.run}: expected a run whose stages are done, found no {missing[0]}/; run the demo first, or name another run"
        )
    python = [sys.executable, "-u"]
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run={words.run}", f"out={folder}"]
        commands = {
            "import torch": [*python, "-c", "import torch; print(1)"],
            "train --help": [*python, "-m", "mtp_train.train", "--help"],
            "regenerate": [*python, "-m", "mtp_train.regenerate", *run],
            "precompute": [*python, "-m", "mtp_train.precompute", *run],
            "train": [*python, "-m", "mtp_train.train", *run],
            "evaluate": [*python, "-m", "mtp_train.evaluate", *run],
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
        for _ in range(words.repeats):
            for name, command in commands.items():
                found[name].append(until_lines(command))
    rows = {name: [statistics.median(column) for column in zip(*taken, strict=True)] for name, taken in found.items()}
    bare, about = rows["import torch"][0], provenance()
    lines = [f"| {name} | {cpu:.2f} | {wall:.2f} | {cpu / bare:.2f} | {second:.2f} |" for name, (cpu, wall, second) in rows.items()]
    where = f"torch {about['packages']['torch']}, {about['machine']}"
    text = f"""# Start-up

`python tools/bench_startup.py --run RUN`: seconds until the first line, medians of {words.repeats}; {where}.

| | CPU s | wall s | CPU s, times `import torch` | CPU s until the second line |
|---|---|---|---|---|
{chr(10).join(lines)}
"""
    keep(text, {**about, "rows": rows}, name="bench_startup", folder=words.results)


if __name__ == "__main__":
    with telling("bench_startup"):
        main()
