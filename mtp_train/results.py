"""What the tools that measure do with a table: print it, and keep it only where they are told to, beside the command that gave it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_train.runtime import atomic_write_json, atomic_write_text


def positive(text: str) -> int:
    """An option's type: a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return value


def add_results_option(parser: argparse.ArgumentParser) -> None:
    """``--results FOLDER``."""
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="also keep the table there, as Markdown and JSON; tools/results/ holds the README's",
    )


def command_of(parser: argparse.ArgumentParser, words: argparse.Namespace) -> str:
    """The command that the words came from: what differs from the defaults, a path as its option's name, since those of one machine say
    nothing on another."""
    shown = []
    for name, value in vars(words).items():
        if name == "results" or value == parser.get_default(name):
            continue
        shown.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Path):
            shown.append(name.upper())
        elif value is not True:
            shown += map(str, value) if isinstance(value, list | tuple) else [str(value)]
    return " ".join(["python", f"tools/{parser.prog}", *shown])


def keep(text: str, document: Mapping[str, Any], *, name: str, folder: Path | None) -> None:
    """Print the table, and write ``<name>.md`` and ``<name>.json`` (``document``) into the folder, where there is one."""
    print(text)
    if folder is not None:
        atomic_write_json(folder / f"{name}.json", dict(document))
        atomic_write_text(folder / f"{name}.md", text)
