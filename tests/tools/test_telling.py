"""What a user gets wrong in a tool is told in words, as a stage tells it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.parametrize("path", sorted(_TOOLS.glob("*.py")), ids=lambda path: path.stem)
def test_every_tool_tells_errors_under_its_own_name(path: Path) -> None:
    assert f'telling("{path.stem}")' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("render_report", ["nowhere"]),
        ("bench_startup", ["--run", "nowhere"]),
    ],
)
def test_what_is_missing_is_named_without_a_traceback(tool: str, words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(_TOOLS / f"{tool}.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"mtp-train {tool}: nowhere" in done.stderr
    assert "expected" in done.stderr and "Traceback" not in done.stderr
