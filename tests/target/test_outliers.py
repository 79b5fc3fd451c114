"""The target with outlier channels is the same model: logits to the last bit, hidden states scaled where it was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_train.runtime import read_json
from mtp_train.target.outliers import Outliers, spread_channels, write_outlier_target
from mtp_train.target.weights import read_shared
from tests.conftest import write_tiny_llama

OUTLIERS = Outliers(channels=(3, 40), factor=256.0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_the_same_bits_and_hidden_states_are_scaled(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    source = write_tiny_llama(tmp_path / "source", tied=tied)
    out = write_outlier_target(source, tmp_path / "out", outliers=OUTLIERS)
    token_ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    found = {}
    for path in (source, out):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        with torch.inference_mode():
            hidden = model.model(token_ids).last_hidden_state
            found[path] = hidden, model.lm_head(hidden)
    assert torch.equal(found[source][1], found[out][1])
    assert torch.equal(OUTLIERS.scale(found[source][0]), found[out][0])
    assert not torch.equal(found[source][0], found[out][0])
    shared = read_shared(out)
    assert not shared.tied
    assert torch.equal(shared.embedding_VD, read_shared(source).embedding_VD)


def test_the_copy_is_whole_or_not_there(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source")
    out = write_outlier_target(source, tmp_path / "out", outliers=OUTLIERS)
    before = (out / "model.safetensors").read_bytes()
    assert write_outlier_target(source, out, outliers=OUTLIERS) == out  # kept
    assert (out / "model.safetensors").read_bytes() == before
    assert (out / "tokenizer.json").is_file() and read_json(out / "config.json")["tie_word_embeddings"] is False
    assert not (out / ".mtp_train_fingerprint.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="found something else"):
        write_outlier_target(source, tmp_path / "other", outliers=OUTLIERS)


def test_what_would_round_or_lies_outside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Outliers(channels=(1,), factor=100.0)
    with pytest.raises(ValueError, match="different channels"):
        Outliers(channels=(1, 1), factor=2.0)
    with pytest.raises(ValueError, match="1 to 64 channels"):
        spread_channels(64, count=65)
    assert spread_channels(64, count=4) == (8, 24, 40, 56)
    with pytest.raises(ValueError, match="channels below 64"):
        write_outlier_target(write_tiny_llama(tmp_path / "source"), tmp_path / "out", outliers=Outliers(channels=(64,), factor=2.0))
