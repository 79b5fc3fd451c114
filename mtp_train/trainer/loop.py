"""The training loop: steps of packs, validation, checkpoints, and an end that can come at any moment."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtp_train.batch.loader import StepBatches, StepLoader
from mtp_train.batch.noise import add_uniform_noise
from mtp_train.batch.plan import DataPlan
from mtp_train.checkpoint import is_whole, read_head_tensors, save_head
from mtp_train.head.base import Head
from mtp_train.records import Batch
from mtp_train.runtime import log, progress
from mtp_train.trainer.data import Subset
from mtp_train.trainer.finite import PackSums, describe_nonfinite
from mtp_train.trainer.metrics import Metrics, WandbSettings
from mtp_train.trainer.module import TrainingModule
from mtp_train.trainer.objective import Objective
from mtp_train.trainer.optim import OptimizerSettings, Schedule, build_optimizer, set_lr
from mtp_train.trainer.rows import Pack, align
from mtp_train.trainer.saving import Saver
from mtp_train.trainer.settings import LoopSettings
from mtp_train.trainer.state import HeadFile, folder_name
from mtp_train.trainer.stop import StopSignal
from mtp_train.trainer.summary import Summary, from_json, report, to_json
from mtp_train.trainer.validation import MEASURED, Validator

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
    returns are logged as split ``decoding``. ``identity`` are the settings that a continuation must share.
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
        optimizer: OptimizerSettings,
        schedule: Schedule,
        out: Path,
        head_file: HeadFile,
        identity: Mapping[str, Any],
        wandb: WandbSettings,
        on_validate: OnValidate | None,
    ) -> None:
        measured = settings.best_by == MEASURED
        if measured and on_validate is None:
            raise ValueError(
                "checkpoint.best_by: expected validation.decode.every beside acceptance_length, found null; set it, or choose agreement"
            )
        if settings.final == "best" and validation is None and not measured:
            raise ValueError("checkpoint.final: expected last where nothing is validated, found best; hold samples out or set it to last")
        self._accelerator, self._head, self._objective = accelerator, head, objective
        self._train, self._plan = train, plan
        self._settings, self._optim, self._schedule = settings, optimizer, schedule
        self._out, self._head_file, self._identity, self._wandb = out, head_file, dict(identity), wandb
        self._on_validate = on_validate
        self._module = TrainingModule(head=head, objective=objective, precision=settings.precision)
        self._model, self._optimizer = accelerator.prepare(self._module, build_optimizer(self._module, optimizer))
        self._parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
        self._saver = Saver(
            folder=out,
            accelerator=accelerator,
            head=head,
            optimizer=self._optimizer.optimizer,
            head_file=head_file,
            settings=identity,
            keep_last=settings.keep_last,
        )
        self._validator = None
        if validation is not None:
            self._validator = Validator(
                accelerator=accelerator,
                module=self._module,
                subset=validation,
                tokens_per_pack=plan.tokens_per_pack,
                best_by=settings.best_by,
            )
        self._summary = self._new_summary()
        self._tokens, self._window_tokens = 0, 0
        self._best: dict[str, float] | None = None  # {"step", "value"} of the best validation
        self._packs: list[PackSums] = []

    def run(self) -> bool:
        """Train to the last step; False where all steps were done before. Ends the process with 128 + signal number, state
        saved, where a signal asks for it.

        Errors: ValueError where the settings differ from those of the run to continue, or at a loss or gradient that is
        not finite.
        """
        state = self._saver.resume()
        first = 0 if state is None else state.step
        if state is not None:
            self._restore_counters(state.counters)
        if first >= self._settings.num_steps and is_whole(self._out):
            log(f"nothing left to do, all {first} steps are done in {self._out}")
            return False
        metrics = Metrics(out=self._out, wandb=self._wandb, settings=self._identity, resumed_step=first)
        loader = StepLoader(
            reader=self._train,
            plan=self._plan,
            rank=self._accelerator.process_index,
            world_size=self._accelerator.num_processes,
            start_step=min(first, self._settings.num_steps),
            stop_step=self._settings.num_steps,
            max_prefetch=self._settings.max_prefetch,
        )
        bar = progress(desc="train", unit="step", total=self._settings.num_steps, initial=first)
        try:
            with StopSignal() as stop, loader, bar:
                self._run_steps(loader, stop, metrics, bar)
            self._finish()
        finally:
            metrics.close()
        return True

    def _run_steps(self, loader: StepLoader, stop: StopSignal, metrics: Metrics, bar: tqdm[Any]) -> None:
        settings = self._settings
        began_s = time.perf_counter()
        for batches in loader:
            done = batches.step + 1
            last = done == settings.num_steps
            figures, stopped_by = self._step(batches, stop)
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
                        **figures,
                        **line,
                        "tokens_per_s": speed,
                    }
                )
                bar.set_postfix(loss=f"{line['loss']:.4f}", agreement=f"{line['agreement'][0]:.3f}", tok_s=f"{speed:.0f}", refresh=False)
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
                    name = signal.Signals(stopped_by).name
                    log(f"stopped by {name} after step {done}, saved in {folder}; the same command continues")
                    sys.exit(128 + stopped_by)

    def _step(self, batches: StepBatches, stop: StopSignal) -> tuple[dict[str, float], int]:
        """One optimizer step over this rank's packs. Returns figures to log and the signal that some rank received, or 0."""
        accelerator, device = self._accelerator, self._accelerator.device
        packs = [self._align(batch) for batch in batches.batches]
        counted = torch.stack([pack.counts_K for pack in packs]).sum(0).tolist()
        tokens = sum(pack.batch.num_tokens for pack in packs)
        # One reduction before the work; its result stays on the device until the step's only wait, below.
        totals = accelerator.reduce(torch.tensor([*counted, tokens], dtype=torch.float64, device=device), "sum")
        # DistributedDataParallel averages gradients over ranks, the objective sums: hence the number of processes.
        scale_K = (accelerator.num_processes / totals[:-1].clamp_min(1)).float()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        self._packs = []
        for number, pack in enumerate(packs):
            with accelerator.no_sync(self._model) if number + 1 < len(packs) else nullcontext():
                result = self._model(self._with_noise(pack.to(device), step=batches.step), scale_K, measure=False)
                accelerator.backward(result.loss)
            loss += result.loss.detach()
            self._summary.add(result.sums_KX)
            self._packs.append(PackSums(pack.batch.sample_ids, result.sums_KX))
        grad_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        shared = accelerator.reduce(torch.stack([loss, torch.tensor(float(stop.number), dtype=torch.float64, device=device)]), "sum")
        total_loss, stop_numbers, norm, step_tokens = torch.stack([*shared, grad_norm.double(), totals[-1]]).tolist()
        if not (math.isfinite(total_loss) and math.isfinite(norm)):
            words = tuple(self._objective.terms)
            raise ValueError(describe_nonfinite(self._head, self._packs, words=words, step=batches.step, rank=accelerator.process_index))
        if self._optim.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._optim.clip_norm, grad_norm)
        lr = self._optim.lr * self._schedule.factor(batches.step, num_steps=self._settings.num_steps)
        set_lr(self._optimizer.optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._tokens += int(step_tokens)
        self._window_tokens += int(step_tokens)
        # The same signal reaches every rank, or only some: any of them ends the run on all.
        stopped_by = 0 if stop_numbers == 0 else int(stop.number or signal.SIGTERM)
        return {"lr": lr, "grad_norm": norm}, stopped_by

    def _align(self, batch: Batch) -> Pack:
        return align(batch, draft_steps=self._objective.draft_steps, need_top=self._objective.needs("topk_teacher"))

    def _with_noise(self, pack: Pack, *, step: int) -> Pack:
        if self._settings.noise_scale == 0:
            return pack
        return pack.with_input(add_uniform_noise(pack.batch, scale=self._settings.noise_scale, seed=self._settings.seed, step=step))

    def _validate(self, done: int, metrics: Metrics) -> bool:
        """Validate and write it down; whether this is the best so far."""
        assert self._validator is not None
        line = self._validator.run(done)
        metrics.write({"step": done, "split": "validation", "tokens": self._tokens, **line})
        return self._settings.best_by != MEASURED and self._is_best(done, self._validator.value(line))

    def _measure(self, done: int, metrics: Metrics) -> bool:
        """Have the head measured by real decoding and write it down; whether this is the best so far. All ranks wait for it."""
        from accelerate.utils import broadcast_object_list

        assert self._on_validate is not None
        found: list[Mapping[str, Any] | None] = [None]
        if self._accelerator.is_main_process:
            folder = self._out / MEASURED_HEAD
            weights = {name: tensor.detach() for name, tensor in self._head.state_dict().items()}
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

    def _save(self, done: int) -> Path:
        return self._saver.save(done, counters=self._counters(), best_step=None if self._best is None else int(self._best["step"]))

    def _counters(self) -> dict[str, Any]:
        """What the loop counts, so that a resumed run also reports what the uninterrupted one would have."""
        window = self._summary.reduced(self._accelerator)
        return {"tokens": self._tokens, "window_tokens": self._window_tokens, "window_sums": to_json(window), "best": self._best}

    def _restore_counters(self, counters: Mapping[str, Any]) -> None:
        self._tokens, self._window_tokens, self._best = counters["tokens"], counters["window_tokens"], counters["best"]
        if self._accelerator.is_main_process:
            self._summary.restore(from_json(counters["window_sums"]))

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
            weights = read_head_tensors(self._out / folder_name(step))
            made_by = {**self._head_file.made_by, "step": step, "tokens": self._tokens, "best": self._best}
            save_head(self._out, weights, config=self._head_file.config, target=self._head_file.target, made_by=made_by)
            log(f"the head of step {step} is in {self._out}")
        self._accelerator.wait_for_everyone()


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0
