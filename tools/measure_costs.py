"""Measure what decoding steps cost and keep the table in a run's report: verifying by batch size and tokens, drafting by batch size.

python tools/measure_costs.py --run runs/demo --name mtp                      # in the reference engine
python tools/measure_costs.py --run runs/demo --name mtp --engine vllm enforce_eager=true cpu_threads=1
python tools/measure_costs.py --run runs/demo --name none                     # the target alone, for schemes without a head

The table lands in RUN/report/costs/; the report takes it up when `evaluate` runs again (all that is measured stays), and `advise`
reads it there. Words at the end set the engine's own settings (conf/engine/). Times are on the wall's clock: let nothing else run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mtp_train.opening import add_target_option, target_apart


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run's folder")
    parser.add_argument("--name", required=True, help="the head: a folder in RUN/checkpoint/; none: the target alone")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="default: %(default)s")
    add_target_option(parser)
    numbers: dict[str, Any] = {"type": int, "nargs": "+"}
    parser.add_argument("--batch-sizes", **numbers, default=[1, 2, 4, 8, 16], help="sequences at once, ascending (default: %(default)s)")
    parser.add_argument(
        "--num-tokens",
        **numbers,
        default=[1, 2, 4, 6],
        help="that the target reads of each sequence, ascending; 1, plain decoding, among them (default: %(default)s)",
    )
    parser.add_argument(
        "--draft-lengths",
        **numbers,
        default=[1, 5],
        help="two or more, each one less than one of --num-tokens; Medusa's: up to its num_heads (default: %(default)s)",
    )
    parser.add_argument("--context-tokens", type=int, default=256, help="that each sequence holds, at least 2 (default: %(default)s)")
    parser.add_argument("--num-repeats", type=int, default=9, help="timings of each cell, at least 3 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=None, help="a report's folder; default: RUN/report")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the engine, such as dtype=float32")
    return parser.parse_intermixed_args(target_apart(sys.argv[1:]))


def measure(arguments: argparse.Namespace) -> Path:
    """Time and keep; returns the table's path."""
    import tempfile

    from mtp_train.acceptance.costs import write_costs
    from mtp_train.checkpoint import check_head, read_head_config
    from mtp_train.engine.base import CostsAsked, Engine
    from mtp_train.engine.costs import measure_costs
    from mtp_train.exporter.vllm import VllmExporter
    from mtp_train.opening import head_loader, open_named_target
    from mtp_train.run import check_target
    from mtp_train.stage import build, check_name, load_word

    asked = CostsAsked(
        batch_sizes=tuple(arguments.batch_sizes),
        num_tokens=tuple(arguments.num_tokens),
        draft_lengths=() if arguments.name == "none" else tuple(arguments.draft_lengths),
        context_tokens=arguments.context_tokens,
        num_repeats=arguments.num_repeats,
        seed=arguments.seed,
    )
    target = open_named_target(arguments.target)
    check_target(arguments.run, arguments.out or arguments.run / "report", target.identity(), tool=True)
    checkpoint = None if arguments.name == "none" else arguments.run / "checkpoint" / check_name(arguments.name)
    if checkpoint is not None:
        check_head(read_head_config(checkpoint), target.identity(), where=checkpoint)
    changed = load_word("engine", arguments.engine, *arguments.settings)
    if arguments.engine == "vllm":
        changed["scratch"] = None
    engine: Engine = build(changed, target_path=target.path, trust_remote_code=target.trust_remote_code, load_head=head_loader(target))
    with tempfile.TemporaryDirectory() as folder:
        draft = checkpoint
        if checkpoint is not None and arguments.engine == "vllm":
            exporter = VllmExporter(dtype="float32", allow_plugin=True, trust_remote_code=target.trust_remote_code, overwrite=False)
            draft = exporter.export(checkpoint, target.path, Path(folder) / "served").path
        table = measure_costs(engine, target=target.spec, checkpoint=checkpoint, draft=draft, asked=asked)
    return write_costs(table, arguments.out or arguments.run / "report")


def main() -> int:
    arguments = parse()

    from mtp_train.faults import telling

    with telling("measure_costs"):
        path = measure(arguments)

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mtp_train.acceptance.costs import read_costs
    from mtp_train.acceptance.report_costs import cells_table

    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in read_costs(path.parent.parent):
        unit, columns, rows = cells_table(table)
        shown = Table(title=Text(f"{unit}: {table.label}"), title_justify="left")
        for column in columns:
            shown.add_column(column, justify="right")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    print(f"costs: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
