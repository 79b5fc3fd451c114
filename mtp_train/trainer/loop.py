"""The training loop: steps of packs, validation, checkpoints, and an end that can come at any moment."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mtp_train.batch.loader import StepLoader
from mtp_train.batch.plan import DataPlan, check_packs
from mtp_train.checkpoint import save_head
from mtp_train.head.base import Head
from mtp_train.runtime import log, progress
from mtp_train.trainer.arrival import await_batches
from mtp_train.trainer.data import Subset
from mtp_train.trainer.metrics import METRICS, Metrics, WandbSettings, read_metrics
from mtp_train.trainer.module import TrainingModule
from mtp_train.trainer.objective import Objective
from mtp_train.trainer.pack_share import share_packs
from mtp_train.trainer.parallel import ParallelSettings, make_parallel, with_constants
from mtp_train.trainer.profiling import Stepping, profiling
from mtp_train.trainer.saving import Saver, load_weights
from mtp_train.trainer.settings import LoopSettings, OptimizerSettings, Schedule
from mtp_train.trainer.state import HeadFile, StateReader, folder_name
from mtp_train.trainer.step import Stepper
from mtp_train.trainer.stop import INTERRUPTED, StopSignal, exit_status, note_in, note_interruption
from mtp_train.trainer.summary import Summary, report
from mtp_train.trainer.validation import MEASURED, Validator, held_out_text

if TYPE_CHECKING:
    from accelerate import Accelerator
    from tqdm import tqdm

OnValidate = Callable[[int, Path], Mapping[str, Any] | None]
# The folder, beside the states, that holds the head that ``on_validate`` measures.
MEASURED_HEAD = "measured"


class Trainer:
    """Trains one head; ``run`` continues where a run in ``out`` stopped, bit for bit.

    ``validation`` None validates nothing. ``on_validate(step, folder)`` is called on the main process every
    ``measure_every`` steps, and after the last one, with a folder that holds the head of that step; the figures that it
    returns are logged as split ``decoding``. ``identity`` are the settings that a continuation must share. ``before_read`` is
    called, in the loader's thread, with each step whose samples are about to be read.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        head: Head,
        objective: Objective,
        train: Subset,
        plan: DataPlan,
        validation: Subset | None,
        settings: LoopSettings,
        parallel: ParallelSettings,
        optimizer: OptimizerSettings,
        schedule: Schedule,
        out: Path,
        head_file: HeadFile,
        identity: Mapping[str, Any],
        wandb: WandbSettings,
        on_validate: OnValidate | None,
        before_read: Callable[[int], None] | None = None,
    ) -> None:
        measured = settings.best_by == MEASURED
        if measured and on_validate is None:
            raise ValueError(
                "checkpoint.best_by: expected validation.decode.every beside acceptance_length, found null; set it, or choose agreement"
            )
        if settings.final == "best" and validation is None and not measured:
            raise ValueError("checkpoint.final: expected last where nothing is validated, found best; hold samples out or set it to last")
        self._accelerator, self._head, self._objective = accelerator, head, objective
        self._train, self._plan, self._settings = train, plan, settings
        self._out, self._head_file, self._identity, self._wandb = out, head_file, dict(identity), wandb
        self._on_validate, self._before_read = on_validate, before_read
        self._share = share_packs(accelerator, context=parallel.context)
        check_packs(plan.packs_per_step, world_size=self._share.num_ranks)
        self._saver = Saver(folder=out, accelerator=accelerator, head=head, settings=identity, keep_last=settings.keep_last)
        self._state = self._saver.newest()
        if self._state is not None:
            load_weights(head, self._state)  # while each process still holds them whole
        packs_per_process = plan.packs_per_process(self._share.num_ranks)
        self._parallel = make_parallel(
            parallel,
            accelerator=accelerator,
            module=TrainingModule(head=head, objective=objective, precision=settings.precision),
            optimizer=optimizer,
            packs_per_process=packs_per_process,
        )
        self._step = Stepper(
            accelerator=accelerator,
            parallel=self._parallel,
            share=self._share,
            objective=objective,
            settings=settings,
            optimizer=optimizer,
            schedule=schedule,
            packs_per_process=packs_per_process,
        )
        self._validator = None
        if validation is not None:
            self._validator = Validator(
                accelerator=accelerator,
                parallel=self._parallel,
                share=self._share,
                subset=validation,
                tokens_per_pack=plan.tokens_per_pack,
                best_by=settings.best_by,
            )
        self._summary = self._new_summary()
        self._tokens, self._window_tokens = 0, 0
        self._best: dict[str, float] | None = None  # {"step", "value"} of the best validation

    def run(self) -> bool:
        """Train to the last step; False where all steps were done before. Ends the process, state saved, where a signal asks for
        it, with ``stop.exit_status``.

        Errors: ValueError where the settings differ from those of the run to continue, or at a loss or gradient that is
        not finite.
        """
        first = 0 if self._state is None else self._restore(self._state)
        self._saver.tidy(best_step=self._best_step())
        if self._accelerator.is_main_process:
            (self._out / INTERRUPTED).unlink(missing_ok=True)
        if first >= self._settings.num_steps and self._saver.head_is_whole():
            log(f"nothing left to do, all {first} steps are done in {self._out}")
            return False
        metrics = Metrics(out=self._out, wandb=self._wandb, settings=self._identity, resumed_step=first)
        loader = StepLoader(
            reader=self._train,
            plan=self._plan,
            rank=self._share.rank,
            world_size=self._share.num_ranks,
            start_step=min(first, self._settings.num_steps),
            stop_step=self._settings.num_steps,
            max_prefetch=self._settings.max_prefetch,
            before_read=self._before_read,
        )
        bar = progress(desc="train", unit="step", total=self._settings.num_steps, initial=first)
        try:
            with (
                StopSignal() as stop,
                loader,
                bar,
                profiling(self._out, enabled=self._settings.profile, rank=self._accelerator.process_index) as profile,
            ):
                self._run_steps(first, loader, stop, metrics, bar, profile)
            note_in(self._out, step=self._settings.num_steps)
            self._finish()
        finally:
            metrics.close()
        return True

    def _run_steps(self, done: int, loader: StepLoader, stop: StopSignal, metrics: Metrics, bar: tqdm[Any], profile: Stepping) -> None:
        settings, steps = self._settings, iter(loader)
        began_s = time.perf_counter()
        while done < settings.num_steps:
            if not self._train.cache.is_local and (stopped_by := await_batches(loader, stop, accelerator=self._accelerator)):
                self._end_early(stopped_by, done, self._save(done) if done else None)
            batches = next(steps)
            done = batches.step + 1
            last = done == settings.num_steps
            stepped = self._step(batches, self._summary, stop)
            stopped_by = stepped.stopped_by
            profile.step()
            self._tokens += stepped.num_tokens
            self._window_tokens += stepped.num_tokens
            if done % settings.log_every == 0 or last:
                now_s = time.perf_counter()
                line = report(self._objective, self._summary.reduced(self._accelerator))
                speed = self._window_tokens / (now_s - began_s)
                metrics.write(
                    {
                        "step": done,
                        "split": "train",
                        "epoch": batches.epoch,
                        "tokens": self._tokens,
                        **stepped.figures,
                        **line,
                        "tokens_per_s": speed,
                    }
                )
                known = math.isfinite(line["agreement"][0])  # a loss over drawn tokens alone sees no argmax
                agreement = {"agreement": f"{line['agreement'][0]:.3f}"} if known else {}
                bar.set_postfix(loss=f"{line['loss']:.4f}", **agreement, tok_s=f"{speed:.0f}", refresh=False)
                self._summary, self._window_tokens, began_s = self._new_summary(), 0, now_s
            bar.update(1)
            improved, measures = False, self._on_validate is not None and (last or _due(done, settings.measure_every))
            before_s = time.perf_counter()
            if self._validator is not None and (last or _due(done, settings.validate_every)):
                improved = self._validate(done, metrics)
            if measures:
                improved = self._measure(done, metrics) or improved
            began_s += time.perf_counter() - before_s  # validating is not training: leave it out of tokens_per_s
            # A state is written behind the measurement of its step: killed in between, the continued run measures again.
            if last or improved or measures or stopped_by or _due(done, settings.save_every):
                folder = self._save(done)
                if stopped_by and not last:
                    self._end_early(stopped_by, done, folder)

    def _end_early(self, stopped_by: int, done: int, folder: Path | None) -> NoReturn:
        where = "before the first step" if folder is None else f"after step {done}, saved in {folder}"
        log(f"stopped by {signal.Signals(stopped_by).name} {where}; the same command continues")
        if self._accelerator.is_main_process:
            note_interruption(self._out, number=stopped_by, step=done)
        sys.exit(exit_status(stopped_by))

    def _validate(self, done: int, metrics: Metrics) -> bool:
        """Validate and write it down; whether this is the best so far."""
        assert self._validator is not None
        line = self._validator.run(done)
        metrics.write({"step": done, "split": "validation", "tokens": self._tokens, **line})
        log(f"held out, after step {done}: {held_out_text(line)}")
        return self._settings.best_by != MEASURED and self._is_best(done, self._validator.value(line))

    def _measure(self, done: int, metrics: Metrics) -> bool:
        """Have the head measured by real decoding and write it down; whether this is the best so far. All ranks wait for it."""
        from accelerate.utils import broadcast_object_list

        assert self._on_validate is not None
        found: list[Mapping[str, Any] | None] = [None]
        weights = self._parallel.whole_weights()
        if self._accelerator.is_main_process:
            folder = self._out / MEASURED_HEAD
            made_by = {**self._head_file.made_by, "step": done}
            save_head(folder, weights, config=self._head_file.config, target=self._head_file.target, made_by=made_by)
            with torch.random.fork_rng(devices=[]):  # whatever measuring draws, training goes on as if it had not
                found = [self._on_validate(done, folder)]
        figures = broadcast_object_list(found)[0]
        if figures is None:
            return False
        metrics.write({"step": done, "split": "decoding", "tokens": self._tokens, **figures})
        value = figures["acceptance_length"]
        return self._settings.best_by == MEASURED and value is not None and self._is_best(done, value)

    def _is_best(self, done: int, value: float) -> bool:
        if self._best is not None and not value > self._best["value"]:
            return False
        self._best = {"step": done, "value": value}
        return True

    def _new_summary(self) -> Summary:
        return Summary(objective=self._objective, device=self._accelerator.device)

    def _best_step(self) -> int | None:
        return None if self._best is None else int(self._best["step"])

    def _save(self, done: int) -> Path:
        # What the loop counts is saved too, so that a resumed run also reports what the uninterrupted one would have.
        counters = {"tokens": self._tokens, "window_tokens": self._window_tokens, "best": self._best}
        return self._saver.save(done, parallel=self._parallel, counters=counters, sums_KX=self._summary.own(), best_step=self._best_step())

    def _restore(self, state: StateReader) -> int:
        """Put back all but the weights; returns the steps that are done."""
        self._parallel.load_optimizer(state)
        self._summary.add(self._saver.restore_own(state).to(self._accelerator.device))
        counters = state.position.counters
        self._tokens, self._window_tokens, self._best = counters["tokens"], counters["window_tokens"], counters["best"]
        log(f"continuing after step {state.position.step} from {state.path}")
        return state.position.step

    def _finish(self) -> None:
        """Write the head that the run is for beside its states."""
        if self._accelerator.is_main_process:
            step = self._settings.num_steps
            if self._settings.final == "best" and self._best is None:
                assert self._settings.best_by == MEASURED  # held-out samples give a figure at the last step at the latest
                log("no measurement of acceptance succeeded, so that no step is known to be the best: the last one becomes the head")
            elif self._settings.final == "best":
                assert self._best is not None
                step = int(self._best["step"])
            weights = with_constants(self._head, StateReader(self._out / folder_name(step)).weights())
            made_by = {**self._head_file.made_by, "step": step, "tokens": self._tokens, "best": self._best}
            save_head(self._out, weights, config=self._head_file.config, target=self._head_file.target, made_by=made_by)
            found = [line for line in read_metrics(self._out / METRICS) if (line["step"], line["split"]) == (step, "validation")]
            log(f"the head of step {step} is in {self._out}" + "".join(f"; held out: {held_out_text(line)}" for line in found[-1:]))
        self._accelerator.wait_for_everyone()


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0
