"""What would part the samples that are trained on from those that are measured on is refused before anything is trained; what was
trained in another precision, before anything is compared."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["first:", "second: seed=5"], "found seed=5"),
        (["first:", "second: head.seed=5"], "found head.seed=5"),
        (["first:", "second: num_steps=3", "--common", "+validation.fraction=0.1"], "found +validation.fraction=0.1"),
        (["first:", "--seeds", "1", "0", "1"], "seeds: expected each once, since prompts would count twice, found [1, 0, 1]"),
        (["first:", "--fraction", "0"], "fraction: expected a share of the prompts between 0 and 1 to hold out, found 0.0"),
        (["first:", "--num-speculative-tokens", "0"], "--num-speculative-tokens: expected a whole number of at least 1, found '0'"),
    ],
)
def test_settings_that_the_tool_sets_itself_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "compare_trainings.py"), *words, "--run", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def tool() -> Any:
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("compare_trainings", ROOT / "tools" / "compare_trainings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heads(folder: Path, **precisions: str) -> dict[str, list[Path]]:
    """Heads of two seeds for each variant, of which nothing but ``head.json`` is there; a variant's precisions are one for each seed."""
    found: dict[str, list[Path]] = {}
    for name, words in precisions.items():
        for seed, precision in enumerate(words.split()):
            path = folder / f"{name}-{seed}"
            path.mkdir(parents=True)
            stated = {"format_version": 1, "head": "mtp", "method": "", "hidden_state": "post_norm", "settings": {}, "target": {}}
            stated |= {"made_by": {"settings": {"precision": precision}}, "weights_sha256": ""}
            (path / "head.json").write_text(json.dumps(stated), encoding="utf-8")
            found.setdefault(name, []).append(path)
    return found


def test_trainings_in_different_precisions_are_refused(tool: Any, tmp_path: Path) -> None:
    """Between variants and between seeds of one, with both named; but not where a variant's settings ask for it."""
    plain = {"a": "", "b": "losses.topk_kl=1"}
    assert tool.check_precisions(heads(tmp_path / "1", a="bf16 bf16", b="bf16 bf16"), plain) == {"a": "bf16", "b": "bf16"}
    with pytest.raises(ValueError, match=r"precision: expected trainings in one, found bf16 \(a-1\), fp32 \(b-1\); delete"):
        tool.check_precisions(heads(tmp_path / "2", a="bf16 bf16", b="fp32 fp32"), plain)
    with pytest.raises(ValueError, match=r"found bf16 \(b-1\), fp32 \(b-0\)"):
        tool.check_precisions(heads(tmp_path / "3", a="bf16 bf16", b="fp32 bf16"), plain)
    asked = {"a": "", "b": "++precision=fp32"}
    assert tool.check_precisions(heads(tmp_path / "4", a="bf16 bf16", b="fp32 fp32"), asked) == {"a": "bf16", "b": "fp32"}


def test_the_report_says_what_was_trained_and_estimated_in(tool: Any) -> None:
    words = argparse.Namespace(seeds=[0], num_speculative_tokens=2)
    drafts = {"num_prompt_tokens": 3, "token_ids": (1, 2), "accepted": (1,), "num_drafts": 4, "num_drafted_per_position": (4, 4)}
    prompt = tool.PromptAcceptance(prompt_id="0/p", category="", num_accepted_per_position=(2, 1), **drafts)
    found = {"a": [[prompt]], "b": [[prompt]]}
    text, _ = tool.report(["a", "b"], found, words, precisions={"a": "bf16", "b": "bf16"}, dtype="float32")
    assert "\nTrained in bf16; estimated in float32.\n" in text
    text, _ = tool.report(["a", "b"], found, words, precisions={"a": "bf16", "b": "fp32"}, dtype="float32")
    assert "\nTrained in bf16 (a), fp32 (b); estimated in float32.\n" in text
