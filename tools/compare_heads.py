"""Every kind of head on one cache with one budget: trained, decoded with as chain and as tree, timed, in one table.

python tools/compare_heads.py --run runs/demo --out runs/demo/heads          # after jobs/demo.sh; about half an hour on two cores
python tools/compare_heads.py --run runs/demo --out runs/demo/heads --heads eagle3 medusa -- num_steps=120

All heads see the same samples in the same number of steps of the same number of tokens (those of --experiment, and the settings of
mtp_train.train behind ``--``); what a head needs besides (deeper unrolls, tapped layers, a small model to begin with) is in HEADS below
and in the table. Speed of training is measured apart, at the end: a few steps of each head in turn, one process of --threads threads at a
time, median of all steps but each one's first. What is there already is not made again: an interrupted call is continued by calling it
again. Writes heads.md, heads.json and the report of all heads (report/index.html) into --out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mtp_train.commandline import quoted
from mtp_train.opening import add_target_option, as_settings, target_apart

# What each head is, beyond the settings that all share. {out}: the folder of this comparison.
_DISTILLED = "noise_scale=0 losses.hidden_l1=0 losses.topk_kl=0 +losses.forward_kl=1.0"
HEADS = {
    "mtp": "head=mtp",
    "mtp_unrolled": "head=mtp draft_steps=3",
    "mtp_blocks": "head=mtp head.num_blocks=3 draft_steps=3",
    "eagle": "head=eagle",
    "eagle3": "head=eagle3 cache={out}/taps draft_steps=3 noise_scale=0 losses.hidden_l1=0",
    "medusa": "head=medusa draft_steps=5",
    "draft_model": f"head=draft_model head.config=null head.checkpoint={{out}}/small {_DISTILLED}",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run with responses/ and a finished cache/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), help="default: all")
    add_target_option(parser)
    parser.add_argument("--experiment", default="demo", help="of conf/experiment: the budget, and how is measured")
    parser.add_argument(
        "--draft-layers", type=int, nargs="+", default=[0, 1, 2, 3, 28, 29], help="the target's layers in the small draft model"
    )
    parser.add_argument("--tree-nodes", type=int, default=15, help="drafted tokens that a tree has judged")
    parser.add_argument("--evaluate", nargs="*", default=[], help="further settings of mtp_train.evaluate")
    parser.add_argument("--side-by-side", type=int, default=2, help="processes at a time, for what is not timed")
    parser.add_argument("--timed-steps", type=int, default=5, help="steps of each timed training; 0: no timing")
    parser.add_argument("--repeats", type=int, default=3, help="of the timing")
    parser.add_argument("--threads", type=int, default=1, help="of every process")
    parser.add_argument("settings", nargs="*", help="of mtp_train.train, for all heads")
    return parser.parse_args(target_apart(sys.argv[1:]))


def main() -> int:
    arguments = parse()

    from mtp_train.faults import telling

    with telling("compare_heads"):
        print(compare(arguments))
    return 0


def compare(arguments: argparse.Namespace) -> str:
    """Make what is missing, measure, and write the table; its text."""
    from mtp_train.runtime import atomic_write_json, atomic_write_text, progress, provenance

    check(arguments)
    heads, out = arguments.heads, arguments.out
    prepare(arguments)
    steps = [
        ("trained", [lambda name=name: train(arguments, name, out / "checkpoint" / name) for name in heads]),
        ("measured", [lambda name=name, tree=tree: evaluate(arguments, name, tree=tree) for name in heads for tree in (False, True)]),
    ]
    for what, calls in steps:
        with ThreadPoolExecutor(arguments.side_by_side) as pool, progress(desc=f"heads {what}", unit="run", total=len(calls)) as bar:
            faults = [fault for fault in pool.map(lambda call: bar_after(bar, call), calls) if fault]
        if faults:
            raise ValueError("; ".join(faults))
    speeds = timed(arguments) if arguments.timed_steps else {}
    rows = [row(arguments, name, speeds.get(name)) for name in heads]
    words = {key: str(value) for key, value in vars(arguments).items()}
    atomic_write_json(out / "heads.json", {**provenance(), "arguments": words, "rows": rows})
    text = table(rows)
    atomic_write_text(out / "heads.md", text)
    return text


def check(arguments: argparse.Namespace) -> None:
    """ValueError for words that would end what takes half an hour with nothing to show."""
    if len(set(arguments.heads)) < len(arguments.heads):
        raise ValueError(f"heads: expected each once, found {' '.join(arguments.heads)}")
    if arguments.timed_steps != 0 and (arguments.timed_steps < 2 or arguments.repeats < 1):
        raise ValueError(
            "timed_steps: expected 0, or at least 2 (the first is left out) with repeats of at least 1, found "
            f"{arguments.timed_steps} and {arguments.repeats}"
        )
    if arguments.side_by_side < 1:
        raise ValueError(f"side_by_side: expected at least 1, found {arguments.side_by_side}")


def bar_after(bar: Any, call: Callable[[], str | None]) -> str | None:
    fault = call()
    bar.update(1)
    return fault


def prepare(arguments: argparse.Namespace) -> None:
    """The cache with tapped layers, and the small draft model, where a head needs them."""
    from mtp_train.stage import load_word
    from mtp_train.target.cut import write_cut_model
    from mtp_train.target.resolve import resolve_target

    if "draft_model" in arguments.heads:
        source = resolve_target(load_word("target", *arguments.target))
        write_cut_model(source, arguments.out / "small", layers=arguments.draft_layers)
    if "eagle3" in arguments.heads:
        words = [f"out={quoted(arguments.out / 'taps')}", "target_layer_ids=null"]
        if fault := stage(arguments, "precompute", words, log="taps"):
            raise ValueError(fault)


def train(arguments: argparse.Namespace, name: str, out: Path, *further: str) -> str | None:
    words = []
    for word in HEADS[name].split():
        key, _, value = word.partition("=")
        words.append(f"{key}={quoted(value.format(out=arguments.out))}" if "{out}" in value else word)
    return stage(arguments, "train", [f"name={name}", f"out={quoted(out)}", *arguments.settings, *words, *further], log=f"train-{name}")


def evaluate(arguments: argparse.Namespace, name: str, *, tree: bool) -> str | None:
    decoding = tree_of(name) if tree else "chain"
    words = [
        f"name={name}",
        f"checkpoint={quoted(arguments.out / 'checkpoint' / name)}",
        f"out={quoted(arguments.out / 'report')}",
        f"decoding={decoding}",
    ]
    words += [f"decoding.max_nodes={arguments.tree_nodes}"] if tree else []
    words += ["aims=[]", "identity.num_prompts=0", "ways.greedy.prompt_sets=[project]", "ways.sampled.prompt_sets=[]"]
    return stage(arguments, "evaluate", [*words, *arguments.evaluate], log=f"evaluate-{name}-{decoding}")


def tree_of(name: str) -> str:
    return "medusa_tree" if name == "medusa" else "dynamic_tree"


def stage(arguments: argparse.Namespace, verb: str, words: Sequence[str], *, log: str) -> str | None:
    """Run one stage in a process of its own; what went wrong, None where nothing did."""
    from mtp_train.runtime import environment_apart

    command = [sys.executable, "-m", f"mtp_train.{verb}", f"experiment={arguments.experiment}", *as_settings(arguments.target)]
    path = arguments.out / "logs" / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = environment_apart() | {"OMP_NUM_THREADS": str(arguments.threads)}
    with open(path, "wb") as stream:
        whole = [*command, f"run={quoted(arguments.run)}", *words]
        done = subprocess.run(whole, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, check=False)
    if done.returncode == 0:
        return None
    tail = " ".join(path.read_text(encoding="utf-8", errors="replace").split())[-400:]
    return f"{verb} {log}: expected exit status 0, found {done.returncode}: {tail} (all of it: {path}); mend it and call again"


def timed(arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of training each head, kept in speeds.json; every repeat goes through all heads in turn.

    What is kept holds for the settings that it was timed with: under others all of it is timed anew.
    """
    from mtp_train.runtime import atomic_write_json, read_json
    from mtp_train.trainer.metrics import METRICS, read_metrics

    path = arguments.out / "speeds.json"
    further = [
        f"num_steps={arguments.timed_steps}",
        "log_every=1",
        "validation.fraction=0.05",
        "validation.every=null",
        "checkpoint.every=null",
    ]
    timed_with = {name: [*HEADS[name].split(), *arguments.settings, *further] for name in HEADS}
    about = {"settings": timed_with, "threads": arguments.threads, "experiment": arguments.experiment, "target": arguments.target}
    about |= {"run": str(arguments.run), "draft_layers": arguments.draft_layers}
    kept = read_json(path) if path.is_file() else {}
    found: dict[str, list[float]] = kept["tokens_per_s"] if kept.get("about") == about else {name: [] for name in HEADS}
    left = [name for _ in range(arguments.repeats) for name in arguments.heads]
    enough = (arguments.timed_steps - 1) * arguments.repeats
    for name in left:
        if len(found[name]) >= enough:
            continue
        with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
            if fault := train(arguments, name, Path(folder) / name, *further):
                raise ValueError(fault)
            lines = [line for line in read_metrics(Path(folder) / name / METRICS) if line["split"] == "train"]
        found[name] += [float(line["tokens_per_s"]) for line in lines[1:]]
        atomic_write_json(path, {"about": about, "tokens_per_s": found})
    return {name: statistics.median(found[name]) for name in arguments.heads}


