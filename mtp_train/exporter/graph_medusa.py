"""Medusa's graph in plain torch, under the tensor names of vLLM's class and of the published checkpoints that it converts to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from mtp_train.exporter.base import Rename
from mtp_train.exporter.graph import Graph, GraphStep
from mtp_train.target.weights import SharedWeights

LM_HEAD = "lm_head.weight"
MEDUSA_TABLE = (Rename("blocks.*", "blocks.*"), Rename("lm_heads.*", "lm_heads.*"))


class MedusaGraph(Graph):
    """Head k: x + x' sigmoid(x') of x' = W x, ``num_layers`` times over the target's hidden state, then an lm_head.

    Tensors: blocks.<k>.layers.<j>.weight, and lm_heads.<k>.weight (where ``own_lm_heads``) or lm_head.weight (where the config
    says that it ``ships_lm_head``); without either, the target's lm_head serves.
    """

    def __init__(self, *, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shared: SharedWeights) -> None:
        self._own_lm_heads: bool = config["own_lm_heads"]
        self.num_blocks: int = config["num_heads"]
        super().__init__(config=config, tensors=tensors, shared=shared)

    def _modules(self, config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
        vocab_size, size = self.shared.lm_head_VD.shape

        def block() -> torch.nn.Module:
            layers = [torch.nn.Linear(size, size, bias=False) for _ in range(config["num_layers"])]
            return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})

        modules: dict[str, torch.nn.Module] = {"blocks": torch.nn.ModuleList([block() for _ in range(self.num_blocks)])}
        if self._own_lm_heads:
            lm_heads = [torch.nn.Linear(size, vocab_size, bias=False) for _ in range(self.num_blocks)]
            modules["lm_heads"] = torch.nn.ModuleList(lm_heads)
        elif config.get("ships_lm_head"):
            modules["lm_head"] = torch.nn.Linear(size, vocab_size, bias=False)
        return modules

    @torch.no_grad()
    def unroll(
        self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, num_depths: int, taps_TLD: torch.Tensor | None = None
    ) -> Iterator[GraphStep]:
        weights = dict(self.modules.named_parameters())
        for number in range(min(num_depths, self.num_blocks)):
            out_TD = hidden_TD.float()
            for name in (name for name in weights if name.startswith(f"blocks.{number}.")):
                gate_TD = out_TD @ weights[name].T
                out_TD = out_TD + gate_TD * gate_TD.sigmoid()
            own = weights.get(f"lm_heads.{number}.weight", weights.get(LM_HEAD))
            yield GraphStep(out_TD, self._logits(out_TD) if own is None else functional.linear(out_TD, own))
