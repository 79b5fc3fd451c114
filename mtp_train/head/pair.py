"""The one-layer head over pairs (hidden, next token) that ``mtp`` and ``eagle`` share; they differ in its switches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from mtp_train.batch.shift import loss_rows, read_tokens
from mtp_train.head.base import Drafted, Head
from mtp_train.nn.attention import AttentionContext
from mtp_train.nn.experts import stack_experts
from mtp_train.nn.layer import DecoderLayer, layer_parts, read_config, silence_branches
from mtp_train.nn.least_squares import RIDGE, LeastSquares, before_norm
from mtp_train.records import Batch
from mtp_train.target.weights import SharedWeights, read_layer

NORMS = ("embed", "hidden", "input", "output", "feedback")
ColumnOrder = Literal["hidden_embed", "embed_hidden"]
Init = Literal["random", "target_last_layer", "least_squares"]


def check_norms(norms: Mapping[str, bool]) -> dict[str, bool]:
    """The five switches, complete and consistent; ValueError says which is missing, unknown or impossible."""
    if set(norms) != set(NORMS):
        raise ValueError(f"head.norms: expected exactly the switches {NORMS}, found {tuple(norms)}")
    if norms["feedback"] and not norms["output"]:
        raise ValueError("head.norms: feedback=true feeds back the state after the output norm, but output=false; set feedback=false")
    return {name: bool(norms[name]) for name in NORMS}


class PairHead(Head):
    """Projection of the pair (h_i, embed(x_{i+1})), one decoder layer of the target's architecture, an output norm.

    ``norms`` switches each RMSNorm: ``embed`` and ``hidden`` on the inputs of the projection, ``input`` of the decoder
    layer, ``output`` before the lm_head, and ``feedback``: whether the state fed to the next depth is the one after the
    output norm. All on is DeepSeek-V3's MTP module (DeepSeek-V3 report, section 2.2, equations 21-23); all off is
    EAGLE-1 (Li et al. 2024, section 3).
    ``column_order`` says which input comes first in the projection's columns. ``zero_first_embedding`` zeroes the
    embedding at position 0 of a sequence, before its norm, as the engines' MTP classes do.
    ``init``: ``random`` (normal with the target's initializer_range), ``target_last_layer`` (the decoder layer's weights
    are copied from the target's last one), or ``least_squares``: the layer's two branches begin silent, and the projection
    alone as the linear map from the pair to the target's next hidden state that fits the training data best. The output
    norm starts from the target's final norm in all, since the lm_head was trained behind it.
    """

    def __init__(
        self,
        *,
        target_path: Path,
        shared: SharedWeights,
        norms: Mapping[str, bool],
        column_order: ColumnOrder,
        zero_first_embedding: bool,
        init: Init,
        seed: int,
        trust_remote_code: bool,
    ) -> None:
        super().__init__(shared=shared)
        if column_order not in ("hidden_embed", "embed_hidden"):
            raise ValueError(f"head.column_order: expected hidden_embed or embed_hidden, found {column_order!r}")
        if init not in get_args(Init):
            raise ValueError(f"head.init: expected one of {get_args(Init)}, found {init!r}")
        self.norms = check_norms(norms)
        self.column_order: ColumnOrder = column_order
        self.zero_first_embedding = zero_first_embedding
        self.init: Init = init
        self.seed = seed
        config = read_config(target_path, trust_remote_code=trust_remote_code)
        size = config.hidden_size
        norm = layer_parts(config).norm
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed_norm = norm(size, eps=config.rms_norm_eps) if self.norms["embed"] else nn.Identity()
            self.hidden_norm = norm(size, eps=config.rms_norm_eps) if self.norms["hidden"] else nn.Identity()
            self.projection = nn.Linear(2 * size, size, bias=False)
            self.decoder = DecoderLayer(config=config, input_norm=self.norms["input"])
            self.output_norm = norm(size, eps=config.rms_norm_eps) if self.norms["output"] else nn.Identity()
            self._initialise(target_path, std=config.initializer_range, last_layer=config.num_hidden_layers - 1)

    def _initialise(self, target_path: Path, *, std: float, last_layer: int) -> None:
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=std)
        if self.norms["output"]:
            self.output_norm.get_parameter("weight").data.copy_(self.shared.final_norm_weight_D)
        if self.init == "least_squares":
            silence_branches(self.decoder.layer)
        elif self.init == "target_last_layer":
            tensors = stack_experts(read_layer(target_path, last_layer))
            if not self.norms["input"]:
                tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("input_layernorm.")}
            self.decoder.layer.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})

    def row_wise(self) -> list[nn.Module]:
        return [self.embed_norm, self.hidden_norm, self.output_norm, *self.decoder.row_wise()]

    def settings(self) -> dict[str, Any]:
        return {
            "norms": dict(self.norms),
            "column_order": self.column_order,
            "zero_first_embedding": self.zero_first_embedding,
            "init": self.init,
            "seed": self.seed,
        }

    @property
    def starts_from_data(self) -> bool:
        return self.init == "least_squares"

    def start(self, batches: Iterable[Batch]) -> None:
        """Fit the projection: what it makes of the pair at base i should be, up to the output norm, h_{i+1}."""
        weight_DE = self.projection.weight
        system = LeastSquares(num_inputs=weight_DE.shape[1], num_outputs=weight_DE.shape[0], device=weight_DE.device)
        for batch in batches:
            rows = loss_rows(batch, ahead=2)
            pair_TE = self._pair(read_tokens(batch, depth=0), batch.hidden_TD, batch.position_T)
            system.add(pair_TE[rows.base_M], self._before_output_norm(batch.hidden_TD[rows.teacher_M].to(weight_DE.dtype)))
        weight_DE.data.copy_(system.solve(ridge=RIDGE))

    def _before_output_norm(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Rows that the output norm turns into ``hidden_MD``."""
        if not self.norms["output"]:
            return hidden_MD
        return before_norm(hidden_MD, weight_D=self.output_norm.get_parameter("weight"), eps=self.shared.rms_norm_eps)

    def _pair(self, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        """What the projection reads, (T, 2 D)."""
        dtype = self.projection.weight.dtype
        embed_TD = self.embed(token_ids_T).to(dtype)
        if self.zero_first_embedding:
            embed_TD = embed_TD.masked_fill((position_T == 0)[:, None], 0.0)
        embed_TD, hidden_TD = self.embed_norm(embed_TD), self.hidden_norm(hidden_TD.to(dtype))
        return torch.cat((hidden_TD, embed_TD) if self.column_order == "hidden_embed" else (embed_TD, hidden_TD), dim=-1)

    def draft(self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor, context: AttentionContext) -> Drafted:
        pair_TE = self._pair(token_ids_T, hidden_TD, position_T)
        raw_TD = self.decoder(self.projection(pair_TE), position_T=position_T, context=context)
        out_TD = self.output_norm(raw_TD)
        return Drafted(out_TD, out_TD if self.norms["feedback"] else raw_TD)
