"""Packed random samples and heads over the tiny target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.batch.packing import pack
from mtp_train.head.eagle import Eagle
from mtp_train.head.mtp import Mtp
from mtp_train.head.pair import PairHead
from mtp_train.records import Batch, Sample
from mtp_train.target.weights import read_shared

SIZE, VOCABULARY = 64, 320


def _sample(number: int, length: int) -> Sample:
    draw = torch.Generator().manual_seed(100 + number)
    return Sample(
        sample_id=f"s{number}",
        token_ids_T=torch.randint(0, VOCABULARY, (length,), generator=draw),
        loss_mask_T=torch.arange(length) >= length // 3,
        hidden_TD=torch.randn(length, SIZE, generator=draw),
    )


@pytest.fixture
def samples() -> list[Sample]:
    return [_sample(number, length) for number, length in enumerate((7, 1, 12, 3, 2))]


@pytest.fixture
def batch(samples: list[Sample]) -> Batch:
    return pack(samples)


@pytest.fixture
def make_head(tiny_llama: Path) -> Callable[..., PairHead]:
    def make(*, kind: type[PairHead] = Mtp, norms: Mapping[str, bool] | None = None, **changes: Any) -> PairHead:
        on = kind is Mtp
        settings: dict[str, Any] = {
            "norms": norms or dict.fromkeys(("embed", "hidden", "input", "output", "feedback"), on),
            "column_order": "hidden_embed" if on else "embed_hidden",
            "zero_first_embedding": on,
            "init": "random",
            "seed": 0,
            **changes,
        }
        head = kind(target_path=tiny_llama, shared=read_shared(tiny_llama), trust_remote_code=False, **settings)
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 1:  # norms start at 1, which would hide one that is skipped
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
                elif settings["init"] == "random":  # without norms, the tiny target's large weights blow rounding up
                    parameter.mul_(0.5)
        return head

    return make


@pytest.fixture
def kinds() -> dict[str, type[PairHead]]:
    return {"mtp": Mtp, "eagle": Eagle}
