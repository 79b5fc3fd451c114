"""One training step of a head without data, weights or memory: what lives at its fullest moments, counted tensor by tensor.

The real head and objective run over ``FakeTensorMode``'s tensors, which have shapes and nothing in them, so that whatever
they keep for the backward pass is counted as it is and not from a formula that would have to follow every change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, get_args

import torch

from mtp_train.batch.shift import LossRows
from mtp_train.head.base import Head
from mtp_train.head.eagle3 import Eagle3
from mtp_train.head.medusa import Medusa
from mtp_train.head.pair import PairHead
from mtp_train.loss.base import rows_together
from mtp_train.nn.context import ContextGroup, ContextShare
from mtp_train.nn.experts import run_experts
from mtp_train.nn.wanted import WantedRows
from mtp_train.planning.live import LiveBytes
from mtp_train.planning.sizes import empty_shared
from mtp_train.records import Batch, DraftStep, Teacher
from mtp_train.target.weights import SharedWeights
from mtp_train.trainer.module import compute_dtype
from mtp_train.trainer.objective import Objective
from mtp_train.trainer.optim import MuonAdamW, build_optimizer
from mtp_train.trainer.rows import Pack
from mtp_train.trainer.settings import OptimizerSettings, Precision, Rule

ACTIVATIONS, CHUNK, BACKWARD, GRADIENTS, STEPPING = "activations", "logits chunk", "backward", "gradients", "optimizer step"
_EVEN = "mtp_train_even"  # experts whose rows nobody routed


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What decides a step's memory: a pack of ``num_tokens``, of which ``answer_share`` count, computed by ``context`` processes
    together, on ``device`` (``cpu``, or ``gpu``, where the softmax takes a chunk's rows together). ``recompute`` is
    ``checkpoint_activations`` of train."""

    num_tokens: int
    answer_share: float
    hidden_size: int
    vocab_size: int
    tied: bool
    top_k: int | None
    precision: Precision
    noise: bool
    recompute: bool
    context: int
    device: str

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.precision)

    @property
    def num_rows(self) -> int:
        """Rows of the pack that count, over all who compute it."""
        return max(1, round(self.num_tokens * self.answer_share))


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One rule over the whole head: bytes of its state, bytes that a step makes and drops, operations of a step's products, and the
    shapes of the matrices that those are of (Muon's), with the bytes of a number in them."""

    state: int
    working: int
    flops: float
    matrices: tuple[tuple[int, int], ...]
    bytes_each: int


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one process without sharding. ``parameters``: the float32 master weights; ``shared``: embedding, lm_head and final
    norm; ``batch``: the pack; ``start``: what fitting the head to the data in closed form takes before the first step, 0 where its
    ``init`` does not ask for it. ``moments``: per phase at its fullest, what else lives and what for; ``optimizers`` by rule."""

    parameters: int
    shared: int
    batch: int
    start: int
    moments: dict[str, dict[str, int]]
    optimizers: dict[Rule, OptimizerStep]


class _Alone(ContextShare):
    """One process' rows of a pack where the others are not there: what it would gather from them has the size of its own."""

    def gather(self, own_NTH: torch.Tensor) -> torch.Tensor:
        return torch.cat([own_NTH] * len(self.counts), 1)[:, self.order_T]


class _Watched:
    """A head that tells which phase begins: its own work, or the losses on what it yielded."""

    def __init__(self, head: Head, live: LiveBytes) -> None:
        self.shared, self._head, self._live = head.shared, head, live
        self.draft_ids_U = head.draft_ids_U

    def unroll(self, batch: Batch, *, wanted: WantedRows | None) -> Iterator[DraftStep]:
        for step in self._head.unroll(batch, wanted=wanted):
            self._live.phase = CHUNK
            yield step
            self._live.phase = ACTIVATIONS


def measure_step(make_head: Callable[[SharedWeights], Head], objective: Objective, shape: StepShape) -> StepMemory:
    """Run a step's forward and backward over tensors without memory. ``make_head`` is called inside the mode.

    A GPU's softmax takes all rows of a chunk at once and a CPU's few (``loss.base.row_blocks``).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        head = make_head(empty_shared(vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, tied=shape.tied, dtype=shape.dtype))
        _route_evenly(head)
        if shape.recompute:
            head.recompute_activations(depths=objective.draft_steps > 1)
        batch = _batch(shape, num_taps=len(head.target_layer_ids))
        num_rows = min(objective.chunk_rows, -(-shape.num_rows // shape.context))
        if shape.device == "cpu":
            moments = _moments(head, objective, shape, batch, num_rows=num_rows)
        else:
            with rows_together():
                moments = _moments(head, objective, shape, batch, num_rows=num_rows)
        shared = (head.shared.embedding_VD, head.shared.lm_head_VD, head.shared.final_norm_weight_D)
        return StepMemory(
            parameters=sum(parameter.numel() * 4 for parameter in head.parameters()),
            shared=_nbytes(list({id(tensor): tensor for tensor in shared}.values())),
            batch=_nbytes(_tensors(batch)) + (_nbytes([batch.hidden_TD]) if shape.noise else 0),
            start=_start_bytes(head),
            moments=moments,
            optimizers={rule: _optimizer_step(head, rule, shape.dtype) for rule in get_args(Rule)},
        )


def _moments(head: Head, objective: Objective, shape: StepShape, batch: Batch, *, num_rows: int) -> dict[str, dict[str, int]]:
    """The fullest moments of one forward and backward with ``num_rows`` rows that count at each depth."""
    pack = _pack(objective, batch, num_rows=num_rows, num_wanted=min(shape.num_rows, batch.num_tokens))
    scale_K = torch.ones(objective.draft_steps)
    inputs = [*_tensors(batch), *(column for rows in pack.rows for column in rows), *pack.top_M, scale_K]
    held = [*head.buffers(), head.shared.embedding_VD, head.shared.lm_head_VD, head.shared.final_norm_weight_D, *inputs]
    parameters = list(head.parameters())
    live = LiveBytes(phase=ACTIVATIONS, parameters=parameters, others=held)
    watched: Any = _Watched(head, live)
    with live:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=shape.dtype == torch.bfloat16):
            loss = objective(watched, pack, scale_K, measure=False).loss
        live.phase = BACKWARD
        loss.backward()
        gradients = live.of([p.grad for p in parameters if p.grad is not None])
    head.zero_grad()
    return {phase: _by_kind(alive, gradients) for phase, (_, alive) in live.peaks.items()}


def _optimizer_step(head: Head, rule: Rule, dtype: torch.dtype) -> OptimizerStep:
    """A second step of the real optimizer: the first one makes its state."""
    from torch.utils.flop_counter import FlopCounterMode

    settings = OptimizerSettings(rule=rule, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, clip_norm=1.0)
    optimizer = build_optimizer(head, settings, dtype=dtype)
    parameters = list(head.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    states = [tensor for entries in optimizer.state.values() for tensor in entries.values() if isinstance(tensor, torch.Tensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    live = LiveBytes(phase=STEPPING, parameters=parameters, others=[*states, *gradients])
    with FlopCounterMode(display=False) as counter, live:
        optimizer.step()
    head.zero_grad()
    multiplied = optimizer.param_groups[0]["params"] if isinstance(optimizer, MuonAdamW) else []
    return OptimizerStep(
        state=_nbytes(states),
        working=live.peaks.get(STEPPING, (0, {}))[0],
        flops=float(counter.get_total_flops()),
        matrices=tuple((parameter.shape[0], parameter.shape[1]) for parameter in multiplied),
        bytes_each=dtype.itemsize,
    )


def _start_bytes(head: Head) -> int:
    """``nn.least_squares`` in float64 at its fullest, while X'X is factored: it, its copy with the ridge, the factor, and X'Y."""
    if isinstance(head, Medusa) and head.starts_from_data:
        size = head.shared.lm_head_VD.shape[1]
        return 8 * size * (3 * size + head.num_ahead * size)
    if not isinstance(head, (PairHead, Eagle3)) or not head.starts_from_data:
        return 0
    fitted = head.projection if isinstance(head, PairHead) else head.fusion
    assert fitted is not None
    num_outputs, num_inputs = fitted.weight.shape
    return 8 * num_inputs * (3 * num_inputs + num_outputs)


def _by_kind(alive: dict[int, tuple[str, int]], gradients: set[int]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for number, (kind, size) in alive.items():
        kind = GRADIENTS if number in gradients else kind
        kinds[kind] = kinds.get(kind, 0) + size
    return kinds


def _route_evenly(head: Head) -> None:
    """Give each expert as many rows as any other, since no data says how many it has."""
    from transformers.integrations.moe import ExpertsInterface

    def even(expert_S: torch.Tensor, num_experts: int) -> list[int]:
        share, rest = divmod(expert_S.shape[0], num_experts)
        return [share + (number < rest) for number in range(num_experts)]

    ExpertsInterface.register(_EVEN, partial(run_experts, count=even))
    for module in head.modules():
        if type(module).__name__.endswith("Experts"):
            module.config._experts_implementation = _EVEN  # type: ignore[union-attr]


def _batch(shape: StepShape, *, num_taps: int) -> Batch:
    """A pack of one sample, as the cache and the loader give it: bfloat16 states, the layers that the head taps, the teacher's rows."""
    num_rows = shape.num_rows
    num_tokens = -(-shape.num_tokens // (2 * shape.context)) * 2 * shape.context
    teacher = None
    if shape.top_k is not None:
        teacher = Teacher(
            row_M=torch.zeros(num_rows, dtype=torch.int64),
            ids_MC=torch.zeros(num_rows, shape.top_k, dtype=torch.int64),
            log_probs_MC=torch.zeros(num_rows, shape.top_k),
            log_sum_exp_M=torch.zeros(num_rows),
        )
    taps = torch.empty(num_tokens, num_taps, shape.hidden_size, dtype=torch.bfloat16) if num_taps else None
    return Batch(
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64),
        loss_mask_T=torch.ones(num_tokens, dtype=torch.bool),
        hidden_TD=torch.empty(num_tokens, shape.hidden_size, dtype=torch.bfloat16),
        sample_T=torch.zeros(num_tokens, dtype=torch.int64),
        position_T=torch.zeros(num_tokens, dtype=torch.int64),
        bounds=(0, num_tokens),
        sample_ids=("planned",),
        taps_TLD=taps,
        teacher=teacher,
        share=None if shape.context == 1 else _share(num_tokens, shape.context),
    )


def _share(num_tokens: int, context: int) -> ContextShare:
    """The first of ``context`` equal shares; lengths that do not divide are rounded up, so that all are equal."""
    whole = ContextGroup(group=None, rank=0, size=context).share(num_tokens)
    return _Alone(**{field.name: getattr(whole, field.name) for field in fields(whole)})


def _pack(objective: Objective, batch: Batch, *, num_rows: int, num_wanted: int) -> Pack:
    """The pack with its counted rows, as ``trainer.rows.align`` would find them if there were data; all rows that count are its last."""
    row_M = torch.zeros(num_rows, dtype=torch.int64)
    depths = range(objective.draft_steps)
    with_top = batch.teacher is not None
    stretch = (batch.num_tokens - num_wanted, batch.num_tokens)
    wanted = WantedRows(rows_M=torch.zeros(num_wanted, dtype=torch.int64), stretches=(stretch,))
    return Pack(
        batch=batch,
        teacher_hidden_TD=batch.hidden_TD,
        rows=tuple(LossRows(row_M, row_M, row_M) for _ in depths),
        top_M=tuple(row_M for _ in depths) if with_top else (),
        wanted=None if batch.share is not None else wanted,
    )


def _tensors(batch: Batch) -> Sequence[torch.Tensor]:
    columns = [batch.token_ids_T, batch.loss_mask_T, batch.hidden_TD, batch.sample_T, batch.position_T]
    if batch.taps_TLD is not None:
        columns.append(batch.taps_TLD)
    if batch.teacher is not None:
        columns += [batch.teacher.row_M, batch.teacher.ids_MC, batch.teacher.log_probs_MC, batch.teacher.log_sum_exp_M]
    return columns


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
