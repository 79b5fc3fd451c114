"""Turns sums over rows into the numbers that are reported: loss, loss per word and depth, agreement, expected acceptance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mtp_train.trainer.objective import Objective

if TYPE_CHECKING:
    from accelerate import Accelerator


class Summary:
    """Sums of ``objective.Result`` over any number of packs and ranks. Nothing waits for the device until ``report``."""

    def __init__(self, *, objective: Objective, device: torch.device) -> None:
        self._objective = objective
        self._sums_KX = torch.zeros(objective.draft_steps, len(objective.columns), dtype=torch.float64, device=device)

    def add(self, sums_KX: torch.Tensor) -> None:
        self._sums_KX += sums_KX

    def reduced(self, accelerator: Accelerator) -> list[list[float]]:
        """The sums over all ranks, as plain numbers; every rank must call."""
        sums: list[list[float]] = accelerator.reduce(self._sums_KX.clone(), "sum").tolist()
        return sums

    def own(self) -> torch.Tensor:
        """This rank's part of the sums, float64 (K, X), to ``add`` to another summary in its place."""
        return self._sums_KX


def report(objective: Objective, sums: list[list[float]]) -> dict[str, Any]:
    """Means over counted rows: ``loss`` (weighted as in training), ``losses`` per word, ``agreement``, ``expected_acceptance``
    (sum of min(p, q)) and ``hidden_rms`` (root mean square of the numbers in the state that the lm_head reads), each a list over
    depths; NaN where not measured or no row counts. Where a part of the vocabulary is drawn in training, also how far the partition
    function's logarithm is then off."""
    columns = objective.columns
    where = {name: columns.index(name) for name in columns}

    def mean(name: str) -> list[float]:
        return [row[where[name]] / row[where["rows"]] if row[where["rows"]] else math.nan for row in sums]

    losses = {word: mean(word) for word in objective.terms}
    total = sum(
        term.weight * objective.weight(depth) * losses[word][depth]
        for word, term in objective.terms.items()
        for depth in range(objective.draft_steps)
        if sums[depth][where["rows"]]
    )
    line = {
        "loss": total,
        "losses": losses,
        "agreement": mean("agree"),
        "expected_acceptance": mean("overlap"),
        "hidden_rms": [math.sqrt(square) if square >= 0 else math.nan for square in mean("square")],
        "rows": [int(row[where["rows"]]) for row in sums],
    }
    return line | ({"log_partition_bias_nats": mean("log_partition")} if objective.needs("vocabulary_sample") else {})
