"""A plan for people: tables on the terminal; and for programs: JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mtp_train.planning.plan import DEFAULT_RULE, ModeRow, Plan
from mtp_train.quantity import show_bytes, show_count, show_duration, show_flops

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_plan(plan: Plan, console: Console, *, told: Sequence[str]) -> None:
    """All of a plan, in the order of the stages. ``told``: what train is told beside how the work is shared out."""
    work, target, head, hardware = plan.work, plan.target, plan.head, plan.hardware
    console.print(
        f"{target.name}: {target.num_parameters:,} parameters, {target.num_layers} layers, hidden {target.hidden_size}, "
        f"vocabulary {target.vocab_size}\n"
        f"head={head.word}: {head.weights.total:,} parameters ({show_count(head.weights.num_active)} in a token's products); embedding and "
        f"lm_head are the target's own, {show_bytes(2 * target.num_shared)} in bf16\n"
        f"{hardware.num_devices} x {hardware.device}; {show_count(work.num_tokens)} tokens, {work.answer_share:.0%} of them answers, "
        f"{work.mean_length_tokens} per conversation",
        highlight=False,
        markup=False,
    )
    for title, table in (_caches(plan), _memory(plan), _engines(plan), _stages(plan)):
        console.print(f"\n[bold]{title}[/bold]", highlight=False)
        console.print(table)
    note = "*: what the settings ask for. An empty cell of the memory: at that moment nothing, or under a thousandth of all."
    console.print(f"{note}\n{_precision(plan)}\n", highlight=False, markup=False, soft_wrap=True)
    console.print(_verdict(plan, told), highlight=False, markup=False, soft_wrap=True)  # commands stay whole


def _precision(plan: Plan) -> str:
    """What training is reckoned in, and where the machine's rate is of other products: no rate is made up for those."""
    name, dtype = plan.hardware.name, plan.hardware.flops_dtype
    auto = "auto, " if plan.asked.precision == "auto" else ""
    told = f"precision: {auto}{plan.precision}. flops_per_s of {name} is of {dtype} (hardware.flops_dtype)"
    if plan.precision == plan.hardware.own_precision:
        return f"{told}{'; train itself asks its device' if auto else ''}."
    other = "float32" if plan.precision == "fp32" else "bfloat16"
    return (
        f"{told}, and so are all times here; training in {other} takes longer, and its memory alone is reckoned: give its rate where you "
        f"have it (hardware.flops_per_s=..., hardware.flops_dtype={other})."
    )


def _caches(plan: Plan) -> tuple[str, Table]:
    taps = f", {plan.work.num_taps} tapped layers" if plan.work.num_taps else ""
    table = _table("codec", "per token", "in all", "fits")
    for row in plan.caches:
        table.add_row(
            _asked(row.codec, row.codec == plan.asked.codec), show_bytes(row.bytes_per_token), show_bytes(row.total_bytes), _yes(row.fits)
        )
    return f"Cache (top_k={plan.work.top_k}{taps}; disk {show_bytes(plan.hardware.disk_bytes)})", table


def _memory(plan: Plan) -> tuple[str, Table]:
    """Sources down, modes across, as at each mode's fullest moment."""
    title = f"Training memory per process, {plan.work.tokens_per_pack} tokens a pack (usable: {show_bytes(plan.hardware.usable_bytes)})"
    table = _table("", *(_asked(row.memory.mode, row.memory.mode == plan.asked.mode) for row in plan.modes))
    sources = dict.fromkeys(source for row in plan.modes for source in row.memory.sources)
    for source in sources:
        shares = [(row.memory.sources.get(source, 0), row.memory.total) for row in plan.modes]
        if any(size > total / 1000 for size, total in shares):
            table.add_row(source, *(show_bytes(size) if size > total / 1000 else "" for size, total in shares))
    table.add_section()
    table.add_row("fullest at", *(row.memory.moment for row in plan.modes))
    table.add_row("in all", *(show_bytes(row.memory.total) for row in plan.modes))
    table.add_row("fits", *(_yes(row.fits) for row in plan.modes))
    table.add_row("optimizer.rule", *(row.rule if row.possible else f"needs {row.rule}" for row in plan.modes))
    table.add_row("time", *(show_duration(row.work.seconds) for row in plan.modes))
    return title, table


def _engines(plan: Plan) -> tuple[str, Table]:
    table = _table("tensor parallel", "copies", "weights", "for KV cache", "sequences at once")
    for layout in plan.layouts:
        size = layout.batch_size or "does not fit"
        word = _asked(str(layout.tensor_parallel), layout == plan.layout)
        table.add_row(word, str(layout.num_copies), show_bytes(layout.weight_bytes), show_bytes(layout.room_bytes), str(size))
    return "Target in the engine, per device", table


