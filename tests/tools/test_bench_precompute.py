"""Too few responses for the repeats are told before the target is opened."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repeats", "2", "--per-repeat", "16"], "expected at least 32 responses, others for every repeat, found 20"),
        (["--repeats", "0"], "repeats and per_repeat: expected at least 1, found 0 and 16"),
    ],
)
def test_too_few_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    spec = importlib.util.spec_from_file_location("bench_precompute_tool", ROOT / "tools" / "bench_precompute.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "read_responses", lambda folder: [None] * 20)
    monkeypatch.setattr(sys, "argv", ["bench_precompute.py", "--responses", str(tmp_path), *words])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err
