"""Packed attention over depths: against plain softmax written out, by finite differences, across kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from mtp_train.nn.attention import PackedAttention
from mtp_train.nn.causal import FlashCpuKernel, FlashCudaKernel, PlainKernel, causal_kernel

BOUNDS = (0, 5, 6, 14)
SCALE = 0.35


def rows(seed: int, heads: int, *, size: int = 8, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn((heads, BOUNDS[-1], size), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def written_out(q: torch.Tensor, depths: list[tuple[torch.Tensor, torch.Tensor]], *, window: int | None) -> torch.Tensor:
    """What DESIGN.md section 4 says, one row at a time: depth-0 keys up to the base, own keys of later depths."""
    heads, groups = q.shape[0], q.shape[0] // depths[0][0].shape[0]
    out = torch.empty((heads, q.shape[1], depths[0][1].shape[-1]), dtype=q.dtype)
    for first, last in itertools.pairwise(BOUNDS):
        for row in range(first, last):
            begin = first if window is None else max(first, row - window + 1)
            for head in range(heads):
                of = head // groups
                keys = torch.cat([depths[0][0][of, begin : row + 1], *(k[of, row : row + 1] for k, _ in depths[1:])])
                values = torch.cat([depths[0][1][of, begin : row + 1], *(v[of, row : row + 1] for _, v in depths[1:])])
                out[head, row] = torch.softmax(keys @ q[head, row] * SCALE, 0) @ values
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_three_depths_are_the_softmax_written_out(window: int | None, kv_heads: int) -> None:
    context = PackedAttention(bounds=BOUNDS)
    depths: list[tuple[torch.Tensor, torch.Tensor]] = []
    for depth in range(3):
        q, k, v = rows(3 * depth, 4), rows(3 * depth + 1, kv_heads), rows(3 * depth + 2, kv_heads)
        depths.append((k, v))
        found = context.attend(0, q, k, v, scale=SCALE, window=window)
        torch.testing.assert_close(found, written_out(q, depths, window=window), rtol=1e-10, atol=1e-10)
        context.next_depth()


def test_values_smaller_than_keys_as_in_mla() -> None:
    q, k, v = rows(0, 2), rows(1, 2), rows(2, 2, size=5)
    found = PackedAttention(bounds=BOUNDS).attend(0, q, k, v, scale=SCALE, window=None)
    torch.testing.assert_close(found, written_out(q, [(k, v)], window=None), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_by_finite_differences(window: int | None) -> None:
    def attend_twice(q0, k0, v0, q1, k1, v1):  # type: ignore[no-untyped-def]
        context = PackedAttention(bounds=(0, 4, 6))
        first = context.attend(0, q0, k0, v0, scale=SCALE, window=window)
        context.next_depth()
        return first, context.attend(0, q1, k1, v1, scale=SCALE, window=window)

    inputs = [rows(seed, 2 if seed % 3 == 0 else 1, size=3)[:, :6].clone().requires_grad_() for seed in range(6)]
    assert torch.autograd.gradcheck(attend_twice, inputs)


def test_the_flash_kernel_is_the_plain_one() -> None:
    q, k, v, grad = (rows(seed, 3, dtype=torch.float32) for seed in range(4))
    assert isinstance(causal_kernel(q, window=None), FlashCpuKernel)
    assert isinstance(causal_kernel(q, window=2), PlainKernel)
    results = []
    for kernel in (FlashCpuKernel(), PlainKernel()):
        out, log_sum = kernel.forward(q, k, v, scale=SCALE, window=None)
        results.append((out, log_sum, *kernel.backward(grad, q, k, v, out, log_sum, scale=SCALE, window=None)))
    for flash, plain in zip(*results, strict=True):
        torch.testing.assert_close(flash, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head_size", "kernel"), [(64, FlashCudaKernel), (256, FlashCudaKernel), (20, PlainKernel), (264, PlainKernel)])
def test_a_gpu_s_kernel_is_taken_for_the_head_sizes_that_it_has(head_size: int, kernel: type) -> None:
    """It raises for sizes that are no multiples of 8."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 5, head_size, device="cuda", dtype=torch.bfloat16)
        assert type(causal_kernel(q, window=None)) is kernel


def test_queries_that_see_all_keys_of_another_number() -> None:
    q, k, v, grad = rows(0, 3)[:, :5], rows(1, 3), rows(2, 3), rows(3, 3)[:, :5]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.softmax(inputs[0] @ inputs[1].transpose(1, 2) * SCALE, -1) @ inputs[2]
    wanted_grads = torch.autograd.grad(wanted, inputs, grad)
    for kernel, dtype, rounding in ((PlainKernel(), torch.float64, 1e-10), (FlashCpuKernel(), torch.float32, 1e-5)):
        q_, k_, v_, grad_ = (x.to(dtype) for x in (q, k, v, grad))
        out, log_sum = kernel.forward(q_, k_, v_, scale=SCALE, window=None, causal=False)
        grads = kernel.backward(grad_, q_, k_, v_, out, log_sum, scale=SCALE, window=None, causal=False)
        for found, expected in zip((out, *grads), (wanted, *wanted_grads), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=rounding)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_kernel_is_the_plain_one() -> None:
    q, k, v, grad = (rows(seed, 3, size=64, dtype=torch.float32).cuda() for seed in range(4))
    half = [x.bfloat16() for x in (q, k, v, grad)]
    kernel = causal_kernel(half[0], window=None)
    out, log_sum = kernel.forward(*half[:3], scale=SCALE, window=None)
    found = (out, *kernel.backward(half[3], *half[:3], out, log_sum, scale=SCALE, window=None))
    plain = PlainKernel()
    out, log_sum = plain.forward(q, k, v, scale=SCALE, window=None)
    wanted = (out, *plain.backward(grad, q, k, v, out, log_sum, scale=SCALE, window=None))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)


def test_a_layer_without_a_context_says_so(tiny_llama) -> None:  # type: ignore[no-untyped-def]
    from mtp_train.nn.layer import layer_parts, read_config

    config = read_config(tiny_llama, trust_remote_code=False)
    parts = layer_parts(config)
    layer, rotary = parts.layer(config, 0), parts.rotary(config=config)
    hidden, positions = torch.zeros((1, 3, 64)), torch.arange(3)[None]
    with pytest.raises(ValueError, match="attention_context"):
        layer(hidden, position_embeddings=rotary(hidden, position_ids=positions), position_ids=positions)
