"""A try that ends early leaves no training behind, and says where the training said what was wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_interrupted_it_ends_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("chaos_tool", ROOT / "tools" / "chaos.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    training, started = tmp_path / "training", []
    training.write_text("#!/bin/sh\nexec sleep 300\n")
    training.chmod(0o755)

    def interrupted(start: Callable[[], Any], **_: Any) -> None:
        started.append(start())
        raise KeyboardInterrupt

    monkeypatch.setattr("mtp_train.trainer.chaos.harass", interrupted)
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "executable", str(training))
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--out", str(tmp_path / "out"), "--", "num_steps=3"])
    with pytest.raises(KeyboardInterrupt):
        tool.main()
    assert started[0].poll() is not None


def test_a_training_that_is_refused_is_told_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "chaos.py"), "--out", str(tmp_path), "--", "no_such=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and f"{tmp_path}/whole.log says why" in done.stderr and "Traceback" not in done.stderr
    assert "no_such" in (tmp_path / "whole.log").read_text(encoding="utf-8")
