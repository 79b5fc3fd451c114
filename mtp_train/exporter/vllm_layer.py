"""Heads of one decoder layer as the classes of ``vllm_classes.py`` read them: names, fillers, column order, config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtp_train.exporter.base import Source, rename
from mtp_train.exporter.eagle3 import with_offsets
from mtp_train.exporter.graph import Graph, PairGraph
from mtp_train.exporter.graph_eagle3 import Eagle3Graph
from mtp_train.exporter.vllm_choice import choose_class, choose_eagle3
from mtp_train.exporter.vllm_classes import VllmClass
from mtp_train.exporter.vllm_form import Form
from mtp_train.target.spec import vllm_layer_id
from mtp_train.target.weights import read_shared

# Settings of a decoder layer that a draft's own config.json must repeat from the target's.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
)


class LayerForm(Form):
    """A head of method mtp, eagle or eagle3, as the one class that computes exactly its graph."""

    def __init__(self, source: Source, *, allow_plugin: bool, trust_remote_code: bool) -> None:
        from transformers import AutoConfig

        target = AutoConfig.from_pretrained(source.target_path, trust_remote_code=trust_remote_code)
        settings, names = source.head["settings"], frozenset(source.tensors)
        if source.head["method"] == "eagle3":
            row = choose_eagle3(tensors=names, target=target)
        else:
            row = choose_class(
                norms=settings["norms"],
                zero_first_embedding=settings["zero_first_embedding"],
                tensors=names,
                target=target,
                allow_plugin=allow_plugin,
            )
        self.row, self._trust_remote_code = row, trust_remote_code
        super().__init__(
            source,
            method=row.method,
            class_name=row.name,
            module=row.source,
            hf_overrides={"num_nextn_predict_layers": 1} if row.reads_target_config else None,
            plugin="mtp-train" if row.layer == "plugin" else None,
        )

    @property
    def not_shipped(self) -> str:
        if self.row.method == "eagle3":
            return "The embedding is the target's own and is not in this folder."
        return "Embedding and lm_head are the target's own and are not in this folder."

    def tensors(self, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return served_tensors(self.source, self.row, dtype=dtype)

    def config(self, *, dtype: str) -> dict[str, Any]:
        return served_config(self.source, self.row, dtype=dtype, trust_remote_code=self._trust_remote_code)

    def graph(self, read: Mapping[str, torch.Tensor]) -> tuple[Graph, dict[str, torch.Tensor]]:
        source, row = self.source, self.row
        settings, shared = source.head["settings"], read_shared(source.target_path)
        tensors = canonical(read, row, fillers=row.fillers(tensors=frozenset(source.tensors)))
        if row.method == "eagle3":
            config = {**settings, "target_config": source.target_config}
            return Eagle3Graph(config=config, tensors=tensors, shared=shared), tensors
        config = {
            "norms": row.norms or settings["norms"],
            "zero_first_embedding": settings["zero_first_embedding"] if row.zero_first_embedding is None else row.zero_first_embedding,
            "column_order": row.column_order,
            "target_config": source.target_config,
        }
        return PairGraph(config=config, tensors=tensors, shared=shared), tensors


def served_tensors(source: Source, row: VllmClass, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The head's tensors under the class's names, the projection's columns in its order, and what it insists on filled in.

    Errors: ValueError where a tensor of the head has no place in the class: it would be skipped without a word.
    """
    tensors = with_offsets(source)
    if row.method != "eagle3" and source.head["settings"]["column_order"] != row.column_order:
        first, second = tensors["projection.weight"].chunk(2, dim=1)
        tensors["projection.weight"] = torch.cat([second, first], dim=1)
    served = rename(tensors, row.renames(tensors=frozenset(tensors)))
    for name, value in row.fillers(tensors=frozenset(tensors)).items():
        size = served[name.removesuffix("bias") + "weight"].shape[0] if name.endswith("bias") else source.target_config["hidden_size"]
        served[name] = torch.full((size,), value)
    return {name: tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous() for name, tensor in served.items()}


def canonical(served: Mapping[str, torch.Tensor], row: VllmClass, *, fillers: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Served tensors under the names of ``exporter/graph.py``; what only the class wants is checked and left out. EAGLE-3's names
    are the same in both."""
    found: dict[str, torch.Tensor] = {}
    names = {
        row.projection: "fc.weight",
        row.embed_norm: "embed_norm.weight",
        row.hidden_norm: "hidden_norm.weight",
        row.output_norm: "norm.weight",
    }
    for name, tensor in served.items():
        if name in fillers and bool((tensor == fillers[name]).all()):
            continue
        found[name if row.method == "eagle3" else names.get(name) or "layers.0." + name.removeprefix(row.layer_prefix)] = tensor
    return found


def served_config(source: Source, row: VllmClass, *, dtype: str, trust_remote_code: bool) -> dict[str, Any]:
    """config.json: the class's architecture and, from the target, all that sizes the head's layer and its rotary embedding."""
    from transformers import AutoConfig

    target = AutoConfig.from_pretrained(source.target_path, trust_remote_code=trust_remote_code).to_dict()
    config = {name: target[name] for name in _SIZES if target.get(name) is not None}
    config |= {
        "architectures": [row.architecture],
        "model_type": row.model_type,
        "num_hidden_layers": 1,
        "head_dim": target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"],
        "tie_word_embeddings": bool(target.get("tie_word_embeddings", False)),
        "dtype": dtype,
    }
    layer = {name for name in source.tensors if name.endswith(".bias")}
    if row.method == "mtp":
        config["num_nextn_predict_layers"] = 1
    else:
        config["attention_bias"] = "decoder.layer.self_attn.o_proj.bias" in layer
        config["mlp_bias"] = "decoder.layer.mlp.down_proj.bias" in layer
        # vLLM's Llama layer takes biases on q, k and v alone by this key (Qwen2's layer).
        config["qkv_bias"] = "decoder.layer.self_attn.q_proj.bias" in layer
    if row.layer == "minicpm":
        # MiniCPM's own factors, each set to leave the value as it is.
        config |= {"scale_emb": 1, "scale_depth": 1, "mup_denominator": 1, "dim_model_base": target["hidden_size"]}
    settings = source.head["settings"]
    if row.method == "eagle3":
        layer_ids = [vllm_layer_id(i) for i in settings["target_layer_ids"]]
        attention = ("q_proj", "k_proj", "v_proj", "o_proj")
        config["attention_bias"] = any(f"decoder.layer.self_attn.{name}.bias" in layer for name in attention)
        config |= {
            "draft_vocab_size": settings["draft_vocab_size"] or target["vocab_size"],
            "fc_norm": settings["norms"]["taps"],
            "norm_output": settings["norms"]["feedback"],
            "eagle_config": {"use_aux_hidden_state": bool(layer_ids), "eagle_aux_hidden_state_layer_ids": layer_ids},
        }
        if layer_ids:
            config |= {"num_aux_hidden_states": len(layer_ids), "eagle_aux_hidden_state_layer_ids": layer_ids}
    if row.layer == "plugin":
        config["mtp_train"] = {
            "norms": settings["norms"],
            "zero_first_embedding": settings["zero_first_embedding"],
            "qk_norm": "decoder.layer.self_attn.q_norm.weight" in source.tensors,
        }
    return config
