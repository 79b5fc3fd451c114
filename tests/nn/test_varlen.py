"""All samples of a pack in one call of a kernel. The kernel itself is CUDA's: a stand-in with its signature takes its place here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mtp_train.nn import attention, varlen
from mtp_train.nn.attention import PackedAttention
from mtp_train.nn.causal import PlainKernel

BOUNDS = (0, 5, 6, 14)


def _ranges(begin_S: torch.Tensor, longest: int) -> Iterator[slice]:
    assert begin_S.dtype == torch.int32
    assert longest == int(begin_S.diff().max())
    return (slice(first, last) for first, last in itertools.pairwise(begin_S.tolist()))


def flash_forward(q, k, v, begin_q, begin_k, most_q, most_k, dropout, causal, debug, *, scale, window_size_left, window_size_right):  # type: ignore[no-untyped-def]
    """``aten::_flash_attention_forward`` over (T, N, H), sample by sample."""
    assert torch.equal(begin_q, begin_k) and most_q == most_k and dropout == 0.0 and causal and not debug
    assert (window_size_left is None) == (window_size_right is None) and window_size_right in (None, 0)
    window = None if window_size_left is None else window_size_left + 1
    out, log_sum = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for rows in _ranges(begin_q, most_q):
        own = [x[rows].transpose(0, 1) for x in (q, k, v)]
        found, log_sum[:, rows] = PlainKernel().forward(*own, scale=scale, window=window)
        out[rows] = found.transpose(0, 1)
    return out, log_sum, None, None, None


def flash_backward(grad, q, k, v, out, log_sum, begin_q, begin_k, most_q, most_k, dropout, causal, state, unused, *, scale, **sides):  # type: ignore[no-untyped-def]
    """``aten::_flash_attention_backward``, likewise."""
    left = sides["window_size_left"]
    grads = [torch.empty_like(x) for x in (q, k, v)]
    for rows in _ranges(begin_q, most_q):
        own = [x[rows].transpose(0, 1) for x in (grad, q, k, v, out)]
        found = PlainKernel().backward(*own, log_sum[:, rows], scale=scale, window=None if left is None else left + 1)
        for whole, part in zip(grads, found, strict=True):
            whole[rows] = part.transpose(0, 1)
    return tuple(grads)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """The stand-in in the kernel's place; gives how often its forward was called."""
    calls: list[int] = []

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        return flash_forward(*arguments, **settings)

    monkeypatch.setattr(varlen, "flash_on_cuda", lambda q_NTH: True)
    monkeypatch.setattr(varlen, "_flash_forward", counted)
    monkeypatch.setattr(varlen, "_flash_backward", flash_backward)
    varlen._works.cache_clear()
    yield lambda: len(calls)
    varlen._works.cache_clear()


def unrolled(window: int | None) -> list[torch.Tensor]:
    """Outputs of two depths and the gradients to all that went in."""
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(2, BOUNDS[-1], 8, generator=draw).requires_grad_() for _ in range(6)]
    context = PackedAttention(bounds=BOUNDS)
    first = context.attend(0, *given[:3], scale=0.35, window=window)
    context.next_depth()
    second = context.attend(0, *given[3:], scale=0.35, window=window)
    loss = (first * torch.linspace(0, 1, 8)).sum() + (second * second).sum()
    return [first.detach(), second.detach(), *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("window", [None, 3])
def test_one_call_gives_what_a_call_for_each_sample_gives(
    window: int | None, stand_in: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = unrolled(window)
    assert stand_in() == 3  # the probe, and one for each depth
    monkeypatch.setattr(attention, "varlen_kernel", lambda q_NTH: None)
    for ours, expected in zip(found, unrolled(window), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert stand_in() == 3


@pytest.mark.parametrize("fault", ["another result", "no such kernel"])
def test_a_kernel_that_does_otherwise_is_not_used(
    fault: str, stand_in: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = unrolled(None)

    def wrong(*arguments: Any, **settings: Any) -> Any:
        if fault == "no such kernel":
            raise RuntimeError("no kernel image is available")
        out, log_sum, *rest = flash_forward(*arguments, **settings)
        return out, log_sum.roll(1, 1), *rest  # as if its rows lay otherwise

    monkeypatch.setattr(varlen, "_flash_forward", wrong)
    varlen._works.cache_clear()
    for ours, theirs in zip(unrolled(None), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    said = capsys.readouterr().err
    assert said.count("attention of all samples in one call is not used on cpu") == 1
    assert ("it differs by" if fault == "another result" else "no kernel image") in said


def test_no_cpu_has_it() -> None:
    assert varlen.varlen_kernel(torch.zeros(1, 4, 8, dtype=torch.bfloat16)) is None
