"""Which device a process takes, and which targets cannot be decoded with drafts beyond some length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.decoding.prompt_lookup import PromptLookup
from mtp_train.engine.base import Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.hf_model import choose_device


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a machine with four GPUs, on one that has none."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("local_rank", "num_local", "found"), [(0, 4, "cuda:0"), (3, 4, "cuda:3"), (5, 8, "cuda:1"), (0, 1, "cuda")])
@pytest.mark.parametrize("word", ["auto", "cuda"])
def test_each_process_takes_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, word: str, local_rank: int, num_local: int, found: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local))
    assert choose_device(word) == torch.device(found)


@pytest.mark.usefixtures("four_gpus")
def test_a_device_that_was_named_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    for word in ("quantum", "cuda:77"):
        with pytest.raises(
            ValueError, match=f"engine.device: expected auto, or a device that torch finds here, such as cpu, found '{word}'"
        ):
            choose_device(word)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("rope", "limit"), [(DYNAMIC, 256), (LONG, 64), (YARN, None)], ids=lambda value: str(value)[:20])
def test_a_draft_never_turns_the_tokens_before_it(tmp_path: Path, make_engine: Any, rope: dict[str, Any], limit: int | None) -> None:
    """transformers takes other rotary angles for a whole forward where one position of it lies beyond ``limit``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256, rope_parameters=rope, eos_token_id=None)).save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    settings = SpeculateSettings(
        decoding=PromptLookup(num_speculative_tokens=4, max_ngram=2, min_ngram=1),
        draft_sampling="greedy",
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=10, seed=0),
        batch_size=2,
        ignore_eos=True,
    )

    def decode(num_tokens: int) -> None:
        asked = [SpeculateRequest(prompt_id="r", category="c", token_ids=(1, 2, 3, 4) * (num_tokens // 4))]
        found = engine.speculate(asked, None, settings)
        assert {"r": found.prompts[0].token_ids} == engine.baseline(asked, settings).token_ids
        assert found.num_drafts

    decode(48)
    if limit is None:
        return decode(64)
    with pytest.raises(ValueError, match=f"expected sequences of at most {limit} tokens, drafts included, found {limit + 11}; beyond them"):
        decode(limit - 4)
    with pytest.raises(ValueError, match=f"at most {limit} tokens"):
        engine.logit_gap([1] * (limit + 1))
