"""Outside of the loop a signal ends the process at once, whatever its main thread and its other threads are at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# In C, where no handler of Python's runs: a lock taken twice, which no signal interrupts.
IN_C = "import ctypes; c = ctypes.CDLL(None); m = ctypes.create_string_buffer(64); c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"
START = """
import sys, threading, time
from pathlib import Path
from mtp_train.trainer.stop import EndAtOnce, StopSignal, note_in

with EndAtOnce():
    threading.Thread(target=threading.Event().wait).start()  # for a shard that never comes
    print("ready", flush=True)
"""


def start(then: str) -> subprocess.Popen[str]:
    """A process that waits for ever in a thread, and then does what the words say."""
    code = START + "".join(f"    {line}\n" for line in then.splitlines())
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=-1, stderr=-1, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    "busy", ["time.sleep(600)", pytest.param(IN_C, marks=pytest.mark.skipif(sys.platform != "linux", reason="glibc's"))]
)
def test_it_ends_with_its_status_and_a_line(tmp_path: Path, busy: str, number: int, status: int) -> None:
    process = start(f"note_in(Path({str(tmp_path)!r}), step=7)\nprint('noted', flush=True)\n{busy}")
    assert process.stdout is not None and process.stdout.readline() == "noted\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    name = signal.Signals(number).name
    assert (process.returncode, said) == (status, f"[mtp-train] stopped by {name}, nothing was left to save; the same command continues\n")
    assert json.loads((tmp_path / "interrupted.json").read_text()) == {"signal": name, "step": 7, "exit_status": status}


def test_the_loop_hears_the_signal_in_its_place_and_afterwards_it_ends_the_process_again() -> None:
    process = start(
        "with StopSignal() as stop:\n"
        "    print('loop', flush=True)\n"
        "    while not stop.number: time.sleep(0.01)\n"
        "    time.sleep(2)\n"  # a loop that heard goes on to save; on a busy machine the thread that listens beside it hears later
        "print(f'heard {stop.number}', flush=True)\n"
        "time.sleep(600)"
    )
    assert process.stdout is not None and process.stdout.readline() == "loop\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == f"heard {int(signal.SIGUSR1)}\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143 and "SIGUSR1: saving after this step" in said and "stopped by SIGTERM" in said


@pytest.mark.parametrize(("raised", "status", "said"), [("SystemExit(2)", 2, ""), ("KeyError('ours')", 1, "KeyError: 'ours'")])
def test_an_error_does_not_wait_for_threads(raised: str, status: int, said: str) -> None:
    process = start(f"raise {raised}")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status and said in errors
