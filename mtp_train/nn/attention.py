"""Attention without padding: packed samples in training, a ragged KV cache in inference, for any transformers layer.

A transformers layer or model built with ``_attn_implementation = ATTENTION`` hands its queries, keys and values to
``attend`` below, which asks the ``attention_context`` that the caller passed through the forward's keyword arguments.
Tokens of all sequences lie behind one another on one axis (batch axis of size 1); the context knows the bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from mtp_train.nn.causal import causal_kernel

ATTENTION = "mtp_train"


class AttentionContext(Protocol):
    """What decides who attends to whom. ``N`` here are query heads; keys and values may have fewer (GQA)."""

    def attend(
        self, layer_index: int, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return the attention output, (N, T, H of the values)."""
        ...


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    attention_context: AttentionContext | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, N, T, H) in, (1, T, N, H) out. Dropout is not supported and refused."""
    if attention_context is None:
        raise ValueError(f"a layer with attention {ATTENTION!r} was called without attention_context: pass one through the forward")
    if dropout:
        raise ValueError(f"attention dropout: expected 0, found {dropout}; set attention_dropout to 0 in the target's config")
    assert attention_mask is None, "masks come from the context"
    layer_index = module.layer_idx
    assert isinstance(layer_index, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_NTH = attention_context.attend(layer_index, query[0], key[0], value[0], scale=scale, window=sliding_window)
    return out_NTH.transpose(0, 1)[None].contiguous(), None


def register() -> None:
    """Make ``ATTENTION`` known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def _repeat(x_NTH: torch.Tensor, num_heads: int) -> torch.Tensor:
    times = num_heads // x_NTH.shape[0]
    return x_NTH if times == 1 else x_NTH.repeat_interleave(times, dim=0)


class _Unrolled(torch.autograd.Function):
    """Causal attention within samples to the depth-0 keys, and of each row to its own keys of later depths.

    Forward: flash attention over the depth-0 keys gives (O_0, lse_0); the row's own keys add one score each; all are
    merged by their log-sum-exps. Backward: the depth-0 part from the kernel with the merged O and lse, the own keys by
    hand. Nothing of size T x T is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        bounds: tuple[int, ...],
        scale: float,
        window: int | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        log_sum = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for first, last in itertools.pairwise(bounds):
            kernel = causal_kernel(q[:, first:last], window=window)
            out[:, first:last], log_sum[:, first:last] = kernel.forward(
                q[:, first:last], k[:, first:last], v[:, first:last], scale=scale, window=_within(window, last - first)
            )
        if own:
            wide = log_sum.dtype
            scores = [(q.to(wide) * key.to(wide)).sum(-1) * scale for key in own[::2]]
            merged = torch.stack([log_sum, *scores]).logsumexp(0)
            total = out.to(wide) * (log_sum - merged).exp()[..., None]
            for score, value in zip(scores, own[1::2], strict=True):
                total += value.to(wide) * (score - merged).exp()[..., None]
            out, log_sum = total.to(q.dtype), merged
        ctx.save_for_backward(q, k, v, out, log_sum, *own)
        ctx.bounds, ctx.scale, ctx.window = bounds, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum, *own = ctx.saved_tensors
        scale, window = ctx.scale, ctx.window
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for first, last in itertools.pairwise(ctx.bounds):
            rows = slice(first, last)
            kernel = causal_kernel(q[:, rows], window=window)
            grad_q[:, rows], grad_k[:, rows], grad_v[:, rows] = kernel.backward(
                grad[:, rows],
                q[:, rows],
                k[:, rows],
                v[:, rows],
                out[:, rows],
                log_sum[:, rows],
                scale=scale,
                window=_within(window, last - first),
            )
        grads_own: list[torch.Tensor] = []
        if own:
            wide = log_sum.dtype
            grad_wide, q_wide, grad_q_wide = grad.to(wide), q.to(wide), grad_q.to(wide)
            delta = (grad_wide * out.to(wide)).sum(-1)
            for key, value in zip(own[::2], own[1::2], strict=True):
                weight = ((q_wide * key.to(wide)).sum(-1) * scale - log_sum).exp()
                grad_score = (weight * ((grad_wide * value.to(wide)).sum(-1) - delta) * scale)[..., None]
                grad_q_wide += grad_score * key.to(wide)
                grads_own += [(grad_score * q_wide).to(key.dtype), (weight[..., None] * grad_wide).to(value.dtype)]
            grad_q = grad_q_wide.to(q.dtype)
        return (None, None, None, grad_q, grad_k, grad_v, *grads_own)


def _within(window: int | None, length: int) -> int | None:
    return None if window is None or length <= window else window


class PackedAttention:
    """Packed samples, unrolled over depths (DESIGN.md, section 4).

    At depth 0 each row attends to the rows of its sample up to itself. At depth k it attends to the same rows' depth-0
    keys and to its own keys of depths 1..k. Call ``next_depth`` between depths. A sliding window applies to the
    depth-0 keys, counted from the base.
    """

    def __init__(self, *, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        self.depth = 0
        self._keys: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def next_depth(self) -> None:
        self.depth += 1

    def attend(
        self, layer_index: int, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        num_heads, value_size = q_NTH.shape[0], v_NTH.shape[-1]
        if value_size < q_NTH.shape[-1]:  # MLA: the kernels want one head size
            v_NTH = functional.pad(v_NTH, (0, q_NTH.shape[-1] - value_size))
        depths = self._keys.setdefault(layer_index, [])
        assert len(depths) == self.depth, (len(depths), self.depth)
        depths.append((_repeat(k_NTH, num_heads), _repeat(v_NTH, num_heads)))
        (k0, v0), *later = depths
        own = [tensor for pair in later for tensor in pair]
        out_NTH: torch.Tensor = _Unrolled.apply(self.bounds, scale, window, q_NTH, k0, v0, *own)
        return out_NTH[..., :value_size]
