"""A process that torchrun or a stage of ours started does not outlive it; any other is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose system call it is")
# Says who it is once it has asked to end with its parent, and sleeps.
CHILD = "import os, time; from mtp_train.orphan import end_with_parent; end_with_parent(); print(os.getpid(), flush=True); time.sleep(600)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("told", [{"TORCHELASTIC_RUN_ID": "none"}, {}])
def test_a_child_of_torchrun_ends_when_torchrun_is_killed(told: dict[str, str]) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], cwd=ROOT, env={**os.environ, **told}, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    if not told:
        time.sleep(0.2)
        assert is_running(child), "nobody asked it to end with its parent"
        os.kill(child, signal.SIGKILL)
    for _ in range(500):
        if not is_running(child):
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent")


@pytest.mark.parametrize(("named", "status"), [(os.getpid(), 0), (os.getppid(), -signal.SIGKILL)], ids=["own", "another"])
def test_a_parent_that_was_gone_before_is_noticed(named: int, status: int) -> None:
    code = "from mtp_train.orphan import end_with_parent; end_with_parent()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "MTP_TRAIN_PARENT": str(named)}, check=False)
    assert done.returncode == status