def row(arguments: argparse.Namespace, name: str, speed: float | None) -> dict[str, Any]:
    """A head's figures as plain JSON; an interval is (value, low, high)."""
    from mtp_train.acceptance.interval import rates_and_length
    from mtp_train.acceptance.report import read_report

    report = read_report(arguments.out / "report")
    # Of all that --evaluate may have asked for: greedy, on the first set of prompts.
    greedy = [item for item in report.measurements if item.head == name and not item.is_estimate and item.acceptance.temperature == 0]
    of_head = [item.acceptance for item in greedy if item.prompt_set == greedy[0].prompt_set]
    measured = {"chain" if acceptance.scheme == "chain" else "tree": acceptance for acceptance in of_head}
    if len(measured) < 2:
        raise ValueError(f"evaluate: expected {name} measured greedily, as chain and as tree, found {', '.join(measured) or 'neither'}")
    rates, chain = rates_and_length(measured["chain"].prompts, measured["chain"].num_speculative_tokens)
    tree = rates_and_length(measured["tree"].prompts, measured["tree"].num_speculative_tokens)[1]
    head = next(head for head in report.heads if head.name == name)
    return {
        "head": name,
        "settings": HEADS[name],
        "rates": rates,
        "chain_length": chain,
        "tree": tree_of(name),
        "tree_nodes": arguments.tree_nodes,
        "tree_length": tree,
        "tokens_per_s": speed,
        "parameters": head.facts["parameters"],
        "bytes": (arguments.out / "checkpoint" / name / "head.safetensors").stat().st_size,
        "steps": head.facts["steps"],
        "tokens": head.facts["tokens trained on"],
        "num_prompts": len(measured["chain"].prompts),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, the longest chain first."""
    depth = max(len(row["rates"]) for row in rows)
    positions = " | ".join(["position 1", *map(str, range(2, depth + 1))])
    lines = [f"| head | {positions} | length, chain | length, tree | training tokens/s | parameters | file |", "|---" * (depth + 6) + "|"]
    for one in sorted(rows, key=lambda row: -row["chain_length"][0]):
        rates = [f"{rate[0]:.3f}" for rate in one["rates"]]
        cells: Iterable[str] = [f"`{one['head']}`", with_range(one["rates"][0]), *rates[1:], *[""] * (depth - len(rates))]
        speed = "" if one["tokens_per_s"] is None else f"{one['tokens_per_s']:,.0f}"
        cells = [
            *cells,
            with_range(one["chain_length"]),
            with_range(one["tree_length"]),
            speed,
            one["parameters"],
            f"{one['bytes'] / 1e6:.0f} MB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]
    about = f"{first['steps']} steps, {first['tokens']:,} tokens each; greedy, {first['num_prompts']} held-out prompts; 95% over prompts. "
    about += f"Trees have {first['tree_nodes']} nodes judged at the most."
    return "\n".join([*lines, "", about]) + "\n"


def with_range(found: Sequence[float | None]) -> str:
    value, low, high = found
    return f"{value:.3f}" if low is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
