"""The optimizer and the learning rate's course: AdamW, or Muon for the matrices; warm-up, then constant or a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

ScheduleKind = Literal["cosine", "constant"]
Rule = Literal["adamw", "muon"]
_OF_TOKENS = {"lm_head", "lm_heads", "embed_tokens"}  # matrices that have a row for each token


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """``rule``: ``adamw`` (Loshchilov and Hutter 2019) for all parameters, or ``muon`` (Jordan et al. 2024) for the matrices
    of the layer and AdamW for the rest; Muon's updates are scaled to AdamW's size (Liu et al. 2025, "Muon is scalable for LLM
    training", section 2.2), so that one ``lr`` serves both. ``clip_norm``: the gradient's largest global norm, None for no
    limit."""

    rule: Rule
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float | None

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"optimizer.rule: expected one of {get_args(Rule)}, found {self.rule!r}")
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr: expected above 0, found {self.lr}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optimizer.beta1 and beta2: expected from 0 to below 1, found {self.beta1} and {self.beta2}")
        if self.eps < 0 or self.weight_decay < 0:
            raise ValueError(f"optimizer.eps and weight_decay: expected 0 or more, found {self.eps} and {self.weight_decay}")
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


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon over ``matrices`` and AdamW over ``rest``, as one optimizer with one state."""

    def __init__(self, *, matrices: list[nn.Parameter], rest: list[nn.Parameter], settings: OptimizerSettings) -> None:
        self._muon = torch.optim.Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = _adamw(rest, settings) if rest else None  # a head may be nothing but matrices
        super().__init__([*matrices, *rest], {})
        self.param_groups = [*self._muon.param_groups, *(() if self._adamw is None else self._adamw.param_groups)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes gradients before it steps"
        # The two work on this optimizer's groups and state, whatever has been put in their place meanwhile (load_state_dict).
        self._muon.param_groups, self._muon.state = self.param_groups[:1], self.state
        self._muon.step()
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
            self._adamw.step()


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer over a model's parameters: weight decay on matrices only, not on norms and biases.

    Muon takes what multiplies hidden states inside the layers; a head's own lm_heads and embedding, whose rows are tokens, stay
    AdamW's (as Jordan et al. advise), and so do stacked experts, which torch's Muon cannot take.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if settings.rule == "adamw":
        return _adamw(list(named.values()), settings)
    matrices = [parameter for name, parameter in named.items() if parameter.ndim == 2 and not _OF_TOKENS & set(name.split("."))]
    chosen = set(matrices)
    rest = [parameter for parameter in named.values() if parameter not in chosen]
    if not matrices:
        raise ValueError("optimizer.rule=muon: expected a head with matrices inside its layers, found none; choose adamw")
    return MuonAdamW(matrices=matrices, rest=rest, settings=settings)


def _adamw(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
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
