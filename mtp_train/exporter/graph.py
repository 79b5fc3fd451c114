"""A head's graph in plain torch, built from exported files alone: the second opinion that an export is proven by.

Independent of ``head/``, ``nn/attention.py`` and ``nn/experts.py``: transformers' own layer, eager throughout, one sample at a
time, a written-out mask and a growing cache, where the trainer has packed samples and merged log-sum-exps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from mtp_train.nn.layer import layer_parts
from mtp_train.target.weights import SharedWeights

if TYPE_CHECKING:
    from transformers import Cache


class GraphStep(NamedTuple):
    """One depth over one sample. Row t speaks about token t + depth + 2; rows from T - 1 - depth on read no token of the
    sample and mean nothing. ``hidden_TD`` is what the lm_head reads; ``logits_TV`` are -inf outside a draft vocabulary."""

    hidden_TD: torch.Tensor
    logits_TV: torch.Tensor


class Graph(ABC):
    """What all heads' graphs have in common: their modules, loading, the target's lm_head.

    ``config`` is the exported config.json, ``tensors`` the exported weights. ``num_blocks``: sets of weights that the depths go
    through, the last one serving those beyond.
    Errors: ValueError where a tensor is missing, has another shape, or is not part of the graph.
    """

    num_blocks: int = 1

    def __init__(self, *, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shared: SharedWeights) -> None:
        self.shared = shared
        self.modules = torch.nn.ModuleDict(self._modules(config)).eval().requires_grad_(False)
        self.load(tensors)

    @abstractmethod
    def _modules(self, config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
        """The graph's modules by the names that its tensors begin with."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; every tensor of the graph, and no other, must be there."""
        try:
            self.modules.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
        except RuntimeError as error:
            raise ValueError(f"export: expected the tensors of the graph that config.json states, found {error}") from error

    @abstractmethod
    def unroll(
        self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, num_depths: int, taps_TLD: torch.Tensor | None = None
    ) -> Iterator[GraphStep]:
        """Draft ``num_depths`` deep from every base of one sample (T tokens, the target's hidden states of their positions,
        and the layers that it taps, where the head reads any)."""

    def _logits(self, out_TD: torch.Tensor) -> torch.Tensor:
        return functional.linear(out_TD, self.shared.lm_head_VD.float())


class LayerGraph(Graph):
    """What the graphs of one decoder layer have in common: the loop over depths, the layer's config and mask."""

    def __init__(self, *, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shared: SharedWeights) -> None:
        from transformers import AutoConfig

        self.norms: Mapping[str, bool] = config["norms"]
        self.num_blocks = config.get("num_blocks", 1)
        target = dict(config["target_config"])
        layer_config = AutoConfig.for_model(target.pop("model_type"), **target)
        layer_config._attn_implementation = "eager"
        layer_config._experts_implementation = "eager"
        self.config = layer_config
        self.layer_index = layer_config.num_hidden_layers - 1
        self.parts = layer_parts(layer_config)
        self.rotary = self.parts.rotary(config=layer_config)
        super().__init__(config=config, tensors=tensors, shared=shared)

    def _norm(self, *, there: bool = True) -> torch.nn.Module:
        return self.parts.norm(self.config.hidden_size, eps=self.config.rms_norm_eps) if there else torch.nn.Identity()

    @torch.no_grad()
    def unroll(
        self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, num_depths: int, taps_TLD: torch.Tensor | None = None
    ) -> Iterator[GraphStep]:
        from transformers import DynamicCache

        caches = [DynamicCache() for _ in range(self.num_blocks)]
        state_TD = self._read_target(hidden_TD.float(), taps_TLD)
        for depth in range(num_depths):
            read_T = functional.pad(token_ids_T, (0, depth + 1))[depth + 1 :]
            embed_TD = functional.embedding(read_T, self.shared.embedding_VD).float()
            block = min(depth, self.num_blocks - 1)
            raw_TD = self._layer(embed_TD, state_TD, block=block, depth=depth, cache=caches[block])
            out_TD = self.modules.get_submodule(self._prefix(block) + "norm")(raw_TD)
            yield GraphStep(out_TD, self._logits(out_TD))
            state_TD = out_TD if self.norms["feedback"] else raw_TD

    def _read_target(self, hidden_TD: torch.Tensor, taps_TLD: torch.Tensor | None) -> torch.Tensor:
        return hidden_TD

    @abstractmethod
    def _layer(self, embed_TD: torch.Tensor, state_TD: torch.Tensor, *, block: int, depth: int, cache: Cache) -> torch.Tensor:
        """One depth's decoder layer over all bases, before the output norm, (T, D). ``block`` k comes in at depth k, with a cache of
        its own."""

    def _prefix(self, block: int) -> str:
        """What the names of a block's tensors begin with."""
        return f"blocks.{block}." if block else ""

    def _attention_inputs(self, x_1TE: torch.Tensor, *, block: int, depth: int) -> dict[str, Any]:
        """Rotary embedding and mask of a depth, as transformers' layers and attention take them."""
        num_tokens = x_1TE.shape[1]
        position_1T = (torch.arange(num_tokens) + depth)[None]
        return {
            "position_embeddings": self.rotary(x_1TE, position_ids=position_1T),
            "attention_mask": self._mask(num_tokens, depth - block),
            "position_ids": position_1T,
        }

    def _mask(self, num_tokens: int, depth: int) -> torch.Tensor:
        """What is added to the scores, (1, 1, T, (depth + 1) T): the keys of the block's first depth up to the base, of ``depth``
        later ones the base's own. A sliding window counts from the base."""
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


