"""Medusa heads as vLLM's class ``Medusa`` reads them (vLLM 0.32, medusa.py): blocks and lm_heads, none of them the target's.

The class takes nothing from the target but its hidden state, so that the target's lm_head is shipped where the heads speak
through it: once, which the class calls ``original_lm_head``. ``num_speculative_tokens`` replaces the number of heads in its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtp_train.exporter.base import Source, rename
from mtp_train.exporter.graph import Graph
from mtp_train.exporter.graph_medusa import LM_HEAD, MEDUSA_TABLE, MedusaGraph
from mtp_train.exporter.vllm_form import Form
from mtp_train.target.weights import read_shared


class MedusaForm(Form):
    """``Medusa`` with as many heads as were trained."""

    def __init__(self, source: Source) -> None:
        settings = source.head["settings"]
        self._num_heads, self._num_layers = settings["num_heads"], settings["num_layers"]
        self._own_lm_heads: bool = settings["own_lm_heads"]
        super().__init__(source, method="medusa", class_name="Medusa", module="medusa.py", max_speculative_tokens=self._num_heads)

    @property
    def not_shipped(self) -> str:
        if self._own_lm_heads:
            return "Each head has its own lm_head; nothing of the target is in this folder."
        return "The target's lm_head is in this folder too, since this class shares nothing."

    def tensors(self, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        tensors = rename(self.source.tensors, MEDUSA_TABLE)
        if not self._own_lm_heads:
            tensors[LM_HEAD] = read_shared(self.source.target_path).lm_head_VD
        return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}

    def config(self, *, dtype: str) -> dict[str, Any]:
        target = self.source.target_config
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target["hidden_size"],
            "vocab_size": target["vocab_size"],
            "truncated_vocab_size": target["vocab_size"],
            "num_heads": self._num_heads,
            "num_hidden_layers": self._num_layers,
            "medusa_fc_bias": False,
            "original_lm_head": not self._own_lm_heads,
            "dtype": dtype,
        }

    def graph(self, read: Mapping[str, torch.Tensor]) -> tuple[Graph, dict[str, torch.Tensor]]:
        config = {**self.source.head["settings"], "ships_lm_head": not self._own_lm_heads}
        return MedusaGraph(config=config, tensors=read, shared=read_shared(self.source.target_path)), dict(read)
