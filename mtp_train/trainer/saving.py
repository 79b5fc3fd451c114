"""Finds the state that a run continues from, and saves new ones, all processes together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from mtp_train.checkpoint import is_whole
from mtp_train.faults import told
from mtp_train.runtime import clear_unfinished, log
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
# What each process saves of its own, beside its generators' states by device.
_SUMS = "sums"
_RANDOM = "random/"


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

    def restore_own(self, state: StateReader) -> torch.Tensor:
        """Put this process' generators back, and return its part of the sums that were still to be reported, float64 (K, X).

        Nothing in the loop draws from the generators today (order and noise have seeds of their own), but an architecture's
        layer may. As many processes as wrote go on with a part each, since sums in another order end in another bit; of
        another number the first takes them all.
        """
        rank, num_processes, num_writers = self._accelerator.process_index, self._accelerator.num_processes, len(state.shards)
        if num_writers != num_processes:
            log(
                f"continued by {num_processes} processes, begun by {num_writers}: the data goes on where it "
                "was, results agree with the run that was not interrupted to rounding, not bit for bit"
            )
        if rank < num_writers:
            random = {name.removeprefix(_RANDOM): held for name, held in state.own(rank).items() if name.startswith(_RANDOM)}
            torch.set_rng_state(random["cpu"])
            if "cuda" in random and self._accelerator.device.type == "cuda":
                torch.cuda.set_rng_state(random["cuda"], self._accelerator.device)
        if num_writers == num_processes:
            return state.own(rank)[_SUMS]
        whole_KX = torch.stack([state.own(number)[_SUMS] for number in range(num_writers)]).sum(0)
        return whole_KX if rank == 0 else torch.zeros_like(whole_KX)

    def head_is_whole(self) -> bool:
        """Whether the head that the run is for is there, undamaged. The main process looks for all: a slower one would see the
        head that the main one has made meanwhile, think the run done, and leave the others waiting for it."""
        return self._from_main(lambda: is_whole(self._folder))

    def tidy(self, *, best_step: int | None) -> None:
        """Take away what killed processes of the run left: half written files and states, and states that were to be deleted."""
        self._from_main(lambda: self._tidy(best_step))

    def save(self, step: int, *, parallel: Parallel, counters: Mapping[str, Any], sums_KX: torch.Tensor, best_step: int | None) -> Path:
        """Write the state after ``step`` steps, if it is not there; keep the newest few and the best. Returns its folder.
        ``sums_KX``: this process' part of what is still to be reported.

        Errors: ValueError where a process cannot write (a full disk); what was complete stays.
        """
        final = self._folder / folder_name(step)
        if self._from_main(lambda: step in complete_steps(self._folder)):
            return final
        temporary = self._from_main(lambda: begin_state(self._folder, step))
        shards = self._together(lambda: self._write(temporary, parallel, sums_KX))
        position = Position(step=step, shapes=self._shapes, settings=self._settings, counters=dict(counters))
        self._from_main(lambda: finish_state(temporary, position, shards))
        self._from_main(lambda: self._prune(best_step))
        return final

    def _write(self, temporary: Path, parallel: Parallel, sums_KX: torch.Tensor) -> Shard:
        accelerator, own = self._accelerator, {_SUMS: sums_KX, f"{_RANDOM}cpu": torch.get_rng_state()}
        if accelerator.device.type == "cuda":
            own[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state(accelerator.device)
        return write_shard(
            temporary, rank=accelerator.process_index, num_processes=accelerator.num_processes, pieces=parallel.pieces(), own=own
        )

    def _tidy(self, best_step: int | None) -> None:
        if self._folder.is_dir():
            clear_unfinished(self._folder)
            self._prune(best_step)

    def _prune(self, best_step: int | None) -> None:
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
    """A failure that is the user's or the machine's as words, so that it can be told to the other processes, which would wait
    for this one."""
    try:
        return action(), None
    except Exception as error:
        said = told(error)
        if said is None:
            raise
        return None, said


def _result(outcomes: list[Any]) -> list[Any]:
    problem = next((problem for _, problem in outcomes if problem is not None), None)
    if problem is not None:
        raise ValueError(problem)
    return [found for found, _ in outcomes]
