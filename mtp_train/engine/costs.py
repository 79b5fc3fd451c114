"""Makes a cost table: an engine times its steps, and what was timed is written beside what it depends on."""

from __future__ import annotations

from pathlib import Path

from mtp_train.acceptance.costs import CostTable
from mtp_train.checkpoint import read_head_config
from mtp_train.engine.base import CostsAsked, Engine
from mtp_train.runtime import provenance
from mtp_train.target.spec import TargetSpec


def measure_costs(engine: Engine, *, target: TargetSpec, checkpoint: Path | None, draft: Path | None, asked: CostsAsked) -> CostTable:
    """``checkpoint`` is the head (None: the target alone), ``draft`` what the engine loads of it.

    Errors: ValueError where the sequences would be longer than the target has positions for.
    """
    if (longest := asked.context_tokens + asked.num_tokens[-1]) > target.max_positions:
        raise ValueError(
            f"context_tokens: expected at most {target.max_positions - asked.num_tokens[-1]} before {asked.num_tokens[-1]} tokens that are "
            f"judged ({target.name} has {target.max_positions} positions), found {asked.context_tokens}, {longest} in all"
        )
    sha256 = None if checkpoint is None else read_head_config(checkpoint)["weights_sha256"]
    found = engine.time_steps(draft, asked)
    if checkpoint is not None and (now := read_head_config(checkpoint)["weights_sha256"]) != sha256:
        raise ValueError(
            f"{checkpoint}: expected the weights that were timed (sha256 {sha256}), found {now}, trained meanwhile; call again"
        )
    return CostTable(
        source="measured",
        engine=engine.word,
        engine_version=engine.version,
        dtype=engine.dtype,
        device=found.device,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        head=None if checkpoint is None else checkpoint.name,
        context_tokens=asked.context_tokens,
        verify=found.verify,
        drafting=found.drafting,
        notes={**found.notes, "head_sha256": sha256, "made_by": provenance()},
    )
