"""Collects a training run's state from its live objects, and puts it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtp_train.head.base import Head
from mtp_train.runtime import log
from mtp_train.trainer.state import (
    HeadFile,
    State,
    check_settings,
    complete_steps,
    folder_name,
    load_optimizer_tensors,
    optimizer_tensors,
    prune,
    read_state,
    write_state,
)

if TYPE_CHECKING:
    from accelerate import Accelerator


class Saver:
    """Saves and resumes one run in ``folder``. ``settings`` are those that a continuation must share; every rank calls
    each method, the main process writes."""

    def __init__(
        self,
        *,
        folder: Path,
        accelerator: Accelerator,
        head: Head,
        optimizer: torch.optim.Optimizer,
        head_file: HeadFile,
        settings: Mapping[str, Any],
        keep_last: int,
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"checkpoint.keep_last: expected at least 1, found {keep_last}")
        self._folder, self._accelerator, self._head, self._optimizer = folder, accelerator, head, optimizer
        self._head_file, self._settings, self._keep_last = head_file, dict(settings), keep_last
        self._names = {parameter: name for name, parameter in head.named_parameters()}

    def resume(self) -> State | None:
        """Load the newest complete state; None where there is none. ValueError where it was begun with other settings."""
        steps = complete_steps(self._folder)
        if not steps:
            return None
        path = self._folder / folder_name(steps[-1])
        state = read_state(path)
        check_settings(self._settings, state.settings, where=path)
        self._head.load_state_dict(state.weights)
        load_optimizer_tensors(self._optimizer, self._names, state.optimizer)
        self._restore_random(state.random)
        log(f"continuing after step {state.step} from {path}")
        return state

    def save(self, step: int, *, counters: Mapping[str, Any], best_step: int | None) -> Path:
        """Write the state after ``step`` steps; keep the newest few and the best. Returns its folder."""
        random = self._random()
        if self._accelerator.is_main_process:
            state = State(
                step=step,
                weights={name: tensor.detach() for name, tensor in self._head.state_dict().items()},
                optimizer=optimizer_tensors(self._optimizer, self._names),
                random=random,
                settings=self._settings,
                counters=dict(counters),
            )
            head_file = replace(self._head_file, made_by={**self._head_file.made_by, "step": step})
            write_state(self._folder, state, head=head_file)
            prune(self._folder, keep_last=self._keep_last, keep=set() if best_step is None else {best_step})
        self._accelerator.wait_for_everyone()
        return self._folder / folder_name(step)

    def _random(self) -> dict[str, torch.Tensor]:
        """Every rank's generator states. Nothing in the loop draws from them today (order and noise have seeds of their
        own), but an architecture's layer may."""
        from accelerate.utils import gather_object

        mine = {f"rank{self._accelerator.process_index}.cpu": torch.get_rng_state()}
        if self._accelerator.device.type == "cuda":
            mine[f"rank{self._accelerator.process_index}.cuda"] = torch.cuda.get_rng_state(self._accelerator.device)
        return {name: tensor for held in gather_object([mine]) for name, tensor in held.items()}

    def _restore_random(self, random: Mapping[str, torch.Tensor]) -> None:
        rank = f"rank{self._accelerator.process_index}"
        if f"{rank}.cpu" not in random:
            log("more processes than before: results agree with the run that was not interrupted to rounding, not bit for bit")
            return
        torch.set_rng_state(random[f"{rank}.cpu"])
        if f"{rank}.cuda" in random and self._accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(random[f"{rank}.cuda"], self._accelerator.device)
