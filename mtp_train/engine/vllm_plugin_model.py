"""The draft head inside vLLM where no stock class has its mixture of norms: one class, switched by config.json.

Imported by vLLM only (``vllm_plugin.register``); it is built from vLLM's own layers, so that tensor parallelism,
quantization and compilation work as they do for the stock classes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, get_draft_quant_config, maybe_prefix


class _LlamaLayer(LlamaDecoderLayer):
    """Llama's layer, quantized as the draft is and not as the target."""

    def get_quant_config(self, vllm_config: VllmConfig):  # type: ignore[no-untyped-def]
        return get_draft_quant_config(vllm_config)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "hidden_states": 0})
class _MtpTrainModel(nn.Module):
    """The graph of ``head/pair.py``; ``config.mtp_train`` holds its switches."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", start_layer_id: int = 0) -> None:
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        switches = config.mtp_train
        norms = switches["norms"]
        self.zero_first_embedding: bool = switches["zero_first_embedding"]
        self.feedback_post_norm: bool = norms["feedback"]
        size, eps = config.hidden_size, config.rms_norm_eps
        quant_config = get_draft_quant_config(vllm_config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, prefix=maybe_prefix(prefix, "embed_tokens"))
        self.embed_norm = RMSNorm(size, eps=eps) if norms["embed"] else nn.Identity()
        self.hidden_norm = RMSNorm(size, eps=eps) if norms["hidden"] else nn.Identity()
        self.fc = ReplicatedLinear(
            2 * size,
            size,
            bias=False,
            params_dtype=vllm_config.model_config.dtype,
            quant_config=quant_config,
            prefix=maybe_prefix(prefix, "fc"),
            return_bias=False,
        )
        layer_prefix = maybe_prefix(prefix, f"layers.{start_layer_id}")
        if switches["qk_norm"]:
            layer: nn.Module = Qwen3DecoderLayer(config, vllm_config.cache_config, quant_config, layer_prefix)
        else:
            layer = _LlamaLayer(vllm_config, prefix=layer_prefix, config=config)
        if not norms["input"]:
            layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(size, eps=eps) if norms["output"] else nn.Identity()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embeds = self.embed_tokens(input_ids)
        if self.zero_first_embedding:
            embeds = torch.where(positions.unsqueeze(-1) == 0, 0, embeds)
        pair = torch.cat((self.embed_norm(embeds), self.hidden_norm(hidden_states)), dim=-1)
        mlp_out, residual = self.layers[0](positions, self.fc(pair), None)
        raw = mlp_out + residual
        out = self.norm(raw)
        return out, out if self.feedback_post_norm else raw


class EagleMtpTrainForCausalLM(nn.Module):
    """vLLM's view of the head: returns (what the lm_head reads, what the next depth reads).

    It has no ``has_own_embed_tokens``, so vLLM always shares the target's embedding and lm_head with it.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        num_target_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.model = _MtpTrainModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), start_layer_id=num_target_layers)
        self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if inputs_embeds is not None:
            raise NotImplementedError(f"{type(self).__name__} drafts for text only")
        return self.model(input_ids, positions, hidden_states)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load, and insist on exactly the tensors of the graph: the stock classes skip unknown ones without a word."""
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=_MtpTrainModel.hf_to_vllm_mapper)
        shared = {"model.embed_tokens.weight", "lm_head.weight"}
        missing = {name for name, _ in self.named_parameters()} - loaded - shared
        if missing:
            raise ValueError(f"draft head: expected the tensors {sorted(missing)} in its folder, found none; export it again")
        return loaded | shared
