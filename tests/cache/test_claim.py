"""One of many has a claim; a dead owner's goes to another; no clock but the reader's own decides."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_train.cache import claim as module
from mtp_train.cache.claim import Claims


class Clock:
    """The monotonic clock of this test's reader."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(module.time, "monotonic", found.monotonic)
    return found


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners' processes cannot be looked at, as on another machine."""
    monkeypatch.setattr(module, "_process", lambda pid: None)


def beat(claims: Claims) -> None:
    """One beat of the owner's thread."""
    claims._beats += 1
    for path in claims._held.values():
        with open(path, "r+b") as file:
            file.write(claims._content())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_has_it_until_it_is_released(tmp_path: Path) -> None:
    one, two = Claims(tmp_path, silence_s=60), Claims(tmp_path, silence_s=60)
    assert one.take("a") and not two.take("a") and two.take("b")
    assert one.holds("a") and not two.holds("a")
    assert two.holder("a") == f"process {os.getpid()} on {one._me['host']}" and two.holder("c") is None
    one.release("a")
    assert two.take("a") and not one.take("a")
    two.release("a")
    two.release("b")
    assert files(tmp_path) == []


@pytest.mark.parametrize("number", [2, 8])
def test_of_processes_that_reach_for_it_at_once_one_gets_it(tmp_path: Path, number: int) -> None:
    names = [f"n{i}" for i in range(40)]
    children = []
    for child in range(number):
        pid = os.fork()
        if pid == 0:
            while not (tmp_path / "go").exists():
                pass
            claims = Claims(tmp_path, silence_s=60)
            (tmp_path / f"got-{child}").write_text(" ".join(name for name in names if claims.take(name)))
            os._exit(0)
        children.append(pid)
    (tmp_path / "go").touch()
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    got = [name for child in range(number) for name in (tmp_path / f"got-{child}").read_text().split()]
    assert set(got) == set(names)
    # Some may be taken over, since the first child to end is dead then; never by more than one at a time.
    assert len(got) == len(list(tmp_path.glob(".n*.claim.*")))


def test_a_silent_one_is_taken_over_and_a_living_one_is_not(tmp_path: Path, clock: Clock, elsewhere: None) -> None:
    one, two = Claims(tmp_path, silence_s=60), Claims(tmp_path, silence_s=60)
    assert one.take("a")
    for _ in range(20):
        assert not two.take("a")
        clock.now_s += 50
        beat(one)
    assert not two.take("a")
    clock.now_s += 59
    assert not two.take("a")
    clock.now_s += 2
    assert two.take("a")
    assert files(tmp_path) == [".a.claim.0", ".a.claim.1"]
    beat(one)  # it was only stopped: what it writes is its own old claim
    clock.now_s += 10
    three = Claims(tmp_path, silence_s=60)
    assert not three.take("a") and f"process {os.getpid()}" in str(three.holder("a"))
    one.release("a")  # and takes only that away
    assert files(tmp_path) == [".a.claim.1"]
    beat(two)
    two.release("a")
    assert files(tmp_path) == []


def test_nobody_is_dead_at_first_sight(tmp_path: Path, clock: Clock, elsewhere: None) -> None:
    """A worker that comes late, or was itself stopped for long, has not seen the silence."""
    one, two = Claims(tmp_path, silence_s=60), Claims(tmp_path, silence_s=60)
    assert one.take("a")
    clock.now_s += 10_000
    assert not two.take("a")
    clock.now_s += 10_000
    beat(one)
    assert not two.take("a")


def test_clocks_that_go_back_and_files_of_any_time_do_no_harm(
    tmp_path: Path, clock: Clock, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Claims(tmp_path, silence_s=60), Claims(tmp_path, silence_s=60)
    assert one.take("a")
    for shift, stamp in ((-(10**6), 0), (10**6, 4 * 10**9), (-(10**9), 1)):
        monkeypatch.setattr(module.time, "time", lambda shift=shift: 1.7e9 + shift)
        os.utime(tmp_path / ".a.claim.0", (stamp, stamp))
        assert not two.take("a")
        clock.now_s += 40
        beat(one)
        os.utime(tmp_path / ".a.claim.0", (stamp, stamp))
        assert not two.take("a")
    clock.now_s += 61
    assert two.take("a")


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        Claims(tmp_path, silence_s=60).take("a")
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has waited for it
    claims = Claims(tmp_path, silence_s=60)
    assert files(tmp_path) == [".a.claim.0"] and claims.take("a")
    os.waitpid(pid, 0)
    claims.release("a")
    assert files(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"owner": 1}', b"\xff\x00"])
def test_a_claim_that_says_nothing_is_waited_for_and_taken(tmp_path: Path, clock: Clock, content: bytes) -> None:
    """Its owner died between making and writing it, or is about to write."""
    (tmp_path / ".a.claim.0").write_bytes(content)
    claims = Claims(tmp_path, silence_s=60)
    assert not claims.take("a") and claims.holder("a") == "unknown"
    clock.now_s += 61
    assert claims.take("a")


def test_the_thread_beats_and_leaving_releases(tmp_path: Path) -> None:
    with Claims(tmp_path, silence_s=0.06) as claims:
        assert claims.take("a")
        content = (tmp_path / ".a.claim.0").read_bytes()
        deadline_s = time.monotonic() + 30
        while (tmp_path / ".a.claim.0").read_bytes() == content:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        (tmp_path / ".a.claim.0").unlink()  # somebody cleaned up: nothing to beat, nothing to fear
        time.sleep(0.05)
        assert claims.take("b")
    assert files(tmp_path) == []
    with pytest.raises(ValueError, match="silence_s: expected more than 0"):
        Claims(tmp_path, silence_s=0)
