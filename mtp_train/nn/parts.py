"""Attention within packed samples as calls of a kernel: which stretch of queries attends to which stretch of keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

# What a call of a kernel costs whatever its size, in scores of one query with one key: some tens of microseconds on a CPU.
_CALL_SCORES = 1 << 18


class Part(NamedTuple):
    """Queries ``rows`` attend to ``keys``: each to those up to itself where they are the same rows, else (all earlier) to all."""

    rows: slice
    keys: slice
    causal: bool


def parts_of(bounds: Sequence[int], stretches: Sequence[tuple[int, int]] | None) -> tuple[Part, ...]:
    """Who attends to which keys of depth 0. Where only some rows of a sample are computed, there are their queries to work with, and
    the keys of all: a stretch attends to itself causally and to all of the sample before it, and both are merged."""
    if stretches is None:
        return tuple(Part(slice(first, last), slice(first, last), True) for first, last in itertools.pairwise(bounds))
    parts, offset = [], 0
    for first, last in stretches:
        for start, stop in itertools.pairwise(bounds):
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                rows = slice(offset + begin - first, offset + end - first)
                parts.append(Part(rows, slice(begin, end), True))
                if start < begin:
                    parts.append(Part(rows, slice(start, begin), False))
        offset += last - first
    return tuple(parts)


def bounds_of(parts: Sequence[Part]) -> tuple[int, ...] | None:
    """The bounds of the samples, where there are several and the parts are they, whole, one behind another; None elsewhere."""
    bounds = (0, *(part.rows.stop for part in parts))
    whole = all(
        part.causal and part.rows == part.keys == slice(first, last)
        for part, (first, last) in zip(parts, itertools.pairwise(bounds), strict=True)
    )
    return bounds if whole and len(parts) > 1 else None


def num_scores(parts: Sequence[Part]) -> int:
    """What parts cost: their scores of a query with a key, and what each call costs whatever its size."""
    sizes = [(part.rows.stop - part.rows.start, part.keys.stop - part.keys.start, part.causal) for part in parts]
    return sum(rows * keys // (2 if causal else 1) + _CALL_SCORES for rows, keys, causal in sizes)
