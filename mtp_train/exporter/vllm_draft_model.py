"""A draft model as vLLM's method ``draft_model`` loads it: the causal LM itself, its vocabulary brought to the target's size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtp_train.exporter.base import Source, rename
from mtp_train.exporter.draft_model import DRAFT_MODEL_TABLE, causal_lm_config, with_padding
from mtp_train.exporter.graph import Graph
from mtp_train.exporter.graph_draft_model import DraftModelGraph
from mtp_train.exporter.vllm_choice import FAMILIES
from mtp_train.exporter.vllm_form import Form
from mtp_train.target.weights import read_shared


class DraftModelForm(Form):
    """The model as a causal LM. vLLM refuses one whose vocabulary is not as large as the target's.

    Errors: ValueError for an architecture that was not compared with vLLM's.
    """

    def __init__(self, source: Source) -> None:
        config = causal_lm_config(source, dtype="float32")
        if config["model_type"] not in FAMILIES:
            raise ValueError(
                f"exporter=vllm: expected a draft model of model_type {', '.join(FAMILIES)}, found {config['model_type']!r}; "
                "decode with engine=hf, or export with exporter=hf"
            )
        super().__init__(source, method="draft_model", class_name=config["architectures"][0], module=f"{config['model_type']}.py")

    @property
    def not_shipped(self) -> str:
        return "The model is whole; its token ids are the target's, and so is its tokenizer, which is not in this folder."

    def tensors(self, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        named = rename(self.source.tensors, DRAFT_MODEL_TABLE)
        padded = with_padding(named, vocab_size=int(self.source.target_config["vocab_size"]))
        return {name: tensor.to(dtype).contiguous() for name, tensor in padded.items()}

    def config(self, *, dtype: str) -> dict[str, Any]:
        return {**causal_lm_config(self.source, dtype=dtype), "vocab_size": int(self.source.target_config["vocab_size"])}

    def graph(self, read: Mapping[str, torch.Tensor]) -> tuple[Graph, dict[str, torch.Tensor]]:
        shared = read_shared(self.source.target_path)
        return DraftModelGraph(config=self.config(dtype="float32"), tensors=read, shared=shared), dict(read)
