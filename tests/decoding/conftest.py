"""A small head with random weights, and texts with random hidden states, shared by the tests of drafters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.decoding.base import NewBases
from mtp_train.head.mtp import Mtp
from mtp_train.nn.ragged import RaggedCache
from mtp_train.target.weights import SharedWeights

V, D = 96, 32
NORMS = ("embed", "hidden", "input", "output", "feedback")


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Mtp:
    from transformers import LlamaConfig

    path: Path = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    config.save_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    shared = SharedWeights(
        embedding_VD=torch.randn(V, D, generator=generator),
        lm_head_VD=torch.randn(V, D, generator=generator),
        final_norm_weight_D=torch.ones(D),
        rms_norm_eps=1e-5,
    )
    return Mtp(
        target_path=path,
        shared=shared,
        norms=dict.fromkeys(NORMS, True),
        column_order="hidden_embed",
        zero_first_embedding=True,
        init="random",
        seed=0,
        trust_remote_code=False,
    ).eval()


@pytest.fixture(scope="session")
def text_of() -> Callable[[int, int], tuple[list[int], torch.Tensor]]:
    """Random tokens of some length with random hidden states, by a seed."""

    def make(length: int, seed: int) -> tuple[list[int], torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(V, (length,), generator=generator).tolist(), torch.randn(length, D, generator=generator)

    return make


@pytest.fixture(scope="session")
def bases_of() -> Callable[..., NewBases]:
    """Bases ``first`` .. ``last`` - 1 of a text, each with the token behind it."""

    def make(slot: int, tokens: list[int], hidden: torch.Tensor, first: int, last: int, **changes: Any) -> NewBases:
        return NewBases(slot=slot, token_ids=tokens[first + 1 : last + 1], hidden_BD=hidden[first:last], **{"drafts": True, **changes})

    return make


@pytest.fixture(scope="session")
def held_by() -> Callable[[RaggedCache, int], tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values that a slot of a one-layer cache holds."""

    def take(cache: RaggedCache, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        ((keys, values),) = cache._layers.values()
        return keys[slot, :, : cache.lengths[slot]], values[slot, :, : cache.lengths[slot]]

    return take
