"""Rows that nobody reads are not computed, and those that somebody reads are what they would be."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from mtp_train.nn.attention import PackedAttention
from mtp_train.nn.wanted import WantedRows, rows_only

SCALE = 0.35


def test_close_rows_make_one_stretch_and_samples_are_never_joined() -> None:
    found = WantedRows.of(torch.tensor([7, 5, 5, 60, 200, 299, 300]), bounds=(0, 4, 300, 310))
    assert found is not None
    assert found.stretches == ((5, 61), (200, 201), (299, 300), (300, 301))
    assert torch.equal(found.rows_M, torch.cat([torch.arange(*stretch) for stretch in found.stretches]))
    assert WantedRows.of(torch.tensor([], dtype=torch.int64), bounds=(0, 4)) is None


def test_a_module_computes_the_rows_asked_for_and_no_others() -> None:
    module, rows, products = nn.Linear(3, 5), torch.tensor([1, 4]), []
    whole_forward, seen = module.forward, []
    module.forward = lambda x: products.append(x.shape) or whole_forward(x)  # type: ignore[func-returns-value]
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    x = torch.randn(1, 6, 3, requires_grad=True)
    with rows_only([module], rows):
        found = module(x)
    handle.remove()
    assert seen == [(1, 6, 3)], "hooks see all rows"
    assert products == [(1, 2, 3)]
    whole = module(x)
    assert torch.equal(found[:, rows], whole[:, rows]) and not found[:, [0, 2, 3, 5]].any()
    assert torch.equal(module(x), whole), "outside, all rows again"
    weight_N = torch.randn(1, 6, 5)
    (grad,) = torch.autograd.grad((found * weight_N).sum(), x)
    (expected,) = torch.autograd.grad((whole[:, rows] * weight_N[:, rows]).sum(), x)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("window", [None, 3])
def test_an_answer_after_a_long_prompt_asks_alone_and_hears_the_same(window: int | None) -> None:
    """At depth 0: values of the rows asked for, zeros for the others, and the same gradients to all queries, keys and values."""
    bounds, stretches = (0, 3, 1900, 4000), ((1, 3), (1700, 1850), (3950, 4000))
    rows_M = torch.cat([torch.arange(*stretch) for stretch in stretches])
    wanted = WantedRows(rows_M=rows_M, stretches=stretches)
    draw = torch.Generator().manual_seed(0)
    qkv = [torch.randn(heads, 4000, 8, generator=draw, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    weight = torch.randn(4, len(rows_M), 8, generator=draw, dtype=torch.float64)
    results = []
    for asks in (False, True):
        context = PackedAttention(bounds=bounds)
        if asks:
            context.ask(wanted)
        out = context.attend(0, *qkv, scale=SCALE, window=window)
        results.append([out[:, rows_M], *torch.autograd.grad((out[:, rows_M] * weight).sum(), qkv)])
        if asks:
            others = torch.ones(4000, dtype=torch.bool).index_fill(0, rows_M, False)
            assert bool(out[:, others].any()) == (window is not None), "a window saves more than asking for some rows"
    for some, all_ in zip(*results, strict=True):
        torch.testing.assert_close(some, all_, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 3])
def test_later_depths_of_some_rows_are_those_of_all(window: int | None) -> None:
    """Values, and gradients to the keys of depth 0 too, which rows outside reach only through those inside."""
    bounds = (0, 5, 6, 14)
    wanted = WantedRows(rows_M=torch.tensor([2, 3, 8, 9, 10, 13]), stretches=((2, 4), (8, 11), (13, 14)))
    draw = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(heads, 14, 8, generator=draw, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)] for _ in range(3)]
    weight = torch.randn(4, 6, 8, generator=draw, dtype=torch.float64)
    results = []
    for restricted in (False, True):
        context = PackedAttention(bounds=bounds)
        outs = []
        for depth, qkv in enumerate(inputs):
            some = restricted and depth > 0
            out = context.attend(0, *((x[:, wanted.rows_M] if some else x) for x in qkv), scale=SCALE, window=window)
            outs.append(out if some else out[:, wanted.rows_M])
            if restricted and depth == 0:
                context.restrict(wanted)
            context.next_depth()
        total = sum((out * weight).sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(total, list(itertools.chain(*inputs)))])
    for some, all_ in zip(*results, strict=True):
        torch.testing.assert_close(some, all_, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 3])
def test_rows_that_drop_out_depth_by_depth_leave_the_others_as_they_are(window: int | None) -> None:
    bounds = (0, 5, 6, 14)
    wanted = WantedRows(rows_M=torch.tensor([2, 3, 8, 9, 10, 13]), stretches=((2, 4), (8, 11), (13, 14)))
    still = {1: torch.tensor([2, 3, 9, 10, 13]), 2: torch.tensor([3, 10, 13]), 3: torch.tensor([10])}
    draw = torch.Generator().manual_seed(1)
    inputs = [[torch.randn(heads, 14, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)] for _ in range(4)]
    whole, some = PackedAttention(bounds=bounds), PackedAttention(bounds=bounds)
    for depth, qkv in enumerate(inputs):
        rows = still.get(depth, torch.arange(14))
        expected = whole.attend(0, *qkv, scale=SCALE, window=window)[:, rows]
        found = some.attend(0, *(x[:, rows] for x in qkv), scale=SCALE, window=window)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        if depth == 0:
            some.restrict(wanted)
        if depth + 1 in still:
            some.narrow(still[depth + 1])
        whole.next_depth()
        some.next_depth()
