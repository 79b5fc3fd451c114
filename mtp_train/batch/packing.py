"""Puts samples one behind the other into a batch, without padding, and takes them apart again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from mtp_train.records import Batch, Sample, Teacher


def pack(samples: Sequence[Sample]) -> Batch:
    """One batch of all samples, in their order; teacher rows become rows of the batch.

    Hidden states keep their dtype and are copied once (not at all for a single sample). Errors: ValueError where some
    samples have a teacher or taps and others not.
    """
    assert samples, "a batch needs at least one sample"
    lengths = torch.tensor([sample.num_tokens for sample in samples])
    bounds = (0, *accumulate(sample.num_tokens for sample in samples))
    taps = [sample.taps_TLD for sample in samples if sample.taps_TLD is not None]
    teachers = [sample.teacher for sample in samples if sample.teacher is not None]
    for what, held in (("taps", taps), ("a teacher", teachers)):
        if held and len(held) != len(samples):
            raise ValueError(f"batch: expected {what} in all {len(samples)} samples or in none, found it in {len(held)}; use one cache")
    return Batch(
        token_ids_T=_join([sample.token_ids_T for sample in samples]),
        loss_mask_T=_join([sample.loss_mask_T for sample in samples]),
        hidden_TD=_join([sample.hidden_TD for sample in samples]),
        sample_T=torch.arange(len(samples)).repeat_interleave(lengths),
        position_T=torch.cat([torch.arange(sample.num_tokens) for sample in samples]),
        bounds=bounds,
        sample_ids=tuple(sample.sample_id for sample in samples),
        taps_TLD=_join(taps) if taps else None,
        teacher=_join_teachers(teachers, bounds) if teachers else None,
    )


def unpack(batch: Batch) -> list[Sample]:
    """The samples of a batch, as views of it; their categories are not kept in a batch and come back empty."""
    samples = []
    for number, sample_id in enumerate(batch.sample_ids):
        rows = slice(batch.bounds[number], batch.bounds[number + 1])
        samples.append(
            Sample(
                sample_id=sample_id,
                token_ids_T=batch.token_ids_T[rows],
                loss_mask_T=batch.loss_mask_T[rows],
                hidden_TD=batch.hidden_TD[rows],
                taps_TLD=None if batch.taps_TLD is None else batch.taps_TLD[rows],
                teacher=None if batch.teacher is None else _cut_teacher(batch.teacher, rows),
            )
        )
    return samples


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _join_teachers(teachers: list[Teacher], bounds: tuple[int, ...]) -> Teacher:
    return Teacher(
        row_M=_join([teacher.row_M + start for teacher, start in zip(teachers, bounds, strict=False)]),
        ids_MC=_join([teacher.ids_MC for teacher in teachers]),
        log_probs_MC=_join([teacher.log_probs_MC for teacher in teachers]),
        log_sum_exp_M=_join([teacher.log_sum_exp_M for teacher in teachers]),
    )


def _cut_teacher(teacher: Teacher, rows: slice) -> Teacher:
    """The teacher of rows ``start:stop`` of the batch; its own rows ascend, so two look-ups bound them."""
    first, last = torch.searchsorted(teacher.row_M, torch.tensor([rows.start, rows.stop], device=teacher.row_M.device)).tolist()
    return Teacher(
        row_M=teacher.row_M[first:last] - rows.start,
        ids_MC=teacher.ids_MC[first:last],
        log_probs_MC=teacher.log_probs_MC[first:last],
        log_sum_exp_M=teacher.log_sum_exp_M[first:last],
    )
