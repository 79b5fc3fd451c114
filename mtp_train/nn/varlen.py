"""Attention within all samples of a pack by one call of a kernel, where the device has one that takes sequences of many lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, lru_cache

import torch

from mtp_train.nn.causal import causal_kernel, flash_on_cuda
from mtp_train.runtime import log

# Two samples of the probe, one within a block of the kernel's and one over its edge.
_PROBE_BOUNDS = (0, 7, 144)


class VarlenKernel:
    """torch's flash attention for CUDA over sequences of many lengths (``aten::_flash_attention_forward`` with ``cum_seq_q``; its
    tensors are (T, N, H), its log-sum-exp (N, T): ``torch.nn.attention.varlen``). As ``nn.causal.CausalKernel`` over all samples,
    which lie one behind another between ``bounds``.

    Not run where this was written: no GPU there. ``varlen_kernel`` therefore holds it against the kernel for single samples first.
    """

    def forward(
        self,
        q_NTH: torch.Tensor,
        k_NTH: torch.Tensor,
        v_NTH: torch.Tensor,
        *,
        bounds: Sequence[int],
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (N, T, H) in the inputs' dtype and the log-sum-exp (N, T), float32."""
        begin_S, longest = _lengths(tuple(bounds), q_NTH.device)
        out_TNH, log_sum_NT, *_ = _flash_forward(
            *(x_NTH.transpose(0, 1).contiguous() for x_NTH in (q_NTH, k_NTH, v_NTH)),
            begin_S,
            begin_S,
            longest,
            longest,
            0.0,
            True,
            False,
            scale=scale,
            **_sides(window),
        )
        return out_TNH.transpose(0, 1), log_sum_NT

    def backward(
        self,
        grad_NTH: torch.Tensor,
        q_NTH: torch.Tensor,
        k_NTH: torch.Tensor,
        v_NTH: torch.Tensor,
        out_NTH: torch.Tensor,
        log_sum_exp_NT: torch.Tensor,
        *,
        bounds: Sequence[int],
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients to q, k and v; ``out_NTH`` and ``log_sum_exp_NT`` may be those of a larger softmax (``nn/causal.py``)."""
        begin_S, longest = _lengths(tuple(bounds), q_NTH.device)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_NTH.device)
        grads = _flash_backward(
            *(x_NTH.transpose(0, 1).contiguous() for x_NTH in (grad_NTH, q_NTH, k_NTH, v_NTH, out_NTH)),
            log_sum_exp_NT.contiguous(),
            begin_S,
            begin_S,
            longest,
            longest,
            0.0,
            True,
            no_dropout,
            no_dropout[:0],
            scale=scale,
            **_sides(window),
        )
        return tuple(grad_TNH.transpose(0, 1) for grad_TNH in grads)


def varlen_kernel(q_NTH: torch.Tensor) -> VarlenKernel | None:
    """The kernel where this device has it, and gives what a call for each sample gives; None elsewhere."""
    if not flash_on_cuda(q_NTH):
        return None
    return VarlenKernel() if _works(q_NTH.device, q_NTH.dtype, q_NTH.shape[2]) else None


@cache
def _works(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether outputs and gradients of two small samples are those of a call for each; says so once where not."""
    draw = torch.Generator().manual_seed(0)
    shape = (2, _PROBE_BOUNDS[-1], head_size)
    q, k, v, grad = (torch.randn(shape, generator=draw).to(device=device, dtype=dtype) for _ in range(4))
    try:
        kernel, scale = VarlenKernel(), head_size**-0.5
        out, log_sum = kernel.forward(q, k, v, bounds=_PROBE_BOUNDS, scale=scale, window=None)
        found = [out, log_sum, *kernel.backward(grad, q, k, v, out, log_sum, bounds=_PROBE_BOUNDS, scale=scale, window=None)]
        single, one_by_one = causal_kernel(q, window=None), []
        for first, last in itertools.pairwise(_PROBE_BOUNDS):
            q_own, k_own, v_own = (x[:, first:last] for x in (q, k, v))
            out, log_sum = single.forward(q_own, k_own, v_own, scale=scale, window=None)
            one_by_one.append(
                [out, log_sum, *single.backward(grad[:, first:last], q_own, k_own, v_own, out, log_sum, scale=scale, window=None)]
            )
        expected = [torch.cat(parts, 1) for parts in zip(*one_by_one, strict=True)]
        apart = float(
            torch.stack([(ours.float() - theirs.float()).abs().max() for ours, theirs in zip(found, expected, strict=True)]).max()
        )
        fault = None if apart < 0.05 else f"it differs by {apart:.3g} from a call for each sample"
    except (RuntimeError, NotImplementedError) as error:
        fault = str(error).splitlines()[0]
    if fault is not None:
        log(f"attention of all samples in one call is not used on {device}: {fault}")
    return fault is None


@lru_cache(maxsize=16)
def _lengths(bounds: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Where samples begin, and the last one ends, as the kernel reads it; and the longest sample's length."""
    return torch.tensor(bounds, dtype=torch.int32, device=device), max(last - first for first, last in itertools.pairwise(bounds))


def _sides(window: int | None) -> dict[str, int | None]:
    return {"window_size_left": None if window is None else window - 1, "window_size_right": None if window is None else 0}


_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
