"""The pair head's graph in plain torch, built from exported files alone: the second opinion that an export is proven by.

Independent of ``head/``, ``nn/attention.py`` and ``nn/experts.py``: transformers' own layer, eager throughout, one sample at a
time, a written-out mask and a growing cache, where the trainer has packed samples and merged log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from mtp_train.nn.layer import layer_parts
from mtp_train.target.weights import SharedWeights


class GraphStep(NamedTuple):
    """One depth over one sample. Row t speaks about token t + depth + 2; rows from T - 1 - depth on read no token of the
    sample and mean nothing. ``hidden_TD`` is what the lm_head reads."""

    hidden_TD: torch.Tensor
    logits_TV: torch.Tensor


class PairGraph:
    """Projection of (hidden, next token), one decoder layer, an output norm; which norms there are, the config says.

    ``config`` is the exported config.json, ``tensors`` the exported weights (embed_norm, hidden_norm, fc, layers.0.*, norm).
    Errors: ValueError where a tensor is missing, has another shape, or is not part of the graph.
    """

    def __init__(self, *, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shared: SharedWeights) -> None:
        from transformers import AutoConfig

        self.norms: Mapping[str, bool] = config["norms"]
        self.column_order: str = config["column_order"]
        self.zero_first_embedding: bool = config["zero_first_embedding"]
        self.shared = shared
        target = dict(config["target_config"])
        layer_config = AutoConfig.for_model(target.pop("model_type"), **target)
        layer_config._attn_implementation = "eager"
        layer_config._experts_implementation = "eager"
        self.config = layer_config
        self.layer_index = layer_config.num_hidden_layers - 1
        parts = layer_parts(layer_config)
        size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        layer = parts.layer(layer_config, self.layer_index)
        if not self.norms["input"]:
            layer.input_layernorm = torch.nn.Identity()
        self.layer = layer
        modules = {
            "embed_norm": parts.norm(size, eps=eps) if self.norms["embed"] else torch.nn.Identity(),
            "hidden_norm": parts.norm(size, eps=eps) if self.norms["hidden"] else torch.nn.Identity(),
            "fc": torch.nn.Linear(2 * size, size, bias=False),
            "layers": torch.nn.ModuleList([layer]),
            "norm": parts.norm(size, eps=eps) if self.norms["output"] else torch.nn.Identity(),
        }
        self.modules = torch.nn.ModuleDict(modules).eval().requires_grad_(False)
        self.rotary = parts.rotary(config=layer_config)
        self.load(tensors)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; every tensor of the graph, and no other, must be there."""
        try:
            self.modules.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
        except RuntimeError as error:
            raise ValueError(f"export: expected the tensors of the graph that config.json states, found {error}") from error

    @torch.no_grad()
    def unroll(self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, num_depths: int) -> Iterator[GraphStep]:
        """Draft ``num_depths`` deep from every base of one sample (T tokens, the target's hidden states of their positions)."""
        from transformers import DynamicCache

        num_tokens, cache = token_ids_T.shape[0], DynamicCache()
        feedback_TD = hidden_TD.float()
        for depth in range(num_depths):
            position_1T = (torch.arange(num_tokens) + depth)[None]
            read_T = functional.pad(token_ids_T, (0, depth + 1))[depth + 1 :]
            embed_TD = functional.embedding(read_T, self.shared.embedding_VD).float()
            if self.zero_first_embedding and depth == 0:
                embed_TD[0] = 0.0
            embed_TD, state_TD = self.modules["embed_norm"](embed_TD), self.modules["hidden_norm"](feedback_TD)
            pair = [state_TD, embed_TD] if self.column_order == "hidden_embed" else [embed_TD, state_TD]
            fused_1TD = self.modules["fc"](torch.cat(pair, dim=-1))[None]
            out = self.layer(
                fused_1TD,
                position_ids=position_1T,
                position_embeddings=self.rotary(fused_1TD, position_ids=position_1T),
                attention_mask=self._mask(num_tokens, depth),
                past_key_values=cache,
                use_cache=True,
            )
            raw_TD = (out[0] if isinstance(out, tuple) else out)[0]
            out_TD = self.modules["norm"](raw_TD)
            yield GraphStep(out_TD, functional.linear(out_TD, self.shared.lm_head_VD.float()))
            feedback_TD = out_TD if self.norms["feedback"] else raw_TD

    def _mask(self, num_tokens: int, depth: int) -> torch.Tensor:
        """What is added to the scores, (1, 1, T, (depth + 1) T): the keys of depth 0 up to the base, of later depths the
        base's own. A sliding window counts from the base."""
        base = torch.arange(num_tokens)
        sees = base[None, :] <= base[:, None]
        window = self.config.sliding_window if self._slides() else None
        if window is not None:
            sees = sees & (base[None, :] > base[:, None] - window)
        own = torch.eye(num_tokens, dtype=torch.bool)
        allowed = torch.cat([sees, *[own] * depth], dim=1)
        return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]

    def _slides(self) -> bool:
        """Whether the head's layer attends through a sliding window, as transformers decides it for that layer."""
        settings = self.config.to_dict()
        kinds = settings.get("layer_types")
        if settings.get("sliding_window") is None:
            return False
        return kinds[self.layer_index] == "sliding_attention" if kinds else bool(settings.get("use_sliding_window", True))
