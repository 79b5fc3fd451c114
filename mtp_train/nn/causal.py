"""Causal attention over one sample that also gives its log-sum-exp, forward and backward, by the best kernel at hand.

A kernel is a pair of functions over (N, n, H) tensors. The backward takes ``out`` and ``log_sum_exp`` as arguments: given
those of a *larger* softmax, of which these keys are a part, it returns exactly this part's gradients, since
dS = P * (dO V^T - rowsum(dO * O)) needs only the global O and the global P = exp(S - lse) (FlashAttention, Dao et al.
2022, appendix B.2). ``nn/attention.py`` uses that to add the keys of a head's own depths without a mask matrix.
"""

from __future__ import annotations

from typing import Protocol

import torch

# Queries per block of the plain kernel: bounds its score matrix to N x 256 x n.
_BLOCK_ROWS = 256


class CausalKernel(Protocol):
    """Attention of each row to the rows up to itself; ``window`` keeps only the last that many, itself included.

    ``causal=False``: of each query to all keys, which may be more or fewer, without a window.
    """

    def forward(
        self, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None, causal: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (N, T, H) in the inputs' dtype and the log-sum-exp (N, T) in at least float32."""
        ...

    def backward(
        self,
        grad_NTH: torch.Tensor,
        q_NTH: torch.Tensor,
        k_NTH: torch.Tensor,
        v_NTH: torch.Tensor,
        out_NTH: torch.Tensor,
        log_sum_exp_NT: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients to q, k and v."""
        ...


class PlainKernel:
    """Blocks of matrix products: any device and dtype, sliding windows; slow and obviously right."""

    @staticmethod
    def _scores(q_NRH: torch.Tensor, k_NTH: torch.Tensor, first: int, *, scale: float, window: int | None, causal: bool) -> torch.Tensor:
        accumulate = torch.promote_types(q_NRH.dtype, torch.float32)
        if not causal:
            assert window is None
            return (q_NRH.to(accumulate) @ k_NTH.to(accumulate).transpose(1, 2)) * scale
        last = first + q_NRH.shape[1]
        row_R = torch.arange(first, last, device=q_NRH.device)[:, None]
        key_T = torch.arange(last, device=q_NRH.device)[None, :]
        hidden = key_T > row_R
        if window is not None:
            hidden = hidden | (key_T <= row_R - window)
        scores = (q_NRH.to(accumulate) @ k_NTH[:, :last].to(accumulate).transpose(1, 2)) * scale
        return scores.masked_fill(hidden, float("-inf"))

    def forward(
        self, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None, causal: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs, log_sums = [], []
        for first in range(0, q_NTH.shape[1], _BLOCK_ROWS):
            scores = self._scores(q_NTH[:, first : first + _BLOCK_ROWS], k_NTH, first, scale=scale, window=window, causal=causal)
            log_sum_NR = scores.logsumexp(-1)
            weights = (scores - log_sum_NR[..., None]).exp()
            outs.append((weights @ v_NTH[:, : weights.shape[-1]].to(weights.dtype)).to(q_NTH.dtype))
            log_sums.append(log_sum_NR)
        return torch.cat(outs, 1), torch.cat(log_sums, 1)

    def backward(
        self,
        grad_NTH: torch.Tensor,
        q_NTH: torch.Tensor,
        k_NTH: torch.Tensor,
        v_NTH: torch.Tensor,
        out_NTH: torch.Tensor,
        log_sum_exp_NT: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        accumulate = log_sum_exp_NT.dtype
        grad_q = torch.empty_like(q_NTH)
        grad_k = torch.zeros_like(k_NTH, dtype=accumulate)
        grad_v = torch.zeros_like(v_NTH, dtype=accumulate)
        delta_NT = (grad_NTH.to(accumulate) * out_NTH.to(accumulate)).sum(-1)
        for first in range(0, q_NTH.shape[1], _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            scores = self._scores(q_NTH[:, rows], k_NTH, first, scale=scale, window=window, causal=causal)
            seen = slice(0, scores.shape[-1])
            weights = (scores - log_sum_exp_NT[:, rows, None]).exp()
            grad_rows = grad_NTH[:, rows].to(accumulate)
            grad_v[:, seen] += weights.transpose(1, 2) @ grad_rows
            grad_scores = weights * (grad_rows @ v_NTH[:, seen].to(accumulate).transpose(1, 2) - delta_NT[:, rows, None]) * scale
            grad_q[:, rows] = (grad_scores @ k_NTH[:, seen].to(accumulate)).to(q_NTH.dtype)
            grad_k[:, seen] += grad_scores.transpose(1, 2) @ q_NTH[:, rows].to(accumulate)
        return grad_q, grad_k.to(k_NTH.dtype), grad_v.to(v_NTH.dtype)


class FlashCpuKernel:
    """torch's own flash attention for CPUs (float32, bfloat16, float16), memory linear in the length."""

    def forward(
        self, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None, causal: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert window is None
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_NTH[None], k_NTH[None], v_NTH[None], 0.0, causal, scale=scale
        )
        return out[0], log_sum[0]

    def backward(
        self,
        grad_NTH: torch.Tensor,
        q_NTH: torch.Tensor,
        k_NTH: torch.Tensor,
        v_NTH: torch.Tensor,
        out_NTH: torch.Tensor,
        log_sum_exp_NT: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert window is None
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_NTH[None], q_NTH[None], k_NTH[None], v_NTH[None], out_NTH[None], log_sum_exp_NT[None], 0.0, causal, scale=scale
        )
        return grads[0][0], grads[1][0], grads[2][0]


class FlashCudaKernel:
    """torch's own flash attention for CUDA in half precision. Not run where this was written: no GPU there."""

    def forward(
        self, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None, causal: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left = None if window is None else window - 1
        out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
            *(x_NTH.transpose(0, 1)[None].contiguous() for x_NTH in (q_NTH, k_NTH, v_NTH)),
            None,
            None,
            q_NTH.shape[1],
            k_NTH.shape[1],
            0.0,
            causal,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=None if left is None else 0,
        )
        return out[0].transpose(0, 1), log_sum[0]

    def backward(
        self,
        grad_NTH: torch.Tensor,
        q_NTH: torch.Tensor,
        k_NTH: torch.Tensor,
        v_NTH: torch.Tensor,
        out_NTH: torch.Tensor,
        log_sum_exp_NT: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left = None if window is None else window - 1
        no_dropout = torch.zeros((), dtype=torch.uint64, device=q_NTH.device)
        grads = torch.ops.aten._flash_attention_backward(
            *(x_NTH.transpose(0, 1)[None].contiguous() for x_NTH in (grad_NTH, q_NTH, k_NTH, v_NTH, out_NTH)),
            log_sum_exp_NT[None].contiguous(),
            None,
            None,
            q_NTH.shape[1],
            k_NTH.shape[1],
            0.0,
            causal,
            no_dropout,
            no_dropout,
            scale=scale,
            window_size_left=left,
            window_size_right=None if left is None else 0,
        )
        return tuple(grad[0].transpose(0, 1) for grad in grads)


def causal_kernel(q_NTH: torch.Tensor, *, window: int | None) -> CausalKernel:
    """The fastest kernel that this device and dtype have for this problem."""
    if window is not None and q_NTH.shape[1] <= window:
        window = None
    if q_NTH.device.type == "cpu" and window is None and q_NTH.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return FlashCpuKernel()
    return FlashCudaKernel() if flash_on_cuda(q_NTH) else PlainKernel()


def flash_on_cuda(q_NTH: torch.Tensor) -> bool:
    """Whether torch's flash attention for CUDA takes such tensors: half precision, head sizes that are multiples of 8, up to 256."""
    size = q_NTH.shape[2]
    return q_NTH.device.type == "cuda" and q_NTH.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0
