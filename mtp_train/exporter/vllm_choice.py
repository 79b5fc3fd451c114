"""Chooses the class of vLLM that computes exactly a head's graph, or says why none does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_train.exporter.vllm_classes import CLASSES, EAGLE3, EAGLE3_QWEN3, LAYER_TENSORS, PLUGIN, VllmClass

# Families whose decoder layer, rotary embedding and norms are Llama's, in transformers and in vLLM.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def choose_class(
    *, norms: Mapping[str, bool], zero_first_embedding: bool, tensors: frozenset[str], target: Any, allow_plugin: bool
) -> VllmClass:
    """The class that computes exactly this graph: a stock one where there is one, else the plugin.

    ``target`` is the target's config (transformers'), ``tensors`` the names in head.safetensors.
    Errors: ValueError where none computes it, or only the plugin and it isn't allowed; the message says why each stock
    class that has the norms doesn't fit.
    """
    refusal = _family_refusal(target)
    if refusal is not None:
        raise ValueError(f"exporter=vllm: {refusal}; no class of vLLM, and not our plugin, computes such a head")
    reasons = []
    for row in CLASSES:
        if dict(row.norms or {}) != dict(norms) or row.zero_first_embedding != zero_first_embedding:
            continue
        reason = _layer_refusal(row, tensors=tensors, target=target)
        if reason is None:
            return row
        reasons.append(f"{row.name} {reason}")
    switches = ", ".join(f"{name}={str(value).lower()}" for name, value in norms.items())
    why = "; ".join(reasons) or f"no stock class has norms {switches} with zero_first_embedding={str(zero_first_embedding).lower()}"
    reason = _layer_refusal(PLUGIN, tensors=tensors, target=target)
    if reason is not None:
        raise ValueError(f"exporter=vllm: {why}; and the plugin {reason}")
    if not allow_plugin:
        raise ValueError(
            f"exporter=vllm: {why}; only our plugin computes this head: "
            "set exporter.allow_plugin=true and install mtp-train where vLLM runs"
        )
    return PLUGIN


def _family_refusal(target: Any) -> str | None:
    if target.model_type not in FAMILIES:
        return f"expected a target of model_type {', '.join(FAMILIES)}, found {target.model_type!r}"
    if target.hidden_act != "silu":
        return f"expected hidden_act silu, found {target.hidden_act!r}"
    settings = target.to_dict()
    kinds = settings.get("layer_types")
    slides = kinds[-1] == "sliding_attention" if kinds else settings.get("sliding_window") is not None
    if slides:
        return "expected a head whose layer attends to the whole context, found one with a sliding window"
    return None


def _layer_refusal(row: VllmClass, *, tensors: frozenset[str], target: Any) -> str | None:
    """Why this class's decoder layer cannot be the head's; None where it can."""
    held = {f"decoder.layer.{name}" for name in (*LAYER_TENSORS, "input_layernorm.weight", *row.optional)}
    extra = sorted(name for name in tensors if name.startswith("decoder.layer.") and name not in held)
    if extra:
        return f"does not read {extra}"
    head_size = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    if row.layer in ("qwen2", "minicpm") and head_size * target.num_attention_heads != target.hidden_size:
        return f"needs heads of hidden_size / num_attention_heads, the target's are of size {head_size}"
    if row.name == "ErnieMTP" and target.model_type not in ("llama", "mistral"):
        return f"builds a Llama layer from the target's config, which is of model_type {target.model_type}"
    return None


def choose_eagle3(*, tensors: frozenset[str], target: Any) -> VllmClass:
    """The class of EAGLE-3 heads: Qwen3's where the layer has norms on queries and keys, else Llama's.

    Errors: ValueError where the target's family, or the head's layer, is none that it computes.
    """
    row = EAGLE3_QWEN3 if "decoder.layer.self_attn.q_norm.weight" in tensors else EAGLE3
    refusal = _family_refusal(target) or _layer_refusal(row, tensors=tensors, target=target)
    if refusal is not None:
        raise ValueError(f"exporter=vllm: {row.name}: {refusal}; no class of vLLM, and not our plugin, computes such a head")
    return row
