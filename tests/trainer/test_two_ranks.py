"""Two processes under torchrun against one: the same losses and the same weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.checkpoint import read_head_tensors
from mtp_train.trainer.metrics import read_metrics
from mtp_train.trainer.state import complete_steps

DRIVER = """
import importlib.util, sys, time
from pathlib import Path

if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("trainer_conftest", sys.argv[1])
    recipes = importlib.util.module_from_spec(spec)
    sys.modules["trainer_conftest"] = recipes
    spec.loader.exec_module(recipes)
    recipe = recipes.Recipe(target=Path(sys.argv[2]), cache=Path(sys.argv[3]), num_steps=int(sys.argv[5]))
    recipe.trainer(Path(sys.argv[4])).run()
    import torch.distributed
    torch.distributed.destroy_process_group()
"""


def two_ranks(recipe: Any, out: Path, folder: Path, *, num_steps: int) -> list[str]:
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    arguments = [Path(__file__).with_name("conftest.py"), recipe.target, recipe.cache, out, num_steps]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(driver), *map(str, arguments)]


@pytest.fixture
def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
def test_two_processes_give_what_one_gives(recipe: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    recipe = replace(recipe, num_steps=4, packs_per_step=4)
    recipe.trainer(tmp_path / "one").run()
    ended = subprocess.run(
        two_ranks(recipe, tmp_path / "two", tmp_path, num_steps=4), check=False, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for mine, theirs in zip(one, two, strict=True):
        assert (mine["tokens"], mine["rows"]) == (theirs["tokens"], theirs["rows"])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["losses"]["topk_kl"] == pytest.approx(theirs["losses"]["topk_kl"], rel=1e-5)
    one_weights, two_weights = read_head_tensors(tmp_path / "one"), read_head_tensors(tmp_path / "two")
    for name, tensor in one_weights.items():
        # Gradients are summed in another order, and Adam divides by their size: a fiftieth of one step of lr 1e-2.
        torch.testing.assert_close(two_weights[name], tensor, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
def test_a_signal_ends_two_processes_after_the_same_step(recipe: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        two_ranks(recipe, tmp_path / "two", tmp_path, num_steps=100_000), env=environment, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "two" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert "stopped by SIGTERM" in errors
    steps = complete_steps(tmp_path / "two")
    assert steps and f"after step {steps[-1]}, saved" in errors
