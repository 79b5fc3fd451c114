"""The settings of the training loop, the optimizer and the learning rate's course; checked without torch, whose import takes seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Precision = Literal["bf16", "fp32"]
Device = Literal["auto", "cpu"]
BestBy = Literal["agreement", "expected_acceptance", "loss", "acceptance_length"]
Final = Literal["last", "best"]
ScheduleKind = Literal["cosine", "constant"]
Rule = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How a run goes. ``*_every`` count steps (None: only at the end); ``noise_scale`` and ``seed`` are those of
    ``batch.noise``; ``best_by`` names the validation figure (mean over depths; or the measured acceptance_length) that
    decides which state is best, and ``final`` which one becomes the head; ``max_prefetch`` is in steps; ``profile`` writes a
    trace (``profiling``)."""

    num_steps: int
    precision: Precision
    noise_scale: float
    seed: int
    log_every: int
    validate_every: int | None
    measure_every: int | None
    save_every: int | None
    keep_last: int
    best_by: BestBy
    final: Final
    max_prefetch: int
    profile: bool

    @classmethod
    def of(cls, told: Mapping[str, Any], *, num_steps: int) -> LoopSettings:
        """From train's settings (``conf/train.yaml``)."""
        same = ("precision", "noise_scale", "seed", "log_every", "max_prefetch", "profile")
        return cls(
            num_steps=num_steps,
            validate_every=told["validation"]["every"],
            measure_every=told["validation"]["decode"]["every"],
            save_every=told["checkpoint"]["every"],
            keep_last=told["checkpoint"]["keep_last"],
            best_by=told["checkpoint"]["best_by"],
            final=told["checkpoint"]["final"],
            **{name: told[name] for name in same},
        )

    def __post_init__(self) -> None:
        counts = {"num_steps": self.num_steps, "log_every": self.log_every, "max_prefetch": self.max_prefetch}
        for name, count in {**counts, "checkpoint.keep_last": self.keep_last}.items():
            if count < 1:
                raise ValueError(f"{name}: expected at least 1, found {count}")
        for name, every in (
            ("validation.every", self.validate_every),
            ("validation.decode.every", self.measure_every),
            ("checkpoint.every", self.save_every),
        ):
            if every is not None and every < 1:
                raise ValueError(f"{name}: expected at least 1 step or null, found {every}")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision: expected auto, bf16 or fp32, found {self.precision!r}")
        if self.noise_scale < 0:
            raise ValueError(f"noise_scale: expected 0 (none) or more, found {self.noise_scale}")
        if self.best_by not in get_args(BestBy):
            raise ValueError(f"checkpoint.best_by: expected one of {get_args(BestBy)}, found {self.best_by!r}")
        if self.final not in ("last", "best"):
            raise ValueError(f"checkpoint.final: expected last or best, found {self.final!r}")


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