def _stages(plan: Plan) -> tuple[str, Table]:
    priced = plan.hardware.usd_per_hour is not None
    assumed = ", ".join(f"{name} {value:g}" for name, value in asdict(plan.assume).items() if isinstance(value, float) and value < 1)
    title = f"Work and time (assumed shares of the machine's rates: {assumed})"
    table = _table("stage", "operations", "time", "bound by", *(["USD"] if priced else []))
    for stage in plan.stages:
        money = [f"{plan.usd(stage.seconds):.2f}"] if priced else []
        table.add_row(stage.stage, show_flops(stage.flops), show_duration(stage.seconds), stage.bound_by, *money)
    table.add_section()
    flops = sum(stage.flops for stage in plan.stages)
    table.add_row("all", show_flops(flops), show_duration(plan.seconds), "", *([f"{plan.usd(plan.seconds):.2f}"] if priced else []))
    return title, table


def _command(plan: Plan, row: ModeRow, told: Sequence[str]) -> str:
    """The training of one way of sharing the work, ready to paste but for the run."""
    processes = row.memory.num_processes
    words = ["python"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes)]
    words += ["-m", "mtp_train.train", *told, f"parallel={row.memory.mode}"]
    words += [f"parallel.context={plan.asked.context}"] if processes > 1 and plan.asked.context > 1 else []
    words += [f"optimizer.rule={row.rule}"] if row.rule != DEFAULT_RULE else []
    return shlex.join([*words, f"packs_per_step={plan.work.packs_per_step}"])


def _verdict(plan: Plan, told: Sequence[str]) -> str:
    lines = []
    if plan.cheapest is None or plan.cheapest_s is None:
        lines.append("No setting fits this machine.")
    else:
        words = " ".join(f"{key}={value}" for key, value in plan.cheapest.items())
        money = plan.usd(plan.cheapest_s)
        lines.append(
            f"Cheapest that fits: {words}: {show_duration(plan.cheapest_s)}"
            + (f", {money:.2f} USD" if money is not None else " (no price given: hardware.usd_per_hour=)")
        )
    asked = next(row for row in plan.modes if row.memory.mode == plan.asked.mode)
    if plan.cheapest is not None:
        best = next(row for row in plan.modes if row.memory.mode == plan.cheapest["parallel"])
        lines.append(f"Its training: {_command(plan, best, told)} run=...")
        if asked is not best and asked.fits and not plan.conflicts:
            lines.append(f"That asked for: {_command(plan, asked, told)} run=...")
    if plan.asked.rule is None and asked.rule != DEFAULT_RULE:
        lines.append(
            f"parallel={plan.asked.mode} needs optimizer.rule={asked.rule}: add it to train's command ({DEFAULT_RULE} if nothing is said)"
        )
    if needing := [row for row in plan.modes if row.fits and not row.possible]:
        lines.append(f"Would fit with optimizer.rule={needing[0].rule}: " + ", ".join(f"parallel={row.memory.mode}" for row in needing))
    others = [
        f"parallel={r.memory.mode} ({show_bytes(r.memory.total)})" for r in plan.modes if not r.fits and r.memory.mode != plan.asked.mode
    ]
    others += [
        f"codec={row.codec} ({show_bytes(row.total_bytes)})" for row in plan.caches if not row.fits and row.codec != plan.asked.codec
    ]
    others += [
        f"engine.tensor_parallel_size={layout.tensor_parallel} ({show_bytes(layout.weight_bytes)} of weights on a device of "
        f"{show_bytes(plan.hardware.memory_bytes)}, {show_bytes(layout.room_bytes)} left for the KV cache)"
        for layout in plan.layouts
        if not layout.batch_size
    ]
    if others:
        lines.append("Would not fit: " + ", ".join(others))
    return "\n".join(lines)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _asked(word: str, asked: bool) -> str:
    return f"{word} *" if asked else word


def _yes(fits: bool) -> str:
    return "yes" if fits else "NO"


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything that the tables show, in plain units (bytes, seconds, operations)."""
    return {
        "target": asdict(plan.target) | {"num_parameters": plan.target.num_parameters, "num_shared": plan.target.num_shared},
        "head": asdict(plan.head) | {"num_parameters": plan.head.weights.total},
        "hardware": asdict(plan.hardware),
        "work": asdict(plan.work),
        "assume": asdict(plan.assume),
        "asked": asdict(plan.asked),
        "precision": plan.precision,
        "caches": [asdict(row) for row in plan.caches],
        "memory": [
            {
                **asdict(row.memory),
                "total_bytes": row.memory.total,
                "optimizer_rule": row.rule,
                "possible": row.possible,
                "fits": row.fits,
                "train": row.work.to_json(),
            }
            for row in plan.modes
        ],
        "engines": [asdict(layout) for layout in plan.layouts],
        "engine": None if plan.layout is None else asdict(plan.layout),
        "stages": [stage.to_json() | {"usd": plan.usd(stage.seconds)} for stage in plan.stages],
        "seconds": plan.seconds,
        "usd": plan.usd(plan.seconds),
        "cheapest": None if plan.cheapest is None else dict(plan.cheapest),
        "cheapest_seconds": plan.cheapest_s,
        "problems": list(plan.problems),
        "conflicts": list(plan.conflicts),
    }
