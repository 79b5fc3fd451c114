"""Every forward of the draft head inside vLLM, as its probe kept it: what it read, what it said, for whom and where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_NAMES = ("input_ids", "positions", "read", "hidden", "feedback", "logits")


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """One request's rows R of one forward. ``depth`` 0 enters bases (rejected ones among them, behind the valid ones),
    later depths have one row. ``read_RD`` is the hidden state read, ``feedback_RD`` what the next depth reads."""

    request_id: str
    step: int
    depth: int
    token_ids_R: torch.Tensor
    position_R: torch.Tensor
    read_RD: torch.Tensor
    hidden_RD: torch.Tensor
    feedback_RD: torch.Tensor
    logits_RV: torch.Tensor


def read_trace(path: Path) -> Iterator[DraftRows]:
    """Read what ``VllmProbe.mtp_train_take_draft`` wrote, in the order of the forwards."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        depth, step = 0, -1
        for index, call in enumerate(json.loads(opened.metadata()["calls"])):
            depth = depth + 1 if call["step"] == step else 0
            step = call["step"]
            tensors = {name: opened.get_tensor(f"{index}.{name}") for name in _NAMES}
            for number, request_id in enumerate(call["request_ids"]):
                rows = slice(call["bounds"][number], call["bounds"][number + 1])
                yield DraftRows(
                    request_id=request_id,
                    step=step,
                    depth=depth,
                    token_ids_R=tensors["input_ids"][rows],
                    position_R=tensors["positions"][rows],
                    read_RD=tensors["read"][rows],
                    hidden_RD=tensors["hidden"][rows],
                    feedback_RD=tensors["feedback"][rows],
                    logits_RV=tensors["logits"][rows],
                )
