"""What would part the samples that are trained on from those that are measured on is refused before anything is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["first:", "second: seed=5"], "found seed=5"),
        (["first:", "second: head.seed=5"], "found head.seed=5"),
        (["first:", "second: num_steps=3", "--common", "+validation.fraction=0.1"], "found +validation.fraction=0.1"),
        (["first:", "--seeds", "1", "0", "1"], "seeds: expected each once, since prompts would count twice, found [1, 0, 1]"),
    ],
)
def test_settings_that_the_tool_sets_itself_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "compare_trainings.py"), *words, "--run", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
