"""The alignment of DESIGN.md, by its example and by brute force over single samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtp_train.batch.packing import pack, unpack
from mtp_train.batch.shift import loss_rows, read_tokens, rotary_positions, teacher_rows
from mtp_train.records import Sample

A, B, C, D = 11, 12, 13, 14


def _abcd(name: str = "abcd") -> Sample:
    """ "a b c d" with the answer "c d"; the hidden state of position i is 100 i."""
    return Sample(
        sample_id=name,
        token_ids_T=torch.tensor([A, B, C, D]),
        loss_mask_T=torch.tensor([False, False, True, True]),
        hidden_TD=torch.arange(4)[:, None] * 100.0,
    )


def test_the_example_of_the_docstring():
    batch = pack([_abcd()])
    assert read_tokens(batch, depth=0).tolist() == [B, C, D, 0]
    assert read_tokens(batch, depth=1).tolist() == [C, D, 0, 0]
    assert rotary_positions(batch, depth=0).tolist() == [0, 1, 2, 3]
    assert rotary_positions(batch, depth=2).tolist() == [2, 3, 4, 5]
    depth0 = loss_rows(batch, ahead=2)  # base 0 speaks about c, base 1 about d
    assert depth0.base_M.tolist() == [0, 1]
    assert batch.token_ids_T[depth0.label_M].tolist() == [C, D]
    assert batch.hidden_TD[depth0.teacher_M, 0].tolist() == [100.0, 200.0]  # h_b, whose logits predict c; h_c
    depth1 = loss_rows(batch, ahead=3)  # only base 0 is left, and speaks about d
    assert depth1.base_M.tolist() == [0]
    assert batch.token_ids_T[depth1.label_M].tolist() == [D]
    assert batch.hidden_TD[depth1.teacher_M, 0].tolist() == [200.0]
    assert [rows.tolist() for rows in loss_rows(batch, ahead=4)] == [[], [], []]
    assert teacher_rows(batch.loss_mask_T).tolist() == [1, 2]  # z_b speaks about c, z_c about d


def test_two_samples_do_not_see_each_other():
    batch = pack([_abcd("one"), _abcd("two")])
    assert read_tokens(batch, depth=0).tolist() == [B, C, D, 0] * 2
    assert rotary_positions(batch, depth=1).tolist() == [1, 2, 3, 4] * 2
    assert loss_rows(batch, ahead=2).base_M.tolist() == [0, 1, 4, 5]
    assert loss_rows(batch, ahead=3).base_M.tolist() == [0, 4]
    assert loss_rows(batch, ahead=5).base_M.tolist() == []


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 40, 500])
def test_against_the_definition_position_by_position(samples, depth):
    batch = pack(samples)
    reads, positions = read_tokens(batch, depth=depth), rotary_positions(batch, depth=depth)
    expected = []
    for number, sample in enumerate(samples):
        start, n = batch.bounds[number], sample.num_tokens
        for i in range(n):
            assert reads[start + i] == (sample.token_ids_T[i + 1 + depth] if i + 1 + depth < n else 0)
            assert positions[start + i] == i + depth
            ahead = depth + 2
            if i + ahead < n and sample.loss_mask_T[i + ahead]:
                expected.append((start + i, start + i + 1 + depth, start + i + ahead))
    rows = loss_rows(batch, ahead=depth + 2)
    assert list(zip(rows.base_M.tolist(), rows.teacher_M.tolist(), rows.label_M.tolist(), strict=True)) == expected


@pytest.mark.parametrize("ahead", [1, 2, 3, 6])
def test_every_counted_base_has_its_teacher_in_the_cache(samples, ahead):
    batch = pack(samples)
    assert batch.teacher is not None
    assert set(loss_rows(batch, ahead=ahead).teacher_M.tolist()) <= set(batch.teacher.row_M.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_packed_equals_each_sample_alone(samples, seed):
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = [samples[number] for number in order[: 3 + 2 * seed]]
    batch = pack(chosen)
    for depth in range(4):
        alone = [pack([sample]) for sample in chosen]
        assert torch.equal(read_tokens(batch, depth=depth), torch.cat([read_tokens(one, depth=depth) for one in alone]))
        assert torch.equal(rotary_positions(batch, depth=depth), torch.cat([rotary_positions(one, depth=depth) for one in alone]))
        packed = loss_rows(batch, ahead=depth + 2)
        for column in range(3):
            single = [loss_rows(one, ahead=depth + 2)[column] + start for one, start in zip(alone, batch.bounds, strict=False)]
            assert torch.equal(packed[column], torch.cat(single))


def test_a_sample_of_one_token_and_a_mask_of_nothing_count_nothing(samples):
    one = pack([samples[1]])
    assert one.num_tokens == 1
    assert read_tokens(one, depth=0).tolist() == [0]
    assert loss_rows(one, ahead=2).base_M.tolist() == []
    nothing = pack([replace(sample, loss_mask_T=torch.zeros_like(sample.loss_mask_T)) for sample in samples])
    assert loss_rows(nothing, ahead=2).base_M.numel() == 0
    assert [sample.sample_id for sample in unpack(nothing)] == [sample.sample_id for sample in samples]
