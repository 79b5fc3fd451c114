"""Measures a head on samples that it is not trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mtp_train.batch.packing import pack as pack_samples
from mtp_train.runtime import log, progress
from mtp_train.trainer.data import Subset, validation_packs
from mtp_train.trainer.pack_share import PackShare
from mtp_train.trainer.parallel import Parallel
from mtp_train.trainer.settings import BestBy
from mtp_train.trainer.summary import Summary, report

if TYPE_CHECKING:
    from accelerate import Accelerator

# Decided by real decoding (OnValidate), not by the held-out samples.
MEASURED: BestBy = "acceptance_length"


class Validator:
    """Losses, agreement and expected acceptance with the exact teacher over all held-out samples, without noise.

    The packs are shared out over the processes, which all make as many forwards, since a forward may gather weights.
    ``best_by`` names the figure that says which state of the head is best.
    """

    def __init__(
        self, *, accelerator: Accelerator, parallel: Parallel, share: PackShare, subset: Subset, tokens_per_pack: int, best_by: BestBy
    ) -> None:
        self._accelerator, self._parallel, self._share = accelerator, parallel, share
        self._subset, self._best_by = subset, best_by
        packs = validation_packs(subset, tokens_per_pack=tokens_per_pack)
        own = packs[share.rank :: share.num_ranks]
        num_forwards = -(-len(packs) // share.num_ranks)
        self._packs = [(numbers, True) for numbers in own] + [(packs[0], False)] * (num_forwards - len(own))

    def run(self, step: int) -> dict[str, Any]:
        """The figures of ``summary.report`` after ``step`` steps; every rank must call."""
        parallel, objective, device = self._parallel, self._parallel.module.objective, self._accelerator.device
        summary = Summary(objective=objective, device=device)
        vocab_size = parallel.module.head.shared.lm_head_VD.shape[0]
        ones_K = torch.ones(objective.draft_steps, device=device)
        parallel.model.eval()
        with torch.no_grad():
            for numbers, counts in progress(self._packs, desc=f"validate after step {step}", unit="pack"):
                batch = pack_samples([self._subset[number] for number in numbers])
                pack = self._share.align(batch, objective, vocab_size=vocab_size, seed="validation")
                result = parallel.model((pack if counts else pack.silent()).to(device), ones_K, measure=True)
                summary.add(result.sums_KX)
        parallel.model.train()
        line = report(objective, summary.reduced(self._accelerator))
        if "log_partition_bias_nats" in line:
            bias = ", ".join(f"{number:+.4f}" for number in line["log_partition_bias_nats"])
            log(f"sampled_kl: the partition function's logarithm is off by {bias} nats in the mean, per depth; these figures are exact")
        return line

    def value(self, line: Mapping[str, Any]) -> float:
        """The deciding figure of a validation, larger is better: the mean over depths, or minus the loss."""
        assert self._best_by != MEASURED
        if self._best_by == "loss":
            return -float(line["loss"])
        depths = [number for number, rows in zip(line[self._best_by], line["rows"], strict=True) if rows]
        return sum(depths) / len(depths) if depths else -math.inf


def held_out_text(line: Mapping[str, Any]) -> str:
    """The figures of a validation in words, those of each depth side by side; what was not measured is left out."""
    said = [f"{word} {text}" for word in ("agreement", "expected_acceptance") if (text := _by_depth(line[word]))]
    loss = line["loss"]
    return ", ".join([*said, *([] if loss is None else [f"loss {loss:.4f}"])]).replace("_", " ")


def _by_depth(values: Sequence[float | None]) -> str:
    known = [value is not None and math.isfinite(value) for value in values]
    return " / ".join(f"{value:.3f}" if there else "-" for value, there in zip(values, known, strict=True)) if any(known) else ""
