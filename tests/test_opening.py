"""What names a target on a tool's command line, and the same in the words of the stages that the tool starts."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_train.commandline import as_text, quoted
from mtp_train.opening import as_settings, open_named_target, target_apart
from mtp_train.stage import _readable
from tests.conftest import write_tiny_llama

PATHS = ["ta,rget", "my target (1)", "it's", 'a "b"', "back\\slash", "end\\", "[1, 2]", "a=b", "true", "Läufe"]


@pytest.mark.parametrize("text", PATHS)
def test_a_path_comes_to_the_stage_as_it_was_typed(text: str) -> None:
    """Through all that a stage does with its command line: the quoting of what Hydra cannot read, and Hydra's own grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = as_text([*as_settings(["local", f"path={text}", "trust_remote_code=false"]), f"run={quoted(text)}"], readable=_readable)
    found = [OverridesParser.create().parse_override(word) for word in words]
    assert [(one.key_or_group, one.value()) for one in found] == [
        ("target", "local"),
        ("target.path", text),
        ("target.trust_remote_code", False),
        ("run", text),
    ]


def test_a_target_behind_such_a_path_is_opened_by_tool_and_stage(tmp_path: Path) -> None:
    """A stage composes its settings of the words that the tool hands it."""

    import yaml

    path = write_tiny_llama(tmp_path / "a, it's (1)")
    words = ["local", f"path={path}", "name=tiny"]
    assert open_named_target(words).path == path
    command = [sys.executable, "-m", "mtp_train.train", "--cfg", "job", *as_settings(words)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    assert yaml.safe_load(shown.stdout)["target"] == {"name": "tiny", "kind": "path", "path": str(path), "trust_remote_code": False}


def parsed(tool: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the tool's own parser makes of a command line."""
    spec = importlib.util.spec_from_file_location(tool, Path(__file__).resolve().parent.parent / "tools" / f"{tool}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [tool, *words])
    found: argparse.Namespace = module.parse()
    return found


LOCAL = ["local", "path=/x", "name=mine"]


@pytest.mark.parametrize("behind", [[], ["--seeds", "3", "4"], ["--seeds", "3", "4", "--"]])
@pytest.mark.parametrize("target", [LOCAL, ["smollm2_135m"]])
def test_variants_may_stand_behind_the_target(target: list[str], behind: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with options behind them, or behind all options and ``--``."""
    variants = ["exact: losses.topk_kl=0", "path: x=1"]
    words = (
        ["--run", "R", "--target", *target, *behind, *variants]
        if "--" in behind
        else ["--target", *target, *variants, *behind, "--run", "R"]
    )
    found = parsed("compare_trainings", *words, monkeypatch=monkeypatch)
    assert (found.target, found.variants, found.run) == (target, variants, Path("R"))
    assert found.seeds == ([3, 4] if behind else [0, 1, 2])


def test_settings_of_the_engine_may_stand_behind_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ["--run", "R", "--name", "mtp"]
    for words in (
        [*base, "--target", *LOCAL, "dtype=float32", "batch_size=2"],
        [*base, "--target", *LOCAL, "dtype=float32", "batch_size=2", "--num-repeats", "5"],
        [*base, "--target", *LOCAL, "dtype=float32", "--num-repeats", "5", "--", "batch_size=2"],
        ["dtype=float32", "batch_size=2", "--target", *LOCAL, *base],
    ):
        found = parsed("measure_costs", *words, monkeypatch=monkeypatch)
        assert (found.target, found.settings, found.name) == (LOCAL, ["dtype=float32", "batch_size=2"], "mtp"), words
        assert found.num_repeats == (5 if "5" in words else parsed("measure_costs", *base, monkeypatch=monkeypatch).num_repeats)


def test_what_names_no_target_is_left_as_it_was_typed() -> None:
    for words in (["--target"], ["--target", "--run", "R"], ["--run", "R", "--", "--target", "x", "y"], ["--target", "none", "path=/x"]):
        assert target_apart(words) == words
    with pytest.raises(ValueError, match=r"target: expected one of .*found 'none'"):
        open_named_target(["none", "path=/x"])
