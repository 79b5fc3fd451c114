"""The settings of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mtp_train.trainer.module import Precision
from mtp_train.trainer.validation import BestBy

Final = Literal["last", "best"]


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
        if self.noise_scale < 0:
            raise ValueError(f"noise_scale: expected 0 (none) or more, found {self.noise_scale}")
        if self.best_by not in get_args(BestBy):
            raise ValueError(f"checkpoint.best_by: expected one of {get_args(BestBy)}, found {self.best_by!r}")
        if self.final not in ("last", "best"):
            raise ValueError(f"checkpoint.final: expected last or best, found {self.final!r}")
