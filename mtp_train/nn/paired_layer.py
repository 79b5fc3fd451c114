"""EAGLE-3's decoder layer, which transformers has not: queries, keys and values read an embedding and a state side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mtp_train.nn.layer import layer_parts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WIDE = ("q_proj", "k_proj", "v_proj")
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


class PairedLayer(nn.Module):
    """One decoder layer over pairs (embedding, state), built from the target architecture's attention, MLP and norms.

    x = cat[input_norm(embedding), hidden_norm(state)], 2D wide; y = state + attention(x); out = y + mlp(norm(y)): the first
    layer of EAGLE-3 (Li et al. 2025, section 3.1; official implementation). The residual stream carries the state alone. The
    layer has the target's last layer index, as in ``nn/layer.py``.
    Errors: ValueError where the architecture's layer is not built as Llama's (MLA, mixture of experts, norms elsewhere).
    """

    def __init__(self, *, config: PreTrainedConfig) -> None:
        super().__init__()
        parts = layer_parts(config)
        layer = parts.layer(config, config.num_hidden_layers - 1)
        _check(layer, model_type=config.model_type)
        for name in WIDE:
            narrow = getattr(layer.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(layer.self_attn, name, wide)
        self.layer = layer
        self.hidden_norm = parts.norm(config.hidden_size, eps=config.rms_norm_eps)
        # Holds no parameters; kept out of the state dict as transformers keeps its buffers.
        self.rotary = parts.rotary(config=config)

    def load_target_layer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin as a layer of the target (``target.weights.read_layer``): it reads the state as that layer does, and of the
        embedding, whose columns are zero, nothing yet."""
        own = {name: tensor.float() for name, tensor in tensors.items() if name != "input_layernorm.weight"}
        for name in WIDE:
            narrow = own[f"self_attn.{name}.weight"]
            own[f"self_attn.{name}.weight"] = torch.cat([torch.zeros_like(narrow), narrow], dim=1)
        own["input_layernorm.weight"] = torch.ones_like(self.hidden_norm.get_parameter("weight"))
        self.layer.load_state_dict(own)
        self.hidden_norm.load_state_dict({"weight": tensors["input_layernorm.weight"].float()})

    def forward(self, embed_TD: torch.Tensor, hidden_TD: torch.Tensor, *, position_T: torch.Tensor, context: Any) -> torch.Tensor:
        layer: Any = self.layer
        pair_1TE = torch.cat([layer.input_layernorm(embed_TD), self.hidden_norm(hidden_TD)], dim=-1)[None]
        device = pair_1TE.device.type
        if torch.is_autocast_enabled(device):  # narrowed once for all three, and for the rotary factors, which take its dtype
            pair_1TE = pair_1TE.to(torch.get_autocast_dtype(device))
        attended_1TD, _ = layer.self_attn(
            hidden_states=pair_1TE,
            position_embeddings=self.rotary(pair_1TE, position_ids=position_T[None]),
            attention_mask=None,
            attention_context=context,
        )
        out_TD: torch.Tensor = hidden_TD + attended_1TD[0]
        return out_TD + layer.mlp(layer.post_attention_layernorm(out_TD))


def _check(layer: nn.Module, *, model_type: str) -> None:
    found = {name for name, _ in layer.named_children()}
    attention, mlp = dict(layer.named_children()).get("self_attn", layer), dict(layer.named_children()).get("mlp", layer)
    linear = {name for name, child in attention.named_children() if isinstance(child, nn.Linear)}
    if found != _PARTS or not set(WIDE) <= linear or not {name for name, _ in mlp.named_children()} >= _MLP:
        raise ValueError(
            f"target model_type {model_type!r}: expected a decoder layer of {sorted(_PARTS)} with {', '.join(WIDE)} and a gated MLP, as "
            f"Llama's, found {sorted(found)}; head=eagle3 is built from such a layer: choose head=mtp or head=eagle for this target"
        )
