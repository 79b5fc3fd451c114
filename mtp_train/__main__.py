"""What ``python -m mtp_train`` prints: the stages, in the order of a run, and what each does."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from mtp_train.commandline import conf_dir

# As a run goes through them; whatever else has settings of its own comes behind.
_ORDER = ("regenerate", "precompute", "train", "evaluate", "export")


def overview() -> str:
    """A line for each stage: its command and the first line of its docstring; no stage is imported for it."""
    names = [path.stem for path in sorted(conf_dir().glob("*.yaml"))]
    lines = ["stages:"]
    for name in sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)):
        said = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))) or ""
        lines.append(f"  python -m mtp_train.{name:<12}{said.splitlines()[0]}")
    return "\n".join([*lines, "each with --help, which lists its settings"])


if __name__ == "__main__":
    if words := [word for word in sys.argv[1:] if word not in ("--help", "-h")]:
        print(f"mtp-train: expected a stage as below, found {' '.join(words)!r}\n{overview()}", file=sys.stderr)
        sys.exit(2)
    print(overview())
