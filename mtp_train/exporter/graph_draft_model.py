"""A draft model's graph: transformers' own causal LM, eager, one whole sample at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from mtp_train.exporter.draft_model import STATED
from mtp_train.exporter.graph import Graph, GraphStep
from mtp_train.target.weights import EMBEDDING, LM_HEAD, SharedWeights


class DraftModelGraph(Graph):
    """What the model says of each token from those before it; the target's hidden states are not read. Logits are over the target's
    vocabulary, -inf for what is never drafted.

    Tensors: model.* and, where the config does not tie it to the embedding, lm_head.
    """

    def __init__(self, *, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shared: SharedWeights) -> None:
        self._num_drafted: int = config[STATED]["num_drafted"]
        super().__init__(config=config, tensors=tensors, shared=shared)

    def _modules(self, config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
        from transformers import AutoConfig, AutoModelForCausalLM

        given = {key: value for key, value in config.items() if key not in (STATED, "dtype")}
        kind = AutoConfig.for_model(given.pop("model_type"), **given)
        whole = AutoModelForCausalLM.from_config(kind, attn_implementation="eager", dtype=torch.float32)
        tied = bool(kind.tie_word_embeddings)
        return {"model": whole.base_model, **({} if tied else {"lm_head": whole.get_output_embeddings()})}

    @torch.no_grad()
    def unroll(
        self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, num_depths: int, taps_TLD: torch.Tensor | None = None
    ) -> Iterator[GraphStep]:
        weights = dict(self.modules.named_parameters())
        model: Any = self.modules["model"]
        read_1T = token_ids_T.clamp(max=self._num_drafted - 1)[None]
        own_TD = model(input_ids=read_1T, use_cache=False).last_hidden_state[0]
        logits_TU = functional.linear(own_TD, weights.get(LM_HEAD, weights[EMBEDDING]))
        logits_TV = torch.full((own_TD.shape[0], self.shared.lm_head_VD.shape[0]), float("-inf"))
        logits_TV[:, : self._num_drafted] = logits_TU[:, : self._num_drafted]
        for depth in range(num_depths):
            # Behind the token that base t reads at this depth: row t + 1 + depth. What rolls in at the end means nothing.
            yield GraphStep(own_TD.roll(-1 - depth, 0), logits_TV.roll(-1 - depth, 0))
