"""Finds the state that a run continues from, and saves new ones, all processes together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from mtp_train.runtime import log
from mtp_train.trainer.parallel import Parallel, trained_parameters, with_constants
from mtp_train.trainer.state import (
    Position,
    Shard,
    StateReader,
    begin_state,
    check_settings,
    complete_steps,
    finish_state,
    folder_name,
    prune,
    write_shard,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

Found = TypeVar("Found")


class Saver:
    """Saves and resumes one run in ``folder``, which all processes see. ``settings`` are those that a continuation must
    share; every process calls each method."""

    def __init__(self, *, folder: Path, accelerator: Accelerator, head: nn.Module, settings: Mapping[str, Any], keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError(f"checkpoint.keep_last: expected at least 1, found {keep_last}")
        self._folder, self._accelerator = folder, accelerator
        self._settings, self._keep_last = dict(settings), keep_last
        self._shapes = {name: tuple(parameter.shape) for name, parameter in trained_parameters(head).items()}

    def newest(self) -> StateReader | None:
        """The newest complete state, checked; None where there is none.

        Errors: ValueError where it was begun with other settings, is damaged, or is of another head.
        """
        steps = self._from_main(lambda: complete_steps(self._folder))
        if not steps:
            return None
        path = self._folder / folder_name(steps[-1])
        state = StateReader(path)
        check_settings(self._settings, state.position.settings, where=path)
        if state.position.shapes != self._shapes:
            raise ValueError(f"{path}: expected the parameters {self._shapes}, found {state.position.shapes}; it is of another head")
        self._together(lambda: state.verify(rank=self._accelerator.process_index, num_processes=self._accelerator.num_processes))
        return state

    def restore_random(self, state: StateReader) -> None:
        """Put this process' generators back. Nothing in the loop draws from them today (order and noise have seeds of their
        own), but an architecture's layer may."""
        random = state.random(self._accelerator.process_index)
        if random is None or len(state.shards) != self._accelerator.num_processes:
            log(
                f"continued by {self._accelerator.num_processes} processes, begun by {len(state.shards)}: the data goes on where it "
                "was, results agree with the run that was not interrupted to rounding, not bit for bit"
            )
        if random is None:
            return
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and self._accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self._accelerator.device)

    def save(self, step: int, *, parallel: Parallel, counters: Mapping[str, Any], best_step: int | None) -> Path:
        """Write the state after ``step`` steps, if it is not there; keep the newest few and the best. Returns its folder.

        Errors: ValueError where a process cannot write (a full disk); what was complete stays.
        """
        final = self._folder / folder_name(step)
        if self._from_main(lambda: step in complete_steps(self._folder)):
            return final
        temporary = self._from_main(lambda: begin_state(self._folder, step))
        shards = self._together(lambda: self._write(temporary, parallel))
        position = Position(step=step, shapes=self._shapes, settings=self._settings, counters=dict(counters))
        self._from_main(lambda: self._finish(temporary, position, shards, best_step))
        return final

    def _write(self, temporary: Path, parallel: Parallel) -> Shard:
        accelerator, random = self._accelerator, {"cpu": torch.get_rng_state()}
        if accelerator.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(accelerator.device)
        return write_shard(
            temporary, rank=accelerator.process_index, num_processes=accelerator.num_processes, pieces=parallel.pieces(), random=random
        )

    def _finish(self, temporary: Path, position: Position, shards: list[Shard], best_step: int | None) -> None:
        finish_state(temporary, position, shards)
        prune(self._folder, keep_last=self._keep_last, keep=set() if best_step is None else {best_step})

    def _from_main(self, action: Callable[[], Found]) -> Found:
        """What the main process finds, on all of them."""
        from accelerate.utils import broadcast_object_list

        outcome = [_attempt(action) if self._accelerator.is_main_process else None]
        return _result(broadcast_object_list(outcome))[0]

    def _together(self, action: Callable[[], Found]) -> list[Found]:
        """What each process finds, in their order, on all of them."""
        from accelerate.utils import gather_object

        return _result(gather_object([_attempt(action)]))


def load_weights(head: nn.Module, state: StateReader) -> None:
    """Put a state's weights into a head that holds all of its own."""
    head.load_state_dict(with_constants(head, state.weights()))


def _attempt(action: Callable[[], Found]) -> tuple[Found | None, str | None]:
    """A failure as words, so that it can be told to the other processes, which would wait for this one."""
    try:
        return action(), None
    except (ValueError, OSError) as error:
        return None, str(error)


def _result(outcomes: list[Any]) -> list[Any]:
    problem = next((problem for _, problem in outcomes if problem is not None), None)
    if problem is not None:
        raise ValueError(problem)
    return [found for found, _ in outcomes]
