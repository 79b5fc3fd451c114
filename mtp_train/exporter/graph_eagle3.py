"""EAGLE-3's graph in plain torch, under the tensor names of the published checkpoints and of vLLM's class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from mtp_train.exporter.graph import LayerGraph
from mtp_train.target.draft_vocabulary import from_offsets
from mtp_train.target.weights import SharedWeights

if TYPE_CHECKING:
    from transformers import Cache

D2T = "d2t"


class Eagle3Graph(LayerGraph):
    """Taps joined by ``fc``; attention over cat[input_layernorm(embedding), hidden_norm(state)], added to the state, as is the
    MLP; ``norm``; an lm_head of its own. Logits are over the target's vocabulary, -inf outside the draft vocabulary.

    Tensors: fc_norm.i (where ``norms`` say so), fc (where ``target_layer_ids`` names layers), layers.0.*, norm, lm_head, and
    d2t (where ``draft_vocab_size`` is not null), offsets in int64.
    """

    def __init__(self, *, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shared: SharedWeights) -> None:
        self.num_taps = len(config["target_layer_ids"])
        self.draft_vocab_size: int | None = config["draft_vocab_size"]
        self.vocab_size = shared.embedding_VD.shape[0]
        super().__init__(config=config, tensors=tensors, shared=shared)

    def _modules(self, config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
        size = self.config.hidden_size
        layer = self.parts.layer(self.config, self.layer_index)
        attention = layer.get_submodule("self_attn")
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: Any = attention.get_submodule(name)
            attention.set_submodule(name, torch.nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))
        layer.hidden_norm = self._norm()
        return {
            "fc_norm": torch.nn.ModuleList([self._norm() for _ in range(self.num_taps if self.norms["taps"] else 0)]),
            "fc": torch.nn.Linear(self.num_taps * size, size, bias=False) if self.num_taps else torch.nn.Identity(),
            "layers": torch.nn.ModuleList([layer]),
            "norm": self._norm(),
            "lm_head": torch.nn.Linear(size, self.draft_vocab_size or self.vocab_size, bias=False),
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if (self.draft_vocab_size is None) != (D2T not in tensors):
            raise ValueError(
                f"export: expected {D2T} exactly where draft_vocab_size is given, found draft_vocab_size {self.draft_vocab_size} "
                f"{'with' if D2T in tensors else 'without'} it"
            )
        self.ids_U = from_offsets(tensors[D2T], vocab_size=self.vocab_size) if D2T in tensors else torch.arange(self.vocab_size)
        super().load({name: tensor for name, tensor in tensors.items() if name != D2T})

    def _read_target(self, hidden_TD: torch.Tensor, taps_TLD: torch.Tensor | None) -> torch.Tensor:
        if not self.num_taps:
            return hidden_TD
        assert taps_TLD is not None and taps_TLD.shape[1] == self.num_taps
        taps = [tap_TD.float() for tap_TD in taps_TLD.unbind(1)]
        if self.norms["taps"]:
            taps = [self.modules.get_submodule(f"fc_norm.{index}")(tap_TD) for index, tap_TD in enumerate(taps)]
        state_TD: torch.Tensor = self.modules["fc"](torch.cat(taps, dim=-1))
        return state_TD

    def _layer(self, embed_TD: torch.Tensor, state_TD: torch.Tensor, *, block: int, depth: int, cache: Cache) -> torch.Tensor:
        layer: Any = self.modules.get_submodule("layers.0")
        pair_1TE = torch.cat([layer.input_layernorm(embed_TD), layer.hidden_norm(state_TD)], dim=-1)[None]
        attended_1TD, _ = layer.self_attn(
            hidden_states=pair_1TE, past_key_values=cache, **self._attention_inputs(pair_1TE, block=block, depth=depth)
        )
        y_TD: torch.Tensor = state_TD + attended_1TD[0]
        return y_TD + layer.mlp(layer.post_attention_layernorm(y_TD))

    def _logits(self, out_TD: torch.Tensor) -> torch.Tensor:
        logits_TU = functional.linear(out_TD, self.modules["lm_head"].get_parameter("weight"))
        logits_TV = torch.full((out_TD.shape[0], self.vocab_size), float("-inf"))
        logits_TV[:, self.ids_U] = logits_TU
        return logits_TV
