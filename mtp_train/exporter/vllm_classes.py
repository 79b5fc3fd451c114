"""Which class of vLLM computes which graph: the table that an export is chosen by, as read from vLLM 0.32.0's sources.

Every class reads (embed(x_{i+1}), the target's post-norm h_i) at rotary position i, has one decoder layer with the norm
after attention always in place, and shares the target's embedding and lm_head when the checkpoint holds none. They differ
in the norms, in whether the embedding is zeroed at position 0, in the projection's column order, and in what their
decoder layer can hold. ``load_weights`` of most skips unknown tensors without a word: a head exported to the wrong row
loads and serves other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mtp_train.exporter.base import Rename
from mtp_train.exporter.eagle3 import EAGLE3_TABLE

LAYER_TENSORS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
)
_QKV_BIAS = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
_O_BIAS = ("self_attn.o_proj.bias",)
_MLP_BIAS = ("mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias")
_QK_NORM = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")

# What vLLM 0.32 does with num_nextn_predict_layers above 1. Its first runner calls every draft step with the first block, whatever
# the class (llm_base_proposer.py passes no spec_step_idx; step3p5.py alone does). Its second takes block k at step k, over all
# tokens (multi_module_mtp/speculator.py): our graph, but for the steps beyond the blocks, where deepseek_mtp.py begins again with
# the first. MiMoMTP, by which we serve such heads of one block, asserts that the step is 0 (mimo_mtp.py).
MORE_BLOCKS = "MiMoMTP, vLLM's class for this layer, asserts that every draft step is the first, or is called for the first block alone"

LayerKind = Literal["qwen2", "llama", "minicpm", "eagle3", "eagle3_qwen3", "plugin"]


@dataclass(frozen=True, kw_only=True)
class VllmClass:
    """One row. ``norms`` and ``zero_first_embedding`` None: as the export's config says (the plugin, EAGLE-3).

    ``reads_target_config``: the class builds its layer from the *target's* config, which must be given
    ``num_nextn_predict_layers`` by an override. ``prefix`` stands before the head's tensors, ``layer_prefix`` before its
    decoder layer's. ``source``: the file under vllm/model_executor/models.
    """

    name: str
    source: str
    method: Literal["mtp", "eagle", "eagle3"]
    architecture: str
    model_type: str
    norms: Mapping[str, bool] | None
    zero_first_embedding: bool | None
    column_order: str
    layer: LayerKind
    reads_target_config: bool
    embed_norm: str | None
    hidden_norm: str | None
    projection: str
    output_norm: str | None
    layer_prefix: str

    def renames(self, *, tensors: frozenset[str]) -> list[Rename]:
        """One row per tensor of the head that this class reads; ours are head.safetensors' names."""
        if self.method == "eagle3":
            return list(EAGLE3_TABLE)
        table = [Rename("projection.weight", self.projection)]
        for ours, theirs in (
            ("embed_norm.weight", self.embed_norm),
            ("hidden_norm.weight", self.hidden_norm),
            ("output_norm.weight", self.output_norm),
        ):
            if theirs is not None:
                table.append(Rename(ours, theirs))
        names = [*LAYER_TENSORS, "input_layernorm.weight", *(name for name in self.optional if f"decoder.layer.{name}" in tensors)]
        return [*table, *(Rename(f"decoder.layer.{name}", self.layer_prefix + name) for name in names)]

    @property
    def optional(self) -> tuple[str, ...]:
        """Tensors of the decoder layer that some targets have and this class can hold."""
        return {
            "qwen2": _QKV_BIAS,
            "llama": (*_QKV_BIAS, *_O_BIAS, *_MLP_BIAS),
            "minicpm": (),
            "eagle3": (*_QKV_BIAS, *_O_BIAS, *_MLP_BIAS),
            "eagle3_qwen3": _QK_NORM,
            "plugin": (*_QKV_BIAS, *_O_BIAS, *_MLP_BIAS, *_QK_NORM),
        }[self.layer]

    def fillers(self, *, tensors: frozenset[str]) -> dict[str, float]:
        """Tensors that the class insists on where the head, whose names these are, has none, and the value to fill them with.

        Qwen2's layer has biases on q, k and v: left out, they stay uninitialised memory, and the head serves noise.
        MiniCPM's class has an output norm that it never calls, and refuses to load without it.
        EAGLE-3's has biases on all four projections of its attention or on none.
        """
        if self.layer == "minicpm":
            return {"model.norm.weight": 1.0}
        wanted: tuple[str, ...] = _QKV_BIAS if self.layer == "qwen2" else ()
        if self.layer == "eagle3" and any(f"decoder.layer.{name}" in tensors for name in (*_QKV_BIAS, *_O_BIAS)):
            wanted = (*_QKV_BIAS, *_O_BIAS)
        return {self.layer_prefix + name: 0.0 for name in wanted if f"decoder.layer.{name}" not in tensors}


