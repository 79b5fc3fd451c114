"""Checkpoints of random heads over the tiny target, with the probe that training writes beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.checkpoint import save_head
from mtp_train.head.eagle import Eagle
from mtp_train.head.mtp import Mtp
from mtp_train.head.pair import PairHead
from mtp_train.records import Sample
from mtp_train.target.spec import read_spec
from mtp_train.target.weights import read_shared
from mtp_train.trainer.probe import write_probe

ON = {"embed": True, "hidden": True, "input": True, "output": True, "feedback": True}
OFF = dict.fromkeys(ON, False)


def untouched_head(target: Path, *, word: str, seed: int = 0, **changes: Any) -> PairHead:
    """A head by its yaml's settings, random unless ``init`` says otherwise, as it is built."""
    settings: dict[str, Any] = {
        "mtp": {"norms": ON, "column_order": "hidden_embed", "zero_first_embedding": True},
        "eagle": {"norms": OFF, "column_order": "embed_hidden", "zero_first_embedding": False},
    }[word]
    kind = {"mtp": Mtp, "eagle": Eagle}[word]
    settings |= {"init": "random", "seed": seed, **changes}
    return kind(target_path=target, shared=read_shared(target), trust_remote_code=False, **settings).eval()


def build_head(target: Path, *, word: str, seed: int = 0, **changes: Any) -> PairHead:
    """A random head by its yaml's settings, all of its tensors moved away from where they start."""
    head = untouched_head(target, word=word, seed=seed, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return head


def write_checkpoint(path: Path, target: Path, head: PairHead, *, seed: int = 0) -> Path:
    """What ``train`` leaves: head.safetensors, head.json, and a probe over random samples."""
    spec = read_spec(target, name="tiny")
    save_head(
        path,
        dict(head.state_dict()),
        config=head.draft_config(),
        target={"target_name": spec.name, "target_fingerprint": spec.fingerprint},
        made_by={},
    )
    generator = torch.Generator().manual_seed(seed)
    samples = [
        Sample(
            sample_id=str(length),
            token_ids_T=torch.randint(0, spec.vocab_size, (length,), generator=generator),
            loss_mask_T=torch.ones(length, dtype=torch.bool),
            hidden_TD=torch.randn(length, spec.hidden_size, generator=generator),
        )
        for length in (20, 9)
    ]
    write_probe(path, head, samples)
    return path


@pytest.fixture
def checkpoint_of(tmp_path: Path) -> Callable[..., Path]:
    """``checkpoint_of(target, word="mtp", name=..., seed=..., **settings)``: the folder of a head on disk."""

    def make(target: Path, *, word: str, name: str = "head", seed: int = 0, **changes: Any) -> Path:
        return write_checkpoint(tmp_path / "checkpoint" / name, target, build_head(target, word=word, seed=seed, **changes), seed=seed)

    return make
