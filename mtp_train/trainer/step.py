"""One optimizer step over this process' packs: forward, backward, one wait for the device, clipping, the update."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from mtp_train.batch.loader import StepBatches
from mtp_train.batch.noise import add_uniform_noise
from mtp_train.records import Batch
from mtp_train.trainer.finite import PackSums, describe_nonfinite
from mtp_train.trainer.objective import Objective
from mtp_train.trainer.optim import set_lr
from mtp_train.trainer.pack_share import PackShare
from mtp_train.trainer.parallel import Parallel
from mtp_train.trainer.rows import Pack
from mtp_train.trainer.settings import LoopSettings, OptimizerSettings, Schedule
from mtp_train.trainer.stop import SIGNALS, StopSignal
from mtp_train.trainer.summary import Summary

if TYPE_CHECKING:
    from accelerate import Accelerator


class Stepped(NamedTuple):
    """``figures`` to log, the tokens that all processes together trained on, the signal that some process received, or 0."""

    figures: dict[str, float]
    num_tokens: int
    stopped_by: int


class Stepper:
    """Takes the steps of one run. ``packs_per_process``: forwards that every process makes in a step, with packs of its own or not."""

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        parallel: Parallel,
        share: PackShare,
        objective: Objective,
        settings: LoopSettings,
        optimizer: OptimizerSettings,
        schedule: Schedule,
        packs_per_process: int,
    ) -> None:
        self._accelerator, self._parallel, self._share, self._objective = accelerator, parallel, share, objective
        self._settings, self._optim, self._schedule = settings, optimizer, schedule
        self._packs_per_process = packs_per_process
        self._vocab_size = parallel.module.head.shared.lm_head_VD.shape[0]

    def __call__(self, batches: StepBatches, summary: Summary, stop: StopSignal) -> Stepped:
        """Train on one step's packs and add what they sum up to ``summary``.

        Errors: ValueError at a loss or gradient that is not finite; the weights are then as they were.
        """
        accelerator, parallel, device = self._accelerator, self._parallel, self._accelerator.device
        packs = self._packs(batches.batches, step=batches.step)
        counted = torch.stack([pack.counts_K for pack in packs]).sum(0).tolist()
        tokens = sum(batch.num_tokens for batch in batches.batches) if self._share.speaks_for_tokens else 0
        # One reduction before the work; its result stays on the device until the step's only wait, below.
        totals = accelerator.reduce(torch.tensor([*counted, tokens], dtype=torch.float64, device=device), "sum")
        # Gradients are averaged over the processes, the objective sums: hence the number of processes.
        scale_K = (accelerator.num_processes / totals[:-1].clamp_min(1)).float()
        loss, done = torch.zeros((), dtype=torch.float64, device=device), []
        for number, pack in enumerate(packs, 1):
            last = number == len(packs)
            with nullcontext() if last else parallel.accumulating():
                result = parallel.model(self._with_noise(pack.to(device), step=batches.step), scale_K, measure=False)
                parallel.backward(result.loss, last=last)
            loss += result.loss.detach()
            summary.add(result.sums_KX)
            done.append(PackSums(pack.batch.sample_ids, result.sums_KX))
        gradients = parallel.gradients()
        norm = torch.nn.utils.get_total_norm(gradients.values()).to(device)
        signals = [torch.tensor(float(stop.number == number), dtype=torch.float64, device=device) for number in SIGNALS]
        shared = accelerator.reduce(torch.stack([loss, norm.double() ** 2, *signals]), "sum")
        if parallel.sharded:
            norm = shared[1].sqrt().to(norm.dtype)
        total_loss, norm_value, num_tokens, *received = torch.stack([shared[0], norm.double(), totals[-1], *shared[2:]]).tolist()
        if not (math.isfinite(total_loss) and math.isfinite(norm_value)):
            words, rank = tuple(self._objective.terms), accelerator.process_index
            raise ValueError(describe_nonfinite(gradients, done, words=words, step=batches.step, rank=rank))
        if self._optim.clip_norm is not None:
            factor = (self._optim.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
            for gradient in gradients.values():
                gradient.mul_(factor)
        lr = self._optim.lr * self._schedule.factor(batches.step, num_steps=self._settings.num_steps)
        set_lr(parallel.optimizer, lr)
        parallel.step()
        stopped_by = next((number for number, count in zip(SIGNALS, received, strict=True) if count), 0)
        return Stepped({"lr": lr, "grad_norm": norm_value}, int(num_tokens), stopped_by)

    def _packs(self, batches: list[Batch], *, step: int) -> list[Pack]:
        """This process' packs, and silent ones where others have more: all take part in every exchange."""
        seed = f"{self._settings.seed}/{step}"
        packs = [self._share.align(batch, self._objective, vocab_size=self._vocab_size, seed=seed) for batch in batches]
        return packs + [packs[0].silent()] * (self._packs_per_process - len(packs))

    def _with_noise(self, pack: Pack, *, step: int) -> Pack:
        if self._settings.noise_scale == 0:
            return pack
        return pack.with_input(add_uniform_noise(pack.batch, scale=self._settings.noise_scale, seed=self._settings.seed, step=step))
