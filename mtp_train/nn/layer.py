"""The target architecture's own decoder layer, rotary embedding and norm, reached through transformers."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mtp_train.nn import attention, experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LayerParts(NamedTuple):
    """Classes of one architecture's module in transformers."""

    layer: type[nn.Module]
    rotary: type[nn.Module]
    norm: type[nn.Module]


def read_config(path: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The target's config, set to attend through ``nn/attention.py``; nothing but config.json is read."""
    from transformers import AutoConfig

    config = copy.deepcopy(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    return use_context_attention(config)


def use_context_attention(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set a config to ``nn/attention.py`` and ``nn/experts.py``, in place."""
    attention.register()
    experts.register()
    config._attn_implementation = attention.ATTENTION
    config._experts_implementation = experts.EXPERTS
    return config


def layer_parts(config: PreTrainedConfig) -> LayerParts:
    """Find the layer classes of a config's architecture.

    Errors: ValueError where transformers knows no causal LM for it, or its module is not built of a decoder layer, a
    rotary embedding and an RMSNorm as Llama's is.
    """
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ValueError(f"target model_type: expected one that transformers has a causal LM for, found {config.model_type!r}")
    module = sys.modules[mapping[type(config)].__module__]

    def find(suffix: str) -> type[nn.Module]:
        found: list[type[nn.Module]] = [
            value
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, nn.Module) and name.endswith(suffix) and value.__module__ == module.__name__
        ]
        if not found:
            raise ValueError(
                f"target model_type {config.model_type!r}: expected a class named *{suffix} in {module.__name__}, found none; "
                "heads are built from a Llama-shaped decoder layer"
            )
        return min(found, key=lambda value: len(value.__name__))

    return LayerParts(find("DecoderLayer"), find("RotaryEmbedding"), find("RMSNorm"))


def silence_branches(layer: nn.Module) -> None:
    """Zero what writes into the residual stream, in place, so that the layer begins as the identity: the attention's output
    projection and the MLP's (every expert's) down projection. Their gradients are not zero, so that they learn from the
    first step (Goyal et al. 2017, section 5.1, for residual networks).

    Errors: ValueError where the layer has none under these names, which all Llama-shaped ones in transformers share.
    """
    written = {name: parameter for name, parameter in layer.named_parameters() if {"o_proj", "down_proj"} & set(name.split("."))}
    if not all(any(word in name.split(".") for name in written) for word in ("o_proj", "down_proj")):
        raise ValueError(
            f"head.init: expected a decoder layer with o_proj and down_proj, found {type(layer).__name__} with {sorted(written)}; "
            "choose head.init=random"
        )
    for parameter in written.values():
        nn.init.zeros_(parameter)


class DecoderLayer(nn.Module):
    """One decoder layer of the target's architecture with its rotary embedding, over tokens on one axis.

    The layer is built with the target's last layer index, which decides dense or MoE, full or sliding attention.
    ``input_norm=False`` takes its input norm away, as EAGLE-1 does (Li et al. 2024; official implementation).
    """

    def __init__(self, *, config: PreTrainedConfig, input_norm: bool) -> None:
        super().__init__()
        parts = layer_parts(config)
        self.layer = parts.layer(config, config.num_hidden_layers - 1)
        if not input_norm:
            self.layer.input_layernorm = nn.Identity()
        # Found now: where ZeRO shares parameters out, they have no shape later.
        self._feed_forward = [
            name
            for name, part in self.layer.named_children()
            if name != "self_attn" and any(parameter.ndim >= 2 for parameter in part.parameters())
        ]
        # Holds no parameters; kept out of the state dict as transformers keeps its buffers.
        self.rotary = parts.rotary(config=config)

    def row_wise(self) -> list[nn.Module]:
        """The layer's parts but attention, the only one in which a row sees others."""
        return [part for name, part in self.layer.named_children() if name != "self_attn"]

    def feed_forward(self) -> list[nn.Module]:
        """Its parts with matrices that treat each row by itself."""
        return [self.layer.get_submodule(name) for name in self._feed_forward]

    def forward(self, hidden_TD: torch.Tensor, *, position_T: torch.Tensor, context: Any) -> torch.Tensor:
        position_1T = position_T[None]
        # Cosines and sines, or the complex factors of DeepSeek-V2: between the rotary embedding and the layer, and not ours.
        rotation = self.rotary(hidden_TD[None], position_ids=position_1T)
        out = self.layer(
            hidden_TD[None],
            position_ids=position_1T,
            position_embeddings=rotation,
            attention_mask=None,
            use_cache=False,
            attention_context=context,
        )
        return (out[0] if isinstance(out, tuple) else out)[0]
