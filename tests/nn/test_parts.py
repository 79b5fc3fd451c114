"""Parts cover each pair of a query and an earlier key of its sample once, and what they cost decides which of two covers is taken."""

from __future__ import annotations

import torch

from mtp_train.nn.parts import bounds_of, num_scores, parts_of

BOUNDS = (0, 5, 6, 14)


def test_every_row_meets_all_earlier_rows_of_its_sample_once() -> None:
    for stretches in (None, ((2, 4), (5, 6), (8, 11), (13, 14))):
        rows = [row for stretch in stretches or ((0, 14),) for row in range(*stretch)]
        met = torch.zeros(len(rows), 14, dtype=torch.int64)
        for part in parts_of(BOUNDS, stretches):
            ones = torch.ones(part.rows.stop - part.rows.start, part.keys.stop - part.keys.start, dtype=torch.int64)
            met[part.rows, part.keys] += ones.tril() if part.causal else ones
        first = [max(bound for bound in BOUNDS if bound <= row) for row in rows]
        expected = torch.tensor([[int(start <= key <= row) for key in range(14)] for row, start in zip(rows, first, strict=True)])
        assert torch.equal(met, expected)


def test_short_samples_are_cheaper_whole_and_the_end_of_a_long_one_alone() -> None:
    short = tuple(range(0, 4097, 512))
    assert num_scores(parts_of(short, None)) < num_scores(parts_of(short, [(start + 256, start + 512) for start in short[:-1]]))
    assert num_scores(parts_of((0, 8192), None)) > num_scores(parts_of((0, 8192), [(7168, 8192)]))


def test_parts_that_are_whole_samples_have_their_bounds() -> None:
    assert bounds_of(parts_of(BOUNDS, None)) == BOUNDS
    assert bounds_of(parts_of(BOUNDS, [(0, 5), (5, 6), (6, 14)])) == BOUNDS
    assert bounds_of(parts_of((0, 5), None)) is None  # one sample needs no other kernel
    assert bounds_of(parts_of(BOUNDS, [(0, 5), (6, 14)])) is None
    assert bounds_of(parts_of(BOUNDS, [(2, 5), (5, 6), (6, 14)])) is None
