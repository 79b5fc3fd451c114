"""One process at a time writes to a folder, and a lock outlives nobody."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mtp_train.lock import alone
from mtp_train.run import open_run

ROOT = Path(__file__).resolve().parent.parent
# Holds a lock, says so, and waits to be told to end.
HOLD = """
import sys
from pathlib import Path
from mtp_train.lock import alone
with alone(Path(sys.argv[1]), writes=Path(sys.argv[1]).parent, wait=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(lock: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=60)


def test_another_process_is_refused_by_its_number_until_the_first_ends(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    first = hold(lock)
    message = rf"{tmp_path}: expected to be the only one who writes there, found another process at it \(process {first.pid} on "
    with pytest.raises(ValueError, match=message), alone(lock, writes=tmp_path, wait=False):
        pass
    end(first)
    assert first.returncode == 0 and not lock.exists()
    with alone(lock, writes=tmp_path, wait=False):
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
    assert not lock.exists()


def test_what_was_forked_meanwhile_holds_nothing_up(tmp_path: Path) -> None:
    lock, got = tmp_path / ".lock", threading.Event()

    def wait() -> None:
        with alone(lock, writes=tmp_path, wait=True):
            got.set()

    with alone(lock, writes=tmp_path, wait=False):
        waits = threading.Thread(target=wait, daemon=True)
        waits.start()
        assert not got.wait(0.3)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        assert got.wait(20)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    waits.join(timeout=20)


def test_a_full_disk_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        with alone(tmp_path / ".lock", writes=tmp_path, wait=False):
            pass


def test_where_another_name_is_enough_it_is_offered(tmp_path: Path) -> None:
    for settings, instead in (({"name": "mtp"}, "name="), ({}, "run=")):
        first = hold(tmp_path / f".{instead}.lock")
        with pytest.raises(ValueError, match=f"choose another {instead}$"):
            open_run(tmp_path, lock=instead, settings=settings)
        end(first)


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    first = hold(lock)
    os.kill(first.pid, signal.SIGKILL)
    end(first)
    assert lock.exists(), "nobody was there to take it away"
    with alone(lock, writes=tmp_path, wait=False):
        pass
    assert not list(tmp_path.iterdir())


def test_who_waits_comes_next_and_nobody_comes_twice(tmp_path: Path) -> None:
    """Ten threads write a counter one after the other: each reads what the one before wrote."""
    import threading

    counter = tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        with alone(tmp_path / ".lock", writes=tmp_path, wait=True):
            counter.write_text(str(int(counter.read_text()) + 1))

    threads = [threading.Thread(target=count) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read_text() == "10"
