"""Two processes under torchrun: a scheduler's warning sent to torchrun ends both after the same step, state saved, be it that one
of them waits for a shard and the other for that one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mtp_train.trainer.state import StateReader, complete_steps

DRIVER = """
import importlib.util, os, sys, time
from pathlib import Path

spec = importlib.util.spec_from_file_location("trainer_conftest", sys.argv[1])
recipes = importlib.util.module_from_spec(spec)
sys.modules["trainer_conftest"] = recipes
spec.loader.exec_module(recipes)
class Waiting(recipes.CacheReader):
    is_local, left = False, 60

    def __getitem__(self, number):
        Waiting.left -= os.environ["RANK"] == "1"
        while Waiting.left < 0:
            time.sleep(0.1)
        return super().__getitem__(number)

settings = {}
if sys.argv[5] == "waits":
    recipes.CacheReader, settings = Waiting, {"validation_fraction": 0.0}
recipe = recipes.Recipe(target=Path(sys.argv[2]), cache=Path(sys.argv[3]), num_steps=100_000, parallel="fsdp2", **settings)
from mtp_train.trainer.stop import EndAtOnce
with EndAtOnce():
    recipe.trainer(Path(sys.argv[4])).run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "how"), [(signal.SIGUSR1, 75, "trains"), (signal.SIGTERM, 143, "trains"), (signal.SIGUSR1, 75, "waits")]
)
def test_a_signal_ends_two_processes_after_the_same_step(recipe: Any, tmp_path: Path, number: int, status: int, how: str) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    (tmp_path / "driver.py").write_text(DRIVER)
    arguments = [Path(__file__).with_name("conftest.py"), recipe.target, recipe.cache, tmp_path / "two", how]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", str(tmp_path / "driver.py")]
    process = subprocess.Popen([*launcher, *map(str, arguments)], env=environment, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "two" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(0.1)
    if how == "waits":
        time.sleep(2)  # until what was read before is trained on
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    # torchrun's own status says only that it did not end well, so that a job file reads this one.
    said = json.loads((tmp_path / "two" / "interrupted.json").read_text())
    assert said["exit_status"] == status and process.returncode not in (0, 2), errors[-3000:]
    steps = complete_steps(tmp_path / "two")
    assert steps[-1] == said["step"] and f"stopped by {signal.Signals(number).name} after step {steps[-1]}, saved" in errors
    StateReader(tmp_path / "two" / f"step-{steps[-1]:06d}").verify()
