"""kill -9 at any moment, again and again: the run ends as the one that was not killed (tools/chaos.py does it twenty times)."""

from __future__ import annotations

import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest

from mtp_train.trainer.chaos import MOMENTS, differences, harass


@pytest.mark.parametrize(("mode", "num_ranks", "num_kills"), [("single", 1, 4), ("fsdp2", 2, 4)])
def test_a_killed_run_ends_as_the_one_that_was_not(recipe: Any, tmp_path: Path, mode: str, num_ranks: int, num_kills: int) -> None:
    # Many small states, a kill falls on one in three steps' saving; and sums that are logged behind the next state.
    recipe = replace(recipe, num_steps=40, packs_per_step=2, save_every=2, validate_every=9, log_every=5, keep_last=2, parallel=mode)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert processes.Ranks([processes.run_of(recipe, whole)], num_ranks=num_ranks, logs=tmp_path).wait() == [0] * num_ranks
    kills = harass(
        lambda: processes.Ranks([processes.run_of(recipe, killed)], num_ranks=num_ranks, logs=tmp_path),
        out=killed,
        num_processes=num_ranks,
        num_kills=num_kills,
        seed=1,
    )
    assert [kill.moment for kill in kills] == list(MOMENTS[:num_kills])
    assert kills[-1].saved_step > 0, "none came after a state was saved"
    assert not differences(whole, killed)


def test_differences_are_found(recipe: Any, tmp_path: Path) -> None:
    recipe = replace(recipe, num_steps=2, validate_every=None, save_every=None)
    for name, changes in (("one", {}), ("same", {}), ("other", {"lr": 2e-2})):
        replace(recipe, **changes).trainer(tmp_path / name).run()
    assert not differences(tmp_path / "one", tmp_path / "same")
    found = differences(tmp_path / "one", tmp_path / "other")
    assert "head.safetensors: other bytes" in found and len(found) > 1
    (tmp_path / "same" / ".step-000001.7.tmp").mkdir()
    (tmp_path / "same" / "step-000001").mkdir()
    (tmp_path / "same" / "step-000001" / "state.json").touch()
    assert differences(tmp_path / "one", tmp_path / "same") == [
        "states: [2] and [1, 2]",
        f"{tmp_path / 'same' / '.step-000001.7.tmp'}: left over",
    ]


def test_a_training_that_fails_by_itself_is_an_error(recipe: Any, tmp_path: Path) -> None:
    recipe = replace(recipe, num_steps=2, validate_every=None, save_every=None)
    recipe.trainer(tmp_path / "out").run()
    other = processes.run_of(replace(recipe, lr=0.5), tmp_path / "out")
    with pytest.raises(RuntimeError, match="found exit status 1"):
        harass(lambda: processes.Ranks([other], num_ranks=1, logs=tmp_path), out=tmp_path / "out", num_processes=1, num_kills=0, seed=0)


def test_a_process_that_comes_late_does_not_take_the_run_for_done(recipe: Any, tmp_path: Path) -> None:
    """Killed between the last state and the head, a run is continued by two, one of which begins when the other has made the head."""
    recipe = replace(recipe, num_steps=2, packs_per_step=2, validate_every=None, save_every=None)
    recipe.trainer(tmp_path / "out").run()
    whole = (tmp_path / "out" / "head.safetensors").read_bytes()
    (tmp_path / "out" / "head.json").unlink()
    ranks = processes.Ranks([processes.run_of(recipe, tmp_path / "out", late=(1, 2.0))], num_ranks=2, logs=tmp_path)
    assert ranks.wait() == [0, 0], ranks.said()[-3000:]
    assert (tmp_path / "out" / "head.json").exists() and (tmp_path / "out" / "head.safetensors").read_bytes() == whole


# Stands for torchrun: starts two processes, each in a session of its own, says their numbers, and ends both where one has ended.
LAUNCHER = """
import os, subprocess, sys
started = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) for _ in range(2)]
print(os.getpid(), *(process.pid for process in started), flush=True)
os.wait()
for process in started:
    process.kill()
sys.exit(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc, as the tool does")
@pytest.mark.parametrize("one", [None, 1, 2])
def test_the_tool_leaves_no_process_of_a_launcher_running(tmp_path: Path, one: int | None) -> None:
    """torchrun's processes are in sessions of their own: one that lived on would hold the run's folder against the next start."""
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "chaos.py"))
    group = tool["Group"]([sys.executable, "-c", LAUNCHER], tmp_path / "log")
    while not (tmp_path / "log").read_text().endswith("\n"):
        assert group.poll() is None
        time.sleep(0.02)
    started = [int(word) for word in (tmp_path / "log").read_text().split()]
    group.kill(one)
    assert not [process for process in started if tool["_runs"](process)]
    assert group.poll() == (-9 if one is None else 1)
