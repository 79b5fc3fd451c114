"""The optimizer and the learning rate's course: AdamW, warm-up, then constant or a cosine, a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

ScheduleKind = Literal["cosine", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019). ``clip_norm``: the gradient's largest global norm, None for no limit."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float | None

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr: expected above 0, found {self.lr}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optimizer.beta1 and beta2: expected from 0 to below 1, found {self.beta1} and {self.beta2}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm: expected above 0 or null, found {self.clip_norm}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate's factor: a linear rise over ``warmup_steps``, then constant, or a half cosine down to
    ``min_ratio`` at the last step."""

    kind: ScheduleKind
    warmup_steps: int
    min_ratio: float

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "constant"):
            raise ValueError(f"schedule.kind: expected cosine or constant, found {self.kind!r}")
        if self.warmup_steps < 0 or not 0 <= self.min_ratio <= 1:
            raise ValueError(
                f"schedule: expected warmup_steps of at least 0 and min_ratio from 0 to 1, found {self.warmup_steps} and {self.min_ratio}"
            )

    def factor(self, step: int, *, num_steps: int) -> float:
        """The factor of step ``step`` (0-based) of ``num_steps``; above 0 from the first step on where min_ratio is."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        length = max(1, num_steps - 1 - self.warmup_steps)
        share = min(1.0, (step - self.warmup_steps) / length)
        return self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * share))


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over a model's parameters: weight decay on matrices only, not on norms and biases; one fused kernel."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    # Fused kernels exist for these; elsewhere torch chooses.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=fused or None,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
