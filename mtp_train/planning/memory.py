"""What one process of a training run holds at its fullest, by source, for every way of sharing the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtp_train.planning.live import COPIES
from mtp_train.planning.sizes import HeadSizes
from mtp_train.planning.step import ACTIVATIONS, BACKWARD, CHUNK, GRADIENTS, STEPPING, StepMemory
from mtp_train.trainer.settings import Rule
from mtp_train.trainer.zero import BUCKET_ELEMENTS

# Elements of gathered weights that DeepSpeed keeps for reuse at stage 3 (its own default, stage3_max_live_parameters).
_MAX_LIVE_ELEMENTS = 10**9
COMPLETE, STARTING = "gradients complete", "start from data"


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a mode spreads what belongs to the float32 parameters: each pair multiplies their bytes, the first number in every
    process, the second divided by the number of processes. ``sharded``: the optimizer's state is divided too; ``deepspeed``: at
    any element, so that only AdamW can step it; ``gathers``: weights are put together to be used."""

    weights: tuple[int, int]
    gradients: tuple[int, int]
    sharded: bool = False
    deepspeed: bool = False
    gathers: bool = False


# The arithmetic of ZeRO (Rajbhandari et al. 2020, section 5) for float32 weights under our own autocast, and what the two
# libraries add. DeepSpeed keeps the part that it steps as a copy beside the module's float32 weights, and at stage 1 collects its
# part of the gradients beside the whole ones. fully_shard has the head as one unit: gathered whole from the forward to the end
# of the backward, and its whole gradients once more in the buffer from which they are reduced.
MODES: Mapping[str, Sharing] = {
    "single": Sharing(weights=(1, 0), gradients=(1, 0)),
    "ddp": Sharing(weights=(1, 0), gradients=(1, 0)),
    "zero1": Sharing(weights=(1, 1), gradients=(1, 1), sharded=True, deepspeed=True),
    "zero2": Sharing(weights=(1, 1), gradients=(0, 1), sharded=True, deepspeed=True),
    "fsdp2": Sharing(weights=(0, 1), gradients=(2, 1), sharded=True, gathers=True),
    "zero3": Sharing(weights=(0, 2), gradients=(0, 1), sharded=True, deepspeed=True, gathers=True),
}


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Bytes of one process at its fullest moment, by source; they add up to ``total``."""

    mode: str
    num_processes: int
    moment: str
    sources: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.sources.values())


def process_memory(
    step: StepMemory, head: HeadSizes, *, mode: str, rule: Rule, num_processes: int, packs_per_process: int
) -> ProcessMemory:
    """The fullest of a step's moments: while the head runs, in the losses, in the backward, when the optimizer steps.

    Errors: ValueError for a mode that is none.
    """
    if mode not in MODES:
        raise ValueError(f"parallel: expected one of {list(MODES)}, found {mode!r}")
    share = MODES["single"] if num_processes == 1 else MODES[mode]
    weights, optimizer = step.parameters, step.optimizers[rule]
    state = -(-optimizer.state // (num_processes if share.sharded else 1))

    def spread(pair: tuple[int, int]) -> int:
        return weights * pair[0] + -(-weights * pair[1] // num_processes)

    fixed = {"embedding, lm_head": step.shared, "weights": spread(share.weights), "optimizer": state, "pack": step.batch}
    if share.gathers:
        fixed["gathered weights"] = min(weights, 4 * _MAX_LIVE_ELEMENTS) if share.deepspeed else weights
    if share.deepspeed:
        fixed["buckets"] = 4 * min(BUCKET_ELEMENTS, head.weights.total)
    # Gradients of earlier packs, and DistributedDataParallel's buckets, whose views they are, are there from the start.
    early = packs_per_process > 1 or (mode == "ddp" and num_processes > 1)
    kept = spread((0 if share.gathers else share.gradients[0], share.gradients[1])) if early else 0
    moments = {COMPLETE: fixed | {GRADIENTS: spread(share.gradients), STEPPING: optimizer.working}}
    if step.start:  # every process fits a whole head, before it is shared out
        moments[STARTING] = {"embedding, lm_head": step.shared, "weights": weights, "pack": step.batch, STARTING: step.start}
    for phase, alive in step.moments.items():
        found = {kind: alive.get(kind, 0) for kind in (COPIES, ACTIVATIONS, CHUNK, BACKWARD)}
        found[GRADIENTS] = max(kept, min(spread(share.gradients), alive.get(GRADIENTS, 0) * max(1, share.gradients[0])))
        if phase == BACKWARD and (early or share.gradients[0] == 0):
            found[BACKWARD] += 4 * head.largest  # a parameter's new gradient, before it is added or given to the others
        moments[phase] = fixed | found
    fullest = max(moments, key=lambda moment: sum(moments[moment].values()))
    sources = {source: size for source, size in moments[fullest].items() if size}
    return ProcessMemory(mode=mode, num_processes=num_processes, moment=fullest, sources=sources)
