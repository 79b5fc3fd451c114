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
from mtp_train.nn.parts import Part, bounds_of, num_scores, parts_of
from mtp_train.nn.varlen import varlen_kernel
from mtp_train.nn.wanted import WantedRows
from mtp_train.records import RowShare

ATTENTION = "mtp_train"


class AttentionContext(Protocol):
    """What decides who attends to whom. ``N`` here are query heads; keys and values may have fewer (GQA)."""

    def attend(
        self, layer_index: int, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return the attention output, (N, T, H of the values)."""
        ...


class DraftContext(AttentionContext, Protocol):
    """The context of a draft head's rows. ``depth``: how many of the head's own states lie between them and the target's, 0 where
    they read these. The rest is for heads of several blocks, one per depth, each with keys of its own."""

    depth: int

    def block(self, number: int) -> AttentionContext:
        """Where block ``number`` attends to: to its own keys alone, whose first rows are those of depth ``number``."""
        ...

    def states_before(self, number: int, state_TD: torch.Tensor) -> torch.Tensor | None:
        """What block ``number`` made of the row before each, where ``state_TD`` is what it made of these: the next block reads it
        with these rows' tokens. None in training, where the next depth brings all of the next block's rows at once."""
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
    # Under autocast, rotary factors or norms in float32 widen queries and keys; the kernels want all three as the products gave them.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out_NTH = attention_context.attend(layer_index, query[0], key[0], value[0], scale=scale, window=sliding_window)
    return out_NTH.transpose(0, 1)[None].contiguous(), None


def register() -> None:
    """Make ``ATTENTION`` known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def _repeat(x_NTH: torch.Tensor, num_heads: int) -> torch.Tensor:
    times = num_heads // x_NTH.shape[0]
    return x_NTH if times == 1 else x_NTH.repeat_interleave(times, dim=0)


def _put(x_NTH: torch.Tensor, place_M: torch.Tensor | None, num_places: int) -> torch.Tensor:
    """The rows at their places among so many, zeros at the others."""
    if place_M is None:
        return x_NTH
    return x_NTH.new_zeros((x_NTH.shape[0], num_places, x_NTH.shape[2])).index_copy(1, place_M, x_NTH)


class _Unrolled(torch.autograd.Function):
    """Causal attention within samples to the depth-0 keys, and of each row to its own keys of later depths.

    Forward: flash attention over the depth-0 keys gives (O_0, lse_0), in parts where other processes' keys are among them; the
    row's own keys add one score each; all are merged by their log-sum-exps. Backward: the depth-0 parts from the kernel with
    the merged O and lse, the own keys by hand. Nothing of size T x T is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        parts: tuple[Part, ...],
        scale: float,
        window: int | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        log_sum = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        together, bounds = varlen_kernel(q), bounds_of(parts)
        if together is not None and bounds is not None:
            out, log_sum = together.forward(q, k, v, bounds=bounds, scale=scale, window=window)
            parts = ()
        for part in parts:
            rows, keys = part.rows, part.keys
            found, found_sum = causal_kernel(q[:, rows], window=window).forward(
                q[:, rows], k[:, keys], v[:, keys], scale=scale, window=_within(window, part), causal=part.causal
            )
            if part.causal:
                out[:, rows], log_sum[:, rows] = found, found_sum
            else:
                merged = torch.logaddexp(log_sum[:, rows], found_sum)
                shares = ((log_sum[:, rows] - merged).exp()[..., None], (found_sum - merged).exp()[..., None])
                out[:, rows] = (out[:, rows] * shares[0] + found * shares[1]).to(q.dtype)
                log_sum[:, rows] = merged
        if own:
            wide = log_sum.dtype
            scores = [(q.to(wide) * key.to(wide)).sum(-1) * scale for key in own[::2]]
            merged = torch.stack([log_sum, *scores]).logsumexp(0)
            total = out.to(wide) * (log_sum - merged).exp()[..., None]
            for score, value in zip(scores, own[1::2], strict=True):
                total += value.to(wide) * (score - merged).exp()[..., None]
            out, log_sum = total.to(q.dtype), merged
        ctx.save_for_backward(q, k, v, out, log_sum, *own)
        ctx.parts, ctx.together, ctx.bounds, ctx.scale, ctx.window = parts, together, bounds, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum, *own = ctx.saved_tensors
        scale, window = ctx.scale, ctx.window
        grad = grad.contiguous()
        if ctx.together is not None and ctx.bounds is not None:
            grad_q, grad_k, grad_v = ctx.together.backward(grad, q, k, v, out, log_sum, bounds=ctx.bounds, scale=scale, window=window)
        else:
            grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part in ctx.parts:
            rows, keys = part.rows, part.keys
            grads = causal_kernel(q[:, rows], window=window).backward(
                grad[:, rows],
                q[:, rows],
                k[:, keys],
                v[:, keys],
                out[:, rows],
                log_sum[:, rows],
                scale=scale,
                window=_within(window, part),
                causal=part.causal,
            )
            for total, where, found in zip((grad_q, grad_k, grad_v), (rows, keys, keys), grads, strict=True):
                total[:, where] += found
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


def _within(window: int | None, part: Part) -> int | None:
    return None if window is None or part.rows.stop - part.rows.start <= window else window


class PackedAttention:
    """Packed samples, unrolled over depths (DESIGN.md, section 4).

    At depth 0 each row attends to the rows of its sample up to itself. At depth k it attends to the same rows' depth-0
    keys and to its own keys of depths 1..k. Call ``next_depth`` between depths. A sliding window applies to the
    depth-0 keys, counted from the base.

    ``share``: None, or the rows of the batch that this process computes, beside others that compute the rest. Queries, keys
    and values are then those of its rows; depth 0's keys and values are gathered from all.
    """

    def __init__(self, *, bounds: Sequence[int], share: RowShare | None = None) -> None:
        self._bounds, self._share = bounds, share
        self._wanted: WantedRows | None = None
        self._kept_M: torch.Tensor | None = None  # places among the wanted rows
        self._asking: WantedRows | None = None
        self._parts = self._later_parts = parts_of(bounds, None if share is None else share.stretches)
        self._longest = max(last - first for first, last in itertools.pairwise(bounds))
        self.depth = 0
        self._keys: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def next_depth(self) -> None:
        self.depth += 1

    def ask(self, wanted: WantedRows) -> None:
        """At depth 0 only these rows need an answer: where that saves more than calls of their own cost, the others get zeros, and
        give keys and values alone. A long prompt then costs its answer's rows times its length, not the length squared."""
        assert self._share is None
        if num_scores(parts_of(self._bounds, wanted.stretches)) < num_scores(self._parts):
            self._asking = wanted

    def restrict(self, wanted: WantedRows) -> None:
        """From depth 1 on, queries, own keys and own values are those of these rows alone."""
        assert self._share is None
        self._wanted, self._later_parts = wanted, parts_of(self._bounds, wanted.stretches)

    def narrow(self, rows_M: torch.Tensor) -> None:
        """From the next depth on, only of these of the rows that ``restrict`` named, all among those of the depth before."""
        assert self._wanted is not None
        self._kept_M = torch.searchsorted(self._wanted.rows_M, rows_M)

    def attend(
        self, layer_index: int, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        return self.attend_at(self.depth, layer_index, q_NTH, k_NTH, v_NTH, scale=scale, window=window)

    def at_this_depth(self) -> DraftContext:
        """The context as it is now, for a computation that is done once more in the backward, when later depths have come."""
        return _AtDepth(self, self.depth)

    def block(self, number: int) -> AttentionContext:
        return _AtDepth(self, self.depth).block(number)

    def states_before(self, number: int, state_TD: torch.Tensor) -> None:
        return None

    def attend_at(
        self,
        depth: int,
        layer_index: int,
        q_NTH: torch.Tensor,
        k_NTH: torch.Tensor,
        v_NTH: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """``attend`` of one depth: the next one, or an earlier one again, with the same keys and values as the first time."""
        num_heads, value_size = q_NTH.shape[0], v_NTH.shape[-1]
        if value_size < q_NTH.shape[-1]:  # MLA: the kernels want one head size
            v_NTH = functional.pad(v_NTH, (0, q_NTH.shape[-1] - value_size))
        depths = self._keys.setdefault(layer_index, [])
        assert depth <= len(depths), (depth, len(depths))
        if self._share is not None and depth == 0:
            if window is not None and window < self._longest:
                raise ValueError(
                    f"parallel.context: expected samples within the layer's sliding window of {window} tokens, found one of "
                    f"{self._longest}; train it on one process (context=1), which a window does not need more of"
                )
            k_NTH, v_NTH = self._share.gather(k_NTH), self._share.gather(v_NTH)
        parts, place_M, num_places = self._later_parts if depth else self._parts, None, 0
        if depth and self._wanted is not None:
            if window is not None and window < self._longest:  # counted from each row's own place: put the rows back there
                parts, rows_M = self._parts, self._wanted.rows_M
                place_M, num_places = rows_M if self._kept_M is None else rows_M[self._kept_M], depths[0][0].shape[1]
            else:  # kernels want whole stretches
                place_M, num_places = self._kept_M, self._wanted.rows_M.shape[0]
        q_NTH, k_NTH, v_NTH = (_put(x, place_M, num_places) for x in (q_NTH, k_NTH, v_NTH))
        mine = (_repeat(k_NTH, num_heads), _repeat(v_NTH, num_heads))
        if depth == len(depths):
            depths.append(mine)
        (k0, v0), *later = [*depths[:depth], mine]
        own = [tensor for pair in later for tensor in pair]
        asking = self._asking if depth == 0 and (window is None or window >= self._longest) else None
        if asking is not None:
            parts, q_NTH = parts_of(self._bounds, asking.stretches), q_NTH[:, asking.rows_M]
        out_NTH: torch.Tensor = _Unrolled.apply(parts, scale, window, q_NTH, k0, v0, *own)
        if asking is not None:
            out_NTH = _put(out_NTH, asking.rows_M, k0.shape[1])
        if place_M is not None:
            out_NTH = out_NTH[:, place_M]
        return out_NTH[..., :value_size]


class _AtDepth:
    """A ``PackedAttention`` held at one depth. ``number`` None: for the layers by their own index; else for that block of a head,
    which comes in at the depth of its number and keeps its keys under it."""

    def __init__(self, packed: PackedAttention, depth: int, *, number: int | None = None) -> None:
        self._packed, self.depth, self._number = packed, depth, number

    def block(self, number: int) -> AttentionContext:
        return _AtDepth(self._packed, self.depth, number=number)

    def states_before(self, number: int, state_TD: torch.Tensor) -> None:
        return None

    def attend(
        self, layer_index: int, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        depth, key = (self.depth, layer_index) if self._number is None else (self.depth - self._number, self._number)
        return self._packed.attend_at(depth, key, q_NTH, k_NTH, v_NTH, scale=scale, window=window)
