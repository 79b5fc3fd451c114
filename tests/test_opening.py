"""What names a target on a tool's command line, and the same in the words of the stages that the tool starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_train.commandline import as_text, quoted
from mtp_train.opening import as_settings, open_named_target
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
    import subprocess
    import sys

    import yaml

    path = write_tiny_llama(tmp_path / "a, it's (1)")
    words = ["local", f"path={path}", "name=tiny"]
    assert open_named_target(words).path == path
    command = [sys.executable, "-m", "mtp_train.train", "--cfg", "job", *as_settings(words)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    assert yaml.safe_load(shown.stdout)["target"] == {"name": "tiny", "kind": "path", "path": str(path), "trust_remote_code": False}