def _norms(*on: str) -> dict[str, bool]:
    return {name: name in on for name in ("embed", "hidden", "input", "output", "feedback")}


CLASSES: tuple[VllmClass, ...] = (
    VllmClass(
        name="MiMoMTP",
        source="mimo_mtp.py",
        method="mtp",
        architecture="MiMoForCausalLM",
        model_type="qwen2",
        norms=_norms("embed", "hidden", "input", "output", "feedback"),
        zero_first_embedding=True,
        column_order="hidden_embed",
        layer="qwen2",
        reads_target_config=True,
        embed_norm="model.mtp_layers.0.token_layernorm.weight",
        hidden_norm="model.mtp_layers.0.hidden_layernorm.weight",
        projection="model.mtp_layers.0.input_proj.weight",
        output_norm="model.mtp_layers.0.final_layernorm.weight",
        layer_prefix="model.mtp_layers.0.",
    ),
    VllmClass(
        name="ErnieMTP",
        source="ernie_mtp.py",
        method="mtp",
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        norms=_norms("embed", "hidden", "input"),
        zero_first_embedding=True,
        column_order="embed_hidden",
        layer="llama",
        reads_target_config=True,
        embed_norm="model.mtp_emb_norm.0.weight",
        hidden_norm="model.mtp_hidden_norm.0.weight",
        projection="model.mtp_linear_proj.0.weight",
        output_norm=None,
        layer_prefix="model.mtp_block.0.",
    ),
    VllmClass(
        name="EagleMiniCPMForCausalLM",
        source="minicpm_eagle.py",
        method="eagle",
        architecture="EagleMiniCPMForCausalLM",
        model_type="llama",
        norms=_norms("embed", "hidden", "input"),
        zero_first_embedding=False,
        column_order="embed_hidden",
        layer="minicpm",
        reads_target_config=False,
        embed_norm="model.input_norm1.weight",
        hidden_norm="model.input_norm2.weight",
        projection="model.fc.weight",
        output_norm=None,
        layer_prefix="model.eagle_layers.0.",
    ),
    VllmClass(
        name="EagleMistralForCausalLM",
        source="mistral_eagle.py",
        method="eagle",
        architecture="EagleMistralForCausalLM",
        model_type="llama",
        norms=_norms("input", "output", "feedback"),
        zero_first_embedding=False,
        column_order="embed_hidden",
        layer="llama",
        reads_target_config=False,
        embed_norm=None,
        hidden_norm=None,
        projection="model.fc.weight",
        output_norm="model.norm.weight",
        layer_prefix="model.layers.0.",
    ),
    VllmClass(
        name="EagleLlamaForCausalLM",
        source="llama_eagle.py",
        method="eagle",
        architecture="EagleLlamaForCausalLM",
        model_type="llama",
        norms=_norms(),
        zero_first_embedding=False,
        column_order="embed_hidden",
        layer="llama",
        reads_target_config=False,
        embed_norm=None,
        hidden_norm=None,
        # This class puts "model." before the names itself.
        projection="fc.weight",
        output_norm=None,
        layer_prefix="layers.0.",
    ),
)

# EAGLE-3 (vLLM 0.32, llama_eagle3.py): norms on embedding and state, the output norm and an lm_head of its own are always there;
# fc_norm, norm_output, the taps and d2t are as config.json and the weights say.
EAGLE3 = VllmClass(
    name="Eagle3LlamaForCausalLM",
    source="llama_eagle3.py",
    method="eagle3",
    architecture="LlamaForCausalLMEagle3",
    model_type="llama",
    norms=None,
    zero_first_embedding=False,
    column_order="embed_hidden",
    layer="eagle3",
    reads_target_config=False,
    embed_norm="layers.0.input_layernorm.weight",
    hidden_norm="layers.0.hidden_norm.weight",
    projection="fc.weight",
    output_norm="norm.weight",
    # This class puts "model." before the names itself.
    layer_prefix="layers.0.",
)

# The same with norms on queries and keys, for targets of the Qwen3 family (qwen3_eagle3.py).
EAGLE3_QWEN3 = replace(
    EAGLE3,
    name="Eagle3Qwen3ForCausalLM",
    source="qwen3_eagle3.py",
    architecture="Eagle3Qwen3ForCausalLM",
    model_type="qwen3",
    layer="eagle3_qwen3",
)

# Ours (engine/vllm_plugin.py): any mixture of the switches, where no stock class has it.
PLUGIN = VllmClass(
    name="EagleMtpTrainForCausalLM",
    source="mtp_train/engine/vllm_plugin_model.py",
    method="eagle",
    architecture="EagleMtpTrainForCausalLM",
    model_type="llama",
    norms=None,
    zero_first_embedding=None,
    column_order="embed_hidden",
    layer="plugin",
    reads_target_config=False,
    embed_norm="model.embed_norm.weight",
    hidden_norm="model.hidden_norm.weight",
    projection="model.fc.weight",
    output_norm="model.norm.weight",
    layer_prefix="model.layers.0.",
)
