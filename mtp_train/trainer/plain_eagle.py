"""EAGLE's training recipe written plainly: padded batches, all logits at all positions. What the product is measured against.

Architecture, losses and weights are EAGLE-1's (Li et al. 2024, sections 3.1 and 3.2), as ``head=eagle`` with
``losses='{hidden_l1: 1.0, forward_kl: 0.1}'`` trains them: a projection of (embed(x_{i+1}), h_i), one Llama layer without
its input norm, SmoothL1 to the target's next state and a soft cross-entropy over the vocabulary. Nothing here is used to
train; the two give the same gradients (a test), and ``tools/bench_train.py`` times them side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from mtp_train.head.pair import PairHead
from mtp_train.records import Sample
from mtp_train.target.weights import SharedWeights


class PaddedBatch(NamedTuple):
    """Samples side by side, padded to the longest, shifted as the first depth reads them (``batch/shift.py``)."""

    hidden_BTD: torch.Tensor
    token_ids_BT: torch.Tensor  # of each row's own position
    mask_BT: torch.Tensor  # 1 where the token itself is the target's own


def pad(samples: Sequence[Sample]) -> PaddedBatch:
    """One row of the batch per sample."""
    longest = max(sample.num_tokens for sample in samples)
    rows = [functional.pad(sample.hidden_TD, (0, 0, 0, longest - sample.num_tokens)) for sample in samples]
    ids = [functional.pad(sample.token_ids_T, (0, longest - sample.num_tokens)) for sample in samples]
    masks = [functional.pad(sample.loss_mask_T, (0, longest - sample.num_tokens)) for sample in samples]
    return PaddedBatch(torch.stack(rows), torch.stack(ids), torch.stack(masks))


class PlainEagle(nn.Module):
    """The head, from ``head=eagle``'s weights, with attention over padded rows."""

    def __init__(self, head: PairHead, shared: SharedWeights) -> None:
        super().__init__()
        assert not any(head.norms.values()) and head.column_order == "embed_hidden" and not head.zero_first_embedding
        own = head.decoder.layer
        attention, mlp = own.get_submodule("self_attn"), own.get_submodule("mlp")
        self._shared = shared
        self.rotary = head.decoder.rotary
        self.head_size = int(attention.head_dim)  # type: ignore[arg-type]  # a number that transformers' layers all state
        self.fc = _copy(head.projection)
        self.q, self.k, self.v, self.o = (_copy(attention.get_submodule(f"{name}_proj")) for name in "qkvo")
        self.gate, self.up, self.down = (_copy(mlp.get_submodule(f"{name}_proj")) for name in ("gate", "up", "down"))
        self.norm = copy.deepcopy(own.get_submodule("post_attention_layernorm"))

    def forward(self, hidden_BTD: torch.Tensor, token_ids_BT: torch.Tensor, *, offset: int) -> torch.Tensor:
        """The next states; ``offset`` is added to the rotary positions."""
        embed = functional.embedding(token_ids_BT, self._shared.embedding_VD)
        x = self.fc(torch.cat([embed.to(self.fc.weight.dtype), hidden_BTD.to(self.fc.weight.dtype)], -1))
        position = torch.arange(offset, offset + x.shape[1], device=x.device)[None]
        cos, sin = self.rotary(x, position)
        q, k, v = (part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (y * cos[:, None] + _rotated(y) * sin[:, None] for y in (q, k))
        seen = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        y = self.norm(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out

    def loss(self, batch: PaddedBatch, *, draft_steps: int, decay: float) -> torch.Tensor:
        """The sum over depths of decay ** k x (SmoothL1 + 0.1 soft cross-entropy), each the mean over rows that count.

        Later depths read the states of the one before under a plain causal mask, as HASS and simpler trainers do: cheaper
        than the product's, where each base also attends to its own earlier drafts.
        """
        lm_head_VD = self._shared.lm_head_VD
        with torch.no_grad():
            target_BTV = functional.linear(batch.hidden_BTD.to(lm_head_VD.dtype), lm_head_VD).float().softmax(-1)
        hidden, total = batch.hidden_BTD, torch.zeros((), device=batch.hidden_BTD.device)
        for depth in range(draft_steps):
            hidden = self(hidden, _ahead(batch.token_ids_BT, depth + 1), offset=depth)
            log_q = functional.linear(hidden.to(lm_head_VD.dtype), lm_head_VD).float().log_softmax(-1)
            mask = _ahead(batch.mask_BT, depth + 2).float()
            teacher = _ahead(batch.hidden_BTD, depth + 1)
            soft = -(_ahead(target_BTV, depth + 1) * log_q).sum(-1)
            smooth = functional.smooth_l1_loss(hidden.float(), teacher.float(), reduction="none").mean(-1)
            total = total + decay**depth * ((smooth + 0.1 * soft) * mask).sum() / mask.sum().clamp_min(1)
        return total

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Its parameters under the names that they have in ``head=eagle``."""
        layer, attention, mlp = "decoder.layer.", "decoder.layer.self_attn.", "decoder.layer.mlp."
        named = {"projection.weight": self.fc.weight, f"{layer}post_attention_layernorm.weight": self.norm.get_parameter("weight")}
        named |= {f"{attention}{name}_proj.weight": getattr(self, name).weight for name in "qkvo"}
        return named | {f"{mlp}{name}_proj.weight": getattr(self, name).weight for name in ("gate", "up", "down")}


def _ahead(x: torch.Tensor, by: int) -> torch.Tensor:
    """Row i is what stands ``by`` rows later; zeros behind the end."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


def _copy(linear: nn.Module) -> nn.Linear:
    assert isinstance(linear, nn.Linear)
    return copy.deepcopy(linear)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
