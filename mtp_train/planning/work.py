"""Floating-point operations and time of each stage, from sizes, a machine and stated shares of what it could do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from mtp_train.acceptance.speedup import BLOCK_ROWS, padded_rows
from mtp_train.planning.hardware import Hardware
from mtp_train.planning.memory import MODES
from mtp_train.planning.sizes import HeadSizes, TargetSizes
from mtp_train.planning.step import OptimizerStep

# torch's Muon: iterations of Newton and Schulz, and how often DTensor turns a matrix from rows to columns or back for them.
_MUON_ITERATIONS, _MUON_TURNS = 5, 5


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be done. ``num_tokens`` of conversations, prompts and answers together, ``answer_share`` of them the target's own;
    ``mean_length_tokens`` per conversation; the rest are the settings of train and evaluate under their own names."""

    num_tokens: int
    answer_share: float
    mean_length_tokens: int
    top_k: int | None
    num_taps: int
    num_epochs: int
    draft_steps: int
    exact_teacher: bool
    tokens_per_pack: int
    packs_per_step: int
    num_eval_prompts: int
    max_new_tokens: int
    num_speculative_tokens: int
    acceptance_length: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.mean_length_tokens < 1:
            raise ValueError(
                f"prompt: expected num_tokens and mean_length_tokens of at least 1, found {self.num_tokens} and {self.mean_length_tokens}"
            )
        if not 0 < self.answer_share <= 1:
            raise ValueError(f"prompt.answer_share: expected above 0 and at most 1, found {self.answer_share}")
        counts = {name: getattr(self, name) for name in ("num_epochs", "tokens_per_pack", "packs_per_step")}
        counts |= {} if self.top_k is None else {"top_k": self.top_k}
        counts |= {f"evaluate.{name}": getattr(self, name) for name in ("max_new_tokens", "num_speculative_tokens")}
        counts["evaluate.num_prompts"] = self.num_eval_prompts
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name}: expected at least 1, found {count}")
        if not 1 <= self.acceptance_length <= self.num_speculative_tokens + 1:
            raise ValueError(
                f"evaluate.acceptance_length: expected from 1 to {self.num_speculative_tokens + 1}, all of "
                f"evaluate.num_speculative_tokens and the one that is free, found {self.acceptance_length}"
            )

    @property
    def num_answer_tokens(self) -> float:
        return self.num_tokens * self.answer_share

    @property
    def num_steps(self) -> int:
        """Optimizer steps, of full packs."""
        return max(1, -(-self.num_tokens * self.num_epochs // (self.tokens_per_pack * self.packs_per_step)))


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Shares of the machine's rates that are reached (``conf/plan.yaml`` says where each figure comes from), and how the engine
    holds the target: bytes per weight and per number of its KV cache, sequences decoded together, share of memory it may take."""

    train: float
    prefill: float
    decode_compute: float
    decode_memory: float
    link: float
    disk: float
    engine_batch_size: int
    engine_memory_share: float
    weight_bytes: float
    kv_bytes: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"assume.{field.name}: expected above 0, found {getattr(self, field.name)}")


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """One stage: its operations, its time, what bounds it, and the times that were compared."""

    stage: str
    flops: float
    seconds: float
    bound_by: str
    parts: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.stage, "flops": self.flops, "seconds": self.seconds, "bound_by": self.bound_by, "parts_s": dict(self.parts)}


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The target on ``tensor_parallel`` devices together, as many times as the machine holds it. ``weight_bytes`` and ``room_bytes``
    (for the KV cache) are per device; ``batch_size`` sequences fit, 0 where the target does not."""

    tensor_parallel: int
    num_copies: int
    weight_bytes: int
    room_bytes: int
    batch_size: int


def engine_layouts(target: TargetSizes, hardware: Hardware, assume: Assumptions, work: Workload) -> list[EngineLayout]:
    """Every even way of spreading the target over the devices."""
    layouts = []
    for parallel in (n for n in range(1, hardware.num_devices + 1) if hardware.num_devices % n == 0):
        weights = int(target.num_parameters * assume.weight_bytes / parallel)
        room = int(hardware.memory_bytes * assume.engine_memory_share) - weights
        per_sequence = target.num_kv / min(parallel, target.num_kv_parts) * assume.kv_bytes * work.mean_length_tokens
        fitting = max(0, min(assume.engine_batch_size, int(room / per_sequence)))
        layouts.append(
            EngineLayout(
                tensor_parallel=parallel,
                num_copies=hardware.num_devices // parallel,
                weight_bytes=weights,
                room_bytes=max(0, room),
                batch_size=fitting,
            )
        )
    return layouts


class DecodeRates(Protocol):
    """What ``decode_step_s`` needs of ``Assumptions``."""

    @property
    def decode_compute(self) -> float: ...

    @property
    def decode_memory(self) -> float: ...

    @property
    def weight_bytes(self) -> float: ...

    @property
    def kv_bytes(self) -> float: ...


def decode_step_s(
    target: TargetSizes, hardware: Hardware, assume: DecodeRates, *, tensor_parallel: int, batch_size: float, tokens: float, context: float
) -> tuple[float, str]:
    """Seconds of one forward over ``tokens`` new tokens of each of ``batch_size`` sequences, and what bounds it: reading weights and
    KV cache, or the products (the roofline), whose rows a GPU computes in blocks."""
    rows, parallel = batch_size * tokens, tensor_parallel
    weights = (target.layers.num_read(rows) + target.num_lm_head) * assume.weight_bytes / parallel
    kv = batch_size * context * target.num_kv / min(parallel, target.num_kv_parts) * assume.kv_bytes
    product_rows = padded_rows(rows, block=BLOCK_ROWS) if hardware.kind == "gpu" else rows
    products = 2 * product_rows * (target.layers.num_active + target.num_lm_head)
    attention = rows * context * target.attention_flops * target.num_layers
    memory_s = (weights + kv) / (hardware.memory_bytes_per_s * assume.decode_memory)
    compute_s = (products + attention) / parallel / (hardware.flops_per_s * assume.decode_compute)
    return (memory_s, "memory") if memory_s >= compute_s else (compute_s, "compute")


def regenerate_work(
    target: TargetSizes, hardware: Hardware, assume: Assumptions, work: Workload, layouts: list[EngineLayout]
) -> tuple[StageWork, EngineLayout] | None:
    """The answers, decoded by the fastest layout that fits; None where none does."""
    prompt_tokens, answer_tokens = work.num_tokens - work.num_answer_tokens, work.num_answer_tokens
    context = work.mean_length_tokens * (1 - work.answer_share / 2)
    read_flops = prompt_tokens * (2 * target.layers.num_active + _attention(target, work.mean_length_tokens / 2))
    write_flops = answer_tokens * (2 * (target.layers.num_active + target.num_lm_head) + _attention(target, context))
    found: list[tuple[StageWork, EngineLayout]] = []
    for layout in layouts:
        # No more sequences at once than there are conversations for each copy.
        batch = min(layout.batch_size, max(1.0, work.num_tokens / work.mean_length_tokens / layout.num_copies))
        if layout.batch_size == 0:
            continue
        step_s, bound_by = decode_step_s(
            target, hardware, assume, tensor_parallel=layout.tensor_parallel, batch_size=batch, tokens=1, context=context
        )
        write_s = answer_tokens / (batch * layout.num_copies) * step_s
        read_s = read_flops / (hardware.flops_per_s * hardware.num_devices * assume.prefill)
        parts = {"reading prompts": read_s, "writing answers": write_s}
        stage = StageWork(stage="regenerate", flops=read_flops + write_flops, seconds=read_s + write_s, bound_by=bound_by, parts=parts)
        found.append((stage, layout))
    return min(found, key=lambda pair: pair[0].seconds, default=None)


def precompute_work(target: TargetSizes, hardware: Hardware, assume: Assumptions, work: Workload, *, cache_bytes: float) -> StageWork:
    """Every token through the target once, the lm_head where there is a teacher; or writing the cache, where that takes longer."""
    flops = work.num_tokens * (2 * target.layers.num_active + _attention(target, work.mean_length_tokens / 2))
    if work.top_k is not None:
        flops += work.num_answer_tokens * 2 * target.num_lm_head
    compute_s = flops / (hardware.flops_per_s * hardware.num_devices * assume.prefill)
    return _slower("precompute", flops, {"compute": compute_s, "disk": cache_bytes / (hardware.disk_write_bytes_per_s * assume.disk)})


def train_work(
    target: TargetSizes,
    head: HeadSizes,
    hardware: Hardware,
    assume: Assumptions,
    work: Workload,
    *,
    mode: str,
    optimizer: OptimizerStep,
    recompute: bool,
    cache_bytes: float,
) -> StageWork:
    """Six operations per weight of a depth and token (forward, and two products backward), eight where the forward is done again: of
    the feed-forward part, and of all at later depths, on the rows that count alone, where the head has one block. On these rows also
    the frozen lm_head's two products, or three of the head's own, and one for an exact teacher. Then the optimizer's products and
    passes over its state, which every process repeats where it is not sharded, and the exchange between processes of gradients,
    weights, and what Muon multiplies where its matrices lie in shards, all counted as if nothing overlapped; or reading the cache,
    where that takes longer than all of it."""
    processes = 1 if mode == "single" else hardware.num_devices
    attention = 3 * (head.attention_flops or target.attention_flops) * head.num_layers / head.num_blocks * work.mean_length_tokens / 2
    per_weight = 8 if recompute else 6
    num_inside = (head.weights.num_active - head.num_lm_head - head.num_embedding) / head.num_blocks
    later = (work.draft_steps - 1) * (work.answer_share if head.num_feed_forward else 1)
    first = num_inside - (1 - work.answer_share) * head.num_feed_forward
    per_token = per_weight * (first + later * num_inside) + (1 + later) * attention
    projection = 6 * head.num_lm_head / head.num_blocks or 4 * target.num_lm_head
    per_row = work.draft_steps * (projection + 2 * work.exact_teacher * target.num_lm_head)
    flops = work.num_epochs * work.num_tokens * (per_token + work.answer_share * per_row)
    share, weights = MODES[mode], head.weights.total
    parts = {"compute": flops / (hardware.flops_per_s * processes * assume.train)}
    # Weight and gradient are read and the weight written, 4 bytes each; the state is read and written.
    passes_s = (12 * weights + 2 * optimizer.state) / (hardware.memory_bytes_per_s * assume.decode_memory)
    products_s = optimizer.flops / (hardware.flops_per_s * assume.train)
    parts["optimizer"] = work.num_steps * (passes_s + products_s) / (processes if share.sharded else 1)
    if processes > 1:
        # Reduced and given out again, or gathered once more for the backward: each 4 bytes per weight, less one's own part.
        passes = 3 if share.gathers else 2
        exchanged = passes * 4 * weights * (processes - 1) / processes
        if share.sharded:
            exchanged += muon_exchange_bytes(optimizer.matrices, processes=processes, bytes_each=optimizer.bytes_each)
        parts["exchange"] = work.num_steps * exchanged / (hardware.link_bytes_per_s * assume.link)
    flops += work.num_steps * optimizer.flops
    done = _slower("train", flops, parts)
    reading = work.num_epochs * cache_bytes / (hardware.disk_read_bytes_per_s * assume.disk)
    seconds = sum(parts.values())
    bound_by = "disk" if reading > seconds else done.bound_by
    return StageWork(stage="train", flops=flops, seconds=max(seconds, reading), bound_by=bound_by, parts=parts | {"disk": reading})


def muon_exchange_bytes(matrices: Sequence[tuple[int, int]], *, processes: int, bytes_each: int) -> float:
    """What one process sends in a step of Muon on matrices whose rows lie in shards, as torch's DTensor does the products.

    X has the shorter side as its rows. X X' and its square are sums over the processes, each with its columns of X: in each of
    five iterations the first is handed out in parts twice, and the second whole, which is twice a part. A matrix
    whose rows are the shorter side is turned into columns for that, where it is used, and back.
    """
    others = (processes - 1) / processes
    sent = 0.0
    for rows, columns in matrices:
        sent += _MUON_ITERATIONS * 4 * bytes_each * min(rows, columns) ** 2 * others
        if rows <= columns:
            sent += _MUON_TURNS * bytes_each * rows * columns / processes * others
    return sent


def evaluate_work(
    target: TargetSizes, hardware: Hardware, assume: Assumptions, work: Workload, layout: EngineLayout, *, batch_size: int
) -> StageWork:
    """One copy of the target decodes the held-out prompts, once plainly and once with drafts, each verification over K + 1 tokens."""
    batch = min(batch_size, layout.batch_size, work.num_eval_prompts)
    context, tokens = float(work.mean_length_tokens), work.num_eval_prompts * work.max_new_tokens
    verified = work.num_speculative_tokens + 1
    plain_s, bound_by = decode_step_s(
        target, hardware, assume, tensor_parallel=layout.tensor_parallel, batch_size=batch, tokens=1, context=context
    )
    verify_s, _ = decode_step_s(
        target, hardware, assume, tensor_parallel=layout.tensor_parallel, batch_size=batch, tokens=verified, context=context
    )
    parts = {"without drafts": tokens / batch * plain_s, "with drafts": tokens / work.acceptance_length / batch * verify_s}
    per_token = 2 * (target.layers.num_active + target.num_lm_head) + _attention(target, context)
    flops = tokens * per_token * (1 + verified / work.acceptance_length)
    return StageWork(stage="evaluate", flops=flops, seconds=sum(parts.values()), bound_by=bound_by, parts=parts)


def _attention(target: TargetSizes, context: float) -> float:
    return context * target.attention_flops * target.num_layers


def _slower(stage: str, flops: float, parts: Mapping[str, float]) -> StageWork:
    longest = max(parts, key=lambda part: parts[part])
    return StageWork(stage=stage, flops=flops, seconds=parts[longest], bound_by=longest, parts=parts)
