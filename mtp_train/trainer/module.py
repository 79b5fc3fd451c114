"""The head and its objective as one module, which is what DistributedDataParallel and its like can run."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from mtp_train.head.base import Head
from mtp_train.nn.bf16 import multiplies_bf16, why_float32
from mtp_train.runtime import log
from mtp_train.trainer.objective import Objective, Result
from mtp_train.trainer.rows import Pack
from mtp_train.trainer.settings import Device, Precision

if TYPE_CHECKING:
    from accelerate import Accelerator

# All processes wait for the one that has the head measured (validation.decode), longer than NCCL's ten minutes; one that has
# died ends the others through the launcher, not through this.
_PATIENCE = timedelta(hours=3)


def make_accelerator(device: Device) -> Accelerator:
    """accelerate's view of the processes and devices. ``auto`` takes the accelerator that torch finds, else the CPU; also
    where that is Apple's, which has no float64 for the sums.

    Precision is not accelerate's business here: ``TrainingModule`` holds the one autocast, and the loop counts its own
    accumulation, since it divides by global row counts and not by packs.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

    parallel = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    patience = InitProcessGroupKwargs(timeout=_PATIENCE)
    # Without an accelerator accelerate must be told, or it does not see the other processes, and each trains alone.
    cpu = device == "cpu" or not torch.accelerator.is_available() or torch.backends.mps.is_available()
    return Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[parallel, patience])


def choose_precision(precision: Literal["auto"] | Precision, accelerator: Accelerator) -> Precision:
    """``auto``: bf16 where the devices of all processes multiply it, else fp32, which is said. All processes ask at once."""
    if precision != "auto":
        return precision
    able = torch.tensor(float(multiplies_bf16(accelerator.device)), device=accelerator.device)
    if float(accelerator.reduce(able, "sum")) == accelerator.num_processes:
        return "bf16"
    log(why_float32("precision"))
    return "fp32"


def compute_dtype(precision: Precision) -> torch.dtype:
    """What matrix products are computed in; master weights, losses and softmaxes are float32 in either."""
    if precision not in ("bf16", "fp32"):
        raise ValueError(f"precision: expected bf16 or fp32, found {precision!r}")
    return torch.bfloat16 if precision == "bf16" else torch.float32


class TrainingModule(nn.Module):
    """``forward`` gives the objective of one pack: a scalar to differentiate, and sums to report."""

    def __init__(self, *, head: Head, objective: Objective, precision: Precision) -> None:
        super().__init__()
        self.head, self.objective = head, objective
        self.dtype = compute_dtype(precision)  # of matrix products

    def forward(self, pack: Pack, scale_K: torch.Tensor, *, measure: bool) -> Result:
        device = pack.batch.hidden_TD.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.objective(self.head, pack, scale_K, measure=measure)
