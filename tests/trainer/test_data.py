"""What is trained on, what is held out, and the probe that is written beside a head."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.batch.packing import pack
from mtp_train.cache.reader import CacheReader
from mtp_train.checkpoint import save_head
from mtp_train.trainer.data import split, validation_packs
from mtp_train.trainer.probe import PROBE, has_probe, write_probe


@pytest.fixture
def reader(recipe: Any) -> CacheReader:
    return CacheReader(recipe.cache, verify="none")


def test_the_split_is_a_partition_that_no_other_sample_moves(reader: CacheReader) -> None:
    train, held_out = split(reader, fraction=0.3, seed=0)
    assert sorted(train.sample_ids + held_out.sample_ids) == sorted(reader.sample_ids)
    assert 0.1 < len(held_out) / len(reader) < 0.5
    smaller, _ = split(reader, fraction=0.1, seed=0)
    assert set(train.sample_ids) <= set(smaller.sample_ids)  # a smaller share only gives back
    assert split(reader, fraction=0.3, seed=1)[1].sample_ids != held_out.sample_ids
    for number, sample_id in enumerate(held_out.sample_ids):
        assert held_out[number].sample_id == sample_id and held_out[number].num_tokens == held_out.lengths[number]
    assert train.fingerprint() != held_out.fingerprint()


def test_all_answers_to_a_prompt_fall_on_one_side(reader: CacheReader) -> None:
    reader.sample_ids = [f"prompt-{number // 4}#{number % 4}" if number % 4 else f"prompt-{number // 4}" for number in range(len(reader))]
    train, held_out = split(reader, fraction=0.4, seed=0)
    prompts = [{sample_id.split("#")[0] for sample_id in side.sample_ids} for side in (train, held_out)]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]


def test_a_split_that_leaves_a_side_empty_is_refused(reader: CacheReader) -> None:
    with pytest.raises(ValueError, match="both sides") as caught:
        split(reader, fraction=1e-9, seed=0)
    told = re.search(r"set validation.fraction=(0\.\d\d), which holds out (\d+), or validation.fraction=0, ", str(caught.value))
    assert told is not None and len(split(reader, fraction=float(told[1]), seed=0)[1]) == int(told[2]) > 0
    reader.sample_ids = ["one prompt", *(f"one prompt#{number}" for number in range(1, len(reader)))]
    with pytest.raises(ValueError, match=r"set validation\.fraction=0 to hold out none"):
        split(reader, fraction=0.05, seed=0)
    assert len(split(reader, fraction=0.0, seed=0)[1]) == 0


def test_validation_takes_every_sample_once_even_one_longer_than_a_pack(reader: CacheReader) -> None:
    _, held_out = split(reader, fraction=0.3, seed=0)
    packs = validation_packs(held_out, tokens_per_pack=10)
    assert sorted(number for numbers in packs for number in numbers) == list(range(len(held_out)))


def test_the_probe_is_what_the_head_computes(recipe: Any, reader: CacheReader, tmp_path: Path) -> None:
    head = recipe.head()
    save_head(tmp_path, head.state_dict(), config=head.draft_config(), target={}, made_by={})
    assert not has_probe(tmp_path)
    write_probe(tmp_path, head, [reader[number] for number in range(6)])
    assert has_probe(tmp_path)
    probe = load_file(tmp_path / PROBE)
    bounds = probe["bounds"].tolist()
    assert bounds == [0, 16, 24]
    samples = sorted((reader[number] for number in range(6)), key=lambda sample: -sample.num_tokens)
    for sample, first, last in zip(samples, bounds, bounds[1:], strict=False):  # each alone, over its beginning
        n = last - first
        cut = replace(
            sample, token_ids_T=sample.token_ids_T[:n], loss_mask_T=sample.loss_mask_T[:n], hidden_TD=sample.hidden_TD[:n], teacher=None
        )
        assert torch.equal(probe["token_ids_T"][first:last], cut.token_ids_T)
        with torch.no_grad():
            for depth, step in zip(range(3), head.unroll(pack([cut])), strict=False):
                rows = slice(first, last - 1 - depth)
                torch.testing.assert_close(probe[f"hidden_{depth}_TD"][rows], step.hidden_TD[: n - 1 - depth], rtol=1e-4, atol=1e-5)
                logits = step.hidden_TD[: n - 1 - depth] @ head.shared.lm_head_VD.T
                torch.testing.assert_close(probe[f"logits_{depth}_TV"][rows], logits, rtol=1e-4, atol=1e-4)
    # The next head's training is killed before it has a probe of its own.
    save_head(tmp_path, {name: tensor + 1 for name, tensor in head.state_dict().items()}, config=head.draft_config(), target={}, made_by={})
    assert not has_probe(tmp_path)
    (tmp_path / PROBE).write_bytes(b"half a file")
    assert not has_probe(tmp_path)
