"""Measures every trained cell of a norm ablation: the acceptance estimate on held-out answers, prompt by prompt, and its curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mtp_train.ablation.grid import Cell, stopped_at
from mtp_train.acceptance.report_data import part_from_json
from mtp_train.cache.reader import CacheReader
from mtp_train.engine.base import Sampling
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.head.base import Head
from mtp_train.runtime import atomic_write_json, read_json
from mtp_train.trainer.metrics import METRICS, read_metrics

MEASURED = "measured.json"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What the walk over one prompt's answer counted: see ``records.PromptAcceptance``."""

    prompt_id: str
    num_prompt_tokens: int
    num_drafts: int
    num_accepted_per_position: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a training's metrics: what it did on its way. ``hidden_rms`` is that of the state which the lm_head reads, at depth
    0; ``grad_norm`` the global norm before clipping; both None at validation lines that do not have them."""

    step: int
    split: str
    loss: float | None
    agreement: float | None
    grad_norm: float | None
    hidden_rms: float | None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A cell with its figures. ``stopped``: the message that ended its training early, None where it came to its end; without an
    end there is no head to measure and ``prompts`` is empty."""

    cell: Cell
    stopped: str | None
    prompts: tuple[Counted, ...]
    lines: tuple[Line, ...]


def measure(
    cell: Cell,
    folder: Path,
    *,
    load: Callable[[Path], Head],
    heldout: CacheReader,
    num_speculative_tokens: int,
    max_new_tokens: int,
    device: torch.device,
) -> Measured:
    """The figures of one cell, kept in ``measured.json`` of its folder and read from there the next time.

    ``heldout`` holds the target's own greedy answers, of at most ``max_new_tokens``, to prompts that were not trained on.
    """
    path = folder / MEASURED
    if path.is_file():
        return part_from_json(Measured, read_json(path))
    stopped = stopped_at(folder)
    prompts: tuple[Counted, ...] = ()
    if stopped is None:
        found = estimate(
            load(folder),
            (heldout[number] for number in range(len(heldout))),
            num_speculative_tokens=num_speculative_tokens,
            draft_sampling="greedy",
            sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens, seed=0),
            max_batch_tokens=4096,
            device=device,
        )
        prompts = tuple(
            Counted(
                prompt_id=prompt.prompt_id,
                num_prompt_tokens=prompt.num_prompt_tokens,
                num_drafts=prompt.num_drafts,
                num_accepted_per_position=prompt.num_accepted_per_position,
            )
            for prompt in found.prompts
        )
    measured = Measured(cell=cell, stopped=stopped, prompts=prompts, lines=_lines(folder))
    atomic_write_json(path, asdict(measured))
    return measured


def _lines(folder: Path) -> tuple[Line, ...]:
    path = folder / METRICS
    if not path.is_file():
        return ()

    def first(value: float | Sequence[float | None] | None) -> float | None:
        number = value[0] if isinstance(value, Sequence) else value
        return None if number is None or not math.isfinite(number) else float(number)

    return tuple(
        Line(
            step=int(line["step"]),
            split=str(line["split"]),
            **{key: first(line.get(key)) for key in ("loss", "agreement", "grad_norm", "hidden_rms")},
        )
        for line in read_metrics(path)
    )
