"""A tool that measures prints its table, keeps it only where it is told to, and states the command that gave it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from mtp_train.results import add_results_option, command_of, keep, positive


def parse(*words: str) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="bench_x.py")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    add_results_option(parser)
    return parser, parser.parse_args(words)


def test_the_command_holds_what_was_changed_and_no_path() -> None:
    assert command_of(*parse()) == "python tools/bench_x.py"
    words = ["--run", "/some/where", "--batch-sizes", "1", "4", "--repeats", "5", "--small", "--results", "/else/where"]
    assert command_of(*parse(*words)) == "python tools/bench_x.py --run RUN --batch-sizes 1 4 --small"


def test_a_table_is_kept_where_it_is_told_to_and_nowhere_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = parse()
    keep("| a |\n", {"rows": [1]}, name="bench_x", folder=words.results)
    assert capsys.readouterr().out == "| a |\n\n" and words.results is None
    keep("| a |\n", {"rows": [1]}, name="bench_x", folder=tmp_path / "results")
    assert (tmp_path / "results" / "bench_x.md").read_text(encoding="utf-8") == "| a |\n"
    assert json.loads((tmp_path / "results" / "bench_x.json").read_text(encoding="utf-8")) == {"rows": [1]}


@pytest.mark.parametrize("word", ["0", "-1", "1.5", "many", ""])
def test_a_count_is_at_least_one(word: str) -> None:
    assert positive("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number of at least 1, found"):
        positive(word)


def test_no_tool_that_measures_writes_into_the_project_unasked() -> None:
    tools = sorted((Path(__file__).parent.parent / "tools").glob("bench_*.py"))
    assert len(tools) >= 9
    assert not [tool.name for tool in tools if '/ "results"' in tool.read_text(encoding="utf-8")]
