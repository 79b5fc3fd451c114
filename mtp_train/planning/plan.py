"""Puts a plan together: does each part fit, how long does it take, which setting is the cheapest that fits, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from mtp_train.cache.codec import CODECS, bytes_per_token
from mtp_train.cache.disk import ID_COPIES, SAMPLE_BYTES
from mtp_train.head.base import Head
from mtp_train.planning.hardware import Hardware
from mtp_train.planning.memory import MODES, ProcessMemory, process_memory
from mtp_train.planning.sizes import HeadSizes, TargetSizes
from mtp_train.planning.step import StepShape, measure_step
from mtp_train.planning.work import (
    Assumptions,
    EngineLayout,
    StageWork,
    Workload,
    engine_layouts,
    evaluate_work,
    precompute_work,
    regenerate_work,
    train_work,
)
from mtp_train.quantity import show_bytes
from mtp_train.target.weights import SharedWeights
from mtp_train.trainer.objective import Objective
from mtp_train.trainer.settings import Precision, Rule

# What train takes where nothing is said (conf/train.yaml) and the mode can.
DEFAULT_RULE: Rule = "muon"
_ID_CHARACTERS = 12  # of a prompt's id, where nothing says how long they are


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """A cache in one codec."""

    codec: str
    bytes_per_token: float
    total_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class ModeRow:
    """A training in one way of sharing the work, with the optimizer that it takes. ``possible``: where the settings ask for a rule,
    whether the mode takes that one; ``fits``: whether it has the memory, with the one that it takes."""

    memory: ProcessMemory
    rule: Rule
    possible: bool
    fits: bool
    work: StageWork


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the settings name; ``rule`` None: each mode takes train's default where it can (muon), else adamw. ``precision`` ``auto``:
    the machine's own."""

    codec: str
    mode: str
    rule: Rule | None
    context: int
    recompute: bool
    precision: str
    noise: bool
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer. ``precision`` is what that asked for comes to; ``stages`` are those of the setting asked for, as far as each fits;
    ``cheapest`` the words of the setting that takes least time of those that fit, None where none does; ``problems`` what of the
    setting asked for does not fit, and why; ``conflicts`` which of its settings do not go together on any machine, and what would."""

    target: TargetSizes
    head: HeadSizes
    hardware: Hardware
    work: Workload
    assume: Assumptions
    asked: Asked
    precision: Precision
    caches: tuple[CacheRow, ...]
    modes: tuple[ModeRow, ...]
    layouts: tuple[EngineLayout, ...]
    layout: EngineLayout | None
    stages: tuple[StageWork, ...]
    cheapest: Mapping[str, str] | None
    cheapest_s: float | None
    problems: tuple[str, ...]
    conflicts: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def usd(self, seconds: float) -> float | None:
        """What the machine costs for so long; None without a price."""
        return None if self.hardware.usd_per_hour is None else self.hardware.usd_per_hour * seconds / 3600


def make_plan(
    *,
    target: TargetSizes,
    head: HeadSizes,
    make_head: Callable[[SharedWeights], Head],
    objective: Objective,
    hardware: Hardware,
    work: Workload,
    assume: Assumptions,
    asked: Asked,
) -> Plan:
    """Work everything out. Errors: ValueError for a codec or a mode that is none."""
    caches = tuple(cache_row(word, target, hardware, work) for word in CODECS)
    cache = next((row for row in caches if row.codec == asked.codec), None)
    if cache is None:
        raise ValueError(f"codec: expected one of {[row.codec for row in caches]}, found {asked.codec!r}")
    if asked.mode not in MODES:
        raise ValueError(f"parallel: expected one of {list(MODES)}, found {asked.mode!r}")
    if asked.context < 1:
        raise ValueError(f"parallel.context: expected at least 1, found {asked.context}")
    if asked.batch_size < 1:
        raise ValueError(f"evaluate.batch_size: expected at least 1, found {asked.batch_size}")
    if asked.rule not in (None, *get_args(Rule)):
        raise ValueError(f"optimizer.rule: expected one of {get_args(Rule)}, or null, found {asked.rule!r}")
    precision = hardware.precision(asked.precision)
    modes = _mode_rows(target, head, make_head, objective, hardware, work, assume, asked, cache_bytes=cache.total_bytes)
    layouts = engine_layouts(target, hardware, assume, work)
    generated = regenerate_work(target, hardware, assume, work, layouts)
    layout = None if generated is None else generated[1]
    trained = next((row for row in modes if row.memory.mode == asked.mode and row.fits), None)
    fitting = [row for row in modes if row.fits and row.possible and _num_shares(row, asked) <= work.packs_per_step]
    best = min(fitting, key=lambda row: row.work.seconds, default=None)
    before = [] if generated is None else [generated[0], precompute_work(target, hardware, assume, work, cache_bytes=cache.total_bytes)]
    after = [] if layout is None else [evaluate_work(target, hardware, assume, work, layout, batch_size=asked.batch_size)]
    stages = (*before, *([] if trained is None else [trained.work]), *after)
    smaller = max((row for row in caches if row.fits), key=lambda row: (row.codec == asked.codec, row.total_bytes), default=None)
    cheapest, cheapest_s = None, None
    if best is not None and layout is not None and smaller is not None:
        cheapest = {
            "engine.tensor_parallel_size": str(layout.tensor_parallel),
            "engine.data_parallel_size": str(layout.num_copies),
            "codec": smaller.codec,
            "parallel": best.memory.mode,
            "optimizer.rule": best.rule,
            "packs_per_step": str(work.packs_per_step),
        }
        cheapest_s = sum(stage.seconds for stage in (*before, best.work, *after))
    return Plan(
        target=target,
        head=head,
        hardware=hardware,
        work=work,
        assume=assume,
        asked=asked,
        precision=precision,
        caches=caches,
        modes=modes,
        layouts=tuple(layouts),
        layout=layout,
        stages=stages,
        cheapest=cheapest,
        cheapest_s=cheapest_s,
        problems=tuple(_problems(target, hardware, asked, cache, modes, layouts)),
        conflicts=tuple(_conflicts(work, asked, next(row for row in modes if row.memory.mode == asked.mode))),
    )


def cache_row(codec: str, target: TargetSizes, hardware: Hardware, work: Workload) -> CacheRow:
    per_token = bytes_per_token(
        codec=codec,
        hidden_size=target.hidden_size,
        num_taps=work.num_taps,
        vocab_size=target.vocab_size,
        top_k=work.top_k,
        answer_share=work.answer_share,
    )
    per_sample = SAMPLE_BYTES + ID_COPIES * _ID_CHARACTERS
    total = round(work.num_tokens * (per_token + per_sample / work.mean_length_tokens))
    return CacheRow(codec=codec, bytes_per_token=per_token, total_bytes=total, fits=total <= hardware.disk_bytes)


def _mode_rows(
    target: TargetSizes,
    head: HeadSizes,
    make_head: Callable[[SharedWeights], Head],
    objective: Objective,
    hardware: Hardware,
    work: Workload,
    assume: Assumptions,
    asked: Asked,
    *,
    cache_bytes: int,
) -> tuple[ModeRow, ...]:
    # Nobody computes a pack together with a single process.
    steps = {c: measure_step(make_head, objective, _shape(target, hardware, work, asked, context=c)) for c in {1, asked.context}}
    rows = []
    for mode in MODES:
        processes = 1 if mode == "single" else hardware.num_devices
        context = 1 if mode == "single" else asked.context
        step = steps[context]
        packs = -(-work.packs_per_step // max(1, processes // context))
        rule: Rule = "adamw" if MODES[mode].deepspeed else asked.rule or DEFAULT_RULE
        memory = process_memory(step, head, mode=mode, rule=rule, num_processes=processes, packs_per_process=packs)
        optimizer = step.optimizers[rule]
        trained = train_work(
            target, head, hardware, assume, work, mode=mode, optimizer=optimizer, recompute=asked.recompute, cache_bytes=cache_bytes
        )
        possible = asked.rule in (None, rule)
        fits = memory.total <= hardware.usable_bytes
        rows.append(ModeRow(memory=memory, rule=rule, possible=possible, fits=fits, work=trained))
    return tuple(rows)


def _shape(target: TargetSizes, hardware: Hardware, work: Workload, asked: Asked, *, context: int) -> StepShape:
    return StepShape(
        num_tokens=work.tokens_per_pack,
        answer_share=work.answer_share,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        tied=target.tied,
        top_k=work.top_k,
        precision=hardware.precision(asked.precision),
        noise=asked.noise,
        recompute=asked.recompute,
        context=context,
        device=hardware.kind,
    )


def _problems(
    target: TargetSizes, hardware: Hardware, asked: Asked, cache: CacheRow, modes: tuple[ModeRow, ...], layouts: list[EngineLayout]
) -> list[str]:
    """Why the setting asked for has no room, with what can be done."""
    found = []
    if not cache.fits:
        found.append(
            f"cache: expected at most {show_bytes(hardware.disk_bytes)} (the disk), found {show_bytes(cache.total_bytes)} with "
            f"codec={cache.codec}; store less (codec=, top_k=, target_layer_ids=), take fewer tokens, or name a larger disk "
            "(hardware.disk_bytes=)"
        )
    mode = next(row for row in modes if row.memory.mode == asked.mode)
    if not mode.fits:
        largest, size = max(mode.memory.sources.items(), key=lambda item: item[1])
        others = [row.memory.mode for row in modes if row.fits and row.possible]
        remedy = f"choose one of {others}" if others else "set checkpoint_activations=true, or lower tokens_per_pack or chunk_rows"
        found.append(
            f"parallel={asked.mode}: expected at most {show_bytes(hardware.usable_bytes)} per process, found "
            f"{show_bytes(mode.memory.total)} ({show_bytes(size)} of it {largest}); {remedy}"
        )
    if not any(layout.batch_size for layout in layouts):
        widest = layouts[-1]
        found.append(
            f"engine: expected room for {target.name} on {hardware.num_devices} devices of {show_bytes(hardware.memory_bytes)}, found "
            f"{show_bytes(widest.weight_bytes)} of weights per device and {show_bytes(widest.room_bytes)} left for its KV cache; "
            "choose a larger machine or a quantized target (assume.weight_bytes=1)"
        )
    return found


def _num_shares(row: ModeRow, asked: Asked) -> int:
    """Processes, or groups of them that compute a pack together: each has a pack of every step."""
    return max(1, row.memory.num_processes // asked.context)


def _conflicts(work: Workload, asked: Asked, mode: ModeRow) -> list[str]:
    """Which of the settings asked for training refuses together, with what can be done."""
    found, processes = [], mode.memory.num_processes
    if asked.context > 1 and processes % asked.context:
        found.append(f"parallel.context: expected a divisor of the {processes} processes of parallel={asked.mode}, found {asked.context}")
    elif work.packs_per_step < _num_shares(mode, asked):
        found.append(
            f"packs_per_step: expected at least {_num_shares(mode, asked)}, one for each process or group of parallel.context, found "
            f"{work.packs_per_step}; raise it, or train on fewer"
        )
    if not mode.possible:
        found.append(
            f"optimizer.rule: expected {mode.rule} with parallel={asked.mode}, which cuts matrices anywhere, found {asked.rule}; set "
            f"optimizer.rule={mode.rule}, with which memory and time are given above, or choose parallel=fsdp2 or ddp"
        )
    return found