class PairGraph(LayerGraph):
    """Projection of (hidden, next token), one decoder layer, an output norm; which norms there are, the config says.

    Tensors: embed_norm, hidden_norm, fc, layers.0.*, norm; of block k, where there are more, the same behind blocks.k.
    """

    def __init__(self, *, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shared: SharedWeights) -> None:
        self.column_order: str = config["column_order"]
        self.zero_first_embedding: bool = config["zero_first_embedding"]
        self.projection_bias: bool = config.get("projection_bias", False)
        super().__init__(config=config, tensors=tensors, shared=shared)

    def _modules(self, config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
        later = {str(block): torch.nn.ModuleDict(self._block()) for block in range(1, self.num_blocks)}
        return {**self._block(), **({"blocks": torch.nn.ModuleDict(later)} if later else {})}

    def _block(self) -> dict[str, torch.nn.Module]:
        layer = self.parts.layer(self.config, self.layer_index)
        if not self.norms["input"]:
            layer.input_layernorm = torch.nn.Identity()
        size = self.config.hidden_size
        return {
            "embed_norm": self._norm(there=self.norms["embed"]),
            "hidden_norm": self._norm(there=self.norms["hidden"]),
            "fc": torch.nn.Linear(2 * size, size, bias=self.projection_bias),
            "layers": torch.nn.ModuleList([layer]),
            "norm": self._norm(there=self.norms["output"]),
        }

    def _layer(self, embed_TD: torch.Tensor, state_TD: torch.Tensor, *, block: int, depth: int, cache: Cache) -> torch.Tensor:
        part = {name: self.modules.get_submodule(self._prefix(block) + name) for name in ("embed_norm", "hidden_norm", "fc", "layers.0")}
        if self.zero_first_embedding and depth == block:
            embed_TD[0] = 0.0
        embed_TD, state_TD = part["embed_norm"](embed_TD), part["hidden_norm"](state_TD)
        pair = [state_TD, embed_TD] if self.column_order == "hidden_embed" else [embed_TD, state_TD]
        fused_1TD = part["fc"](torch.cat(pair, dim=-1))[None]
        inputs = self._attention_inputs(fused_1TD, block=block, depth=depth)
        out = part["layers.0"](fused_1TD, past_key_values=cache, use_cache=True, **inputs)
        raw_TD: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return raw_TD
