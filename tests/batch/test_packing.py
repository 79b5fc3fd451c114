"""Packing loses and mixes nothing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from mtp_train.batch.packing import pack, unpack


def test_unpack_gives_back_what_was_packed(samples, equal):
    for sample, found in zip(samples, unpack(pack(samples)), strict=True):
        for field in fields(sample):
            if field.name != "category":
                assert equal(getattr(found, field.name), getattr(sample, field.name)), field.name


def test_rows_know_their_sample_and_position(samples):
    batch = pack(samples)
    assert batch.num_tokens == sum(sample.num_tokens for sample in samples)
    for row in range(batch.num_tokens):
        sample, position = int(batch.sample_T[row]), int(batch.position_T[row])
        assert batch.bounds[sample] + position == row
        assert torch.equal(batch.hidden_TD[row], samples[sample].hidden_TD[position])
        assert torch.equal(batch.taps_TLD[row], samples[sample].taps_TLD[position])


def test_teacher_rows_are_rows_of_the_batch(samples):
    batch = pack(samples)
    assert (batch.teacher.row_M.diff() > 0).all()
    assert batch.loss_mask_T[batch.teacher.row_M + 1].all()
    assert (batch.sample_T[batch.teacher.row_M] == batch.sample_T[batch.teacher.row_M + 1]).all()


def test_dtype_stays_and_one_sample_is_not_copied(samples):
    narrow = [replace(sample, hidden_TD=sample.hidden_TD.bfloat16()) for sample in samples]
    assert pack(narrow).hidden_TD.dtype == torch.bfloat16
    assert pack(narrow[:1]).hidden_TD.data_ptr() == narrow[0].hidden_TD.data_ptr()
    batch = pack(narrow)
    assert unpack(batch)[2].hidden_TD.data_ptr() == batch.hidden_TD[batch.bounds[2] :].data_ptr()


def test_without_teacher_and_taps(samples):
    bare = [replace(sample, teacher=None, taps_TLD=None) for sample in samples]
    assert pack(bare).teacher is None and pack(bare).taps_TLD is None
    assert all(sample.teacher is None and sample.taps_TLD is None for sample in unpack(pack(bare)))


@pytest.mark.parametrize(("field", "word"), [("teacher", "a teacher"), ("taps_TLD", "taps")])
def test_a_mixture_is_refused(samples, field, word):
    with pytest.raises(ValueError, match=f"expected {word} in all 2 samples or in none, found it in 1"):
        pack([samples[0], replace(samples[1], **{field: None})])
