"""The head over pairs (hidden, next token) that ``mtp`` and ``eagle`` share; they differ in its switches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from mtp_train.batch.shift import loss_rows, read_tokens, rotary_positions
from mtp_train.head.base import Drafted, Head
from mtp_train.nn.attention import AttentionContext, DraftContext
from mtp_train.nn.experts import stack_experts
from mtp_train.nn.layer import DecoderLayer, layer_parts, read_config, silence_branches
from mtp_train.nn.least_squares import RIDGE, LeastSquares, before_norm
from mtp_train.records import Batch
from mtp_train.target.weights import SharedWeights, read_layer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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


class PairBlock(nn.Module):
    """Projection of the pair (state, embedding), one decoder layer, an output norm; ``PairHead`` says what the switches mean."""

    def __init__(self, *, config: PreTrainedConfig, norms: Mapping[str, bool], column_order: ColumnOrder, bias: bool) -> None:
        super().__init__()
        self.hidden_first, self.feeds_normed = column_order == "hidden_embed", norms["feedback"]
        size, norm = config.hidden_size, layer_parts(config).norm
        self.embed_norm = norm(size, eps=config.rms_norm_eps) if norms["embed"] else nn.Identity()
        self.hidden_norm = norm(size, eps=config.rms_norm_eps) if norms["hidden"] else nn.Identity()
        self.projection = nn.Linear(2 * size, size, bias=bias)
        self.decoder = DecoderLayer(config=config, input_norm=norms["input"])
        self.output_norm = norm(size, eps=config.rms_norm_eps) if norms["output"] else nn.Identity()

    def pair(self, embed_TD: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        """What the projection reads, (T, 2 D)."""
        embed_TD, hidden_TD = self.embed_norm(embed_TD), self.hidden_norm(hidden_TD)
        return torch.cat((hidden_TD, embed_TD) if self.hidden_first else (embed_TD, hidden_TD), dim=-1)

    def draft(self, pair_TE: torch.Tensor, *, position_T: torch.Tensor, context: AttentionContext) -> Drafted:
        raw_TD = self.decoder(self.projection(pair_TE), position_T=position_T, context=context)
        out_TD = self.output_norm(raw_TD)
        return Drafted(out_TD, out_TD if self.feeds_normed else raw_TD)

    def row_wise(self) -> list[nn.Module]:
        return [self.embed_norm, self.hidden_norm, self.output_norm, *self.decoder.row_wise()]


class PairHead(Head):
    """Projection of the pair (h_i, embed(x_{i+1})), one decoder layer of the target's architecture, an output norm.

    ``num_blocks`` 1: one such block drafts at every depth, from its own states, and its rows of all depths lie in one KV cache.
    More: block k drafts at depth k, reads what block k - 1 made of the same base, and attends to its own rows of that depth
    alone, causally over the bases (DeepSeek-V3 report, section 2.2); the last block serves the depths beyond, as a single one
    does all. The same rows when drafting: each token that is read goes through every block whose base is known by then.
    ``norms`` switches each RMSNorm: ``embed`` and ``hidden`` on the inputs of the projection, ``input`` of the decoder
    layer, ``output`` before the lm_head, and ``feedback``: whether the state fed to the next depth is the one after the
    output norm. All on is DeepSeek-V3's MTP module (equations 21-23); all off is EAGLE-1 (Li et al. 2024, section 3).
    ``column_order`` says which input comes first in the projection's columns, ``projection_bias`` whether it has a bias, as EAGLE-1's
    published heads do; one begins at 0. ``zero_first_embedding`` zeroes the
    embedding that base 0 of a sequence reads, before its norm and in every block, as the engines' MTP classes do.
    ``init``: ``random`` (normal with the target's initializer_range), ``target_last_layer`` (the decoder layer's weights
    are copied from the target's last one), or ``least_squares``: the layer's two branches begin silent, and the projection
    alone as the linear map from the pair to the target's next hidden state that fits the training data best. The output
    norm starts from the target's final norm in all, since the lm_head was trained behind it. Every block begins so.
    """

    projection: nn.Linear
    decoder: DecoderLayer
    embed_norm: nn.Module
    hidden_norm: nn.Module
    output_norm: nn.Module

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
        num_blocks: int = 1,  # these two: what a head.json means that was written before there were others
        projection_bias: bool = False,
    ) -> None:
        super().__init__(shared=shared)
        if column_order not in ("hidden_embed", "embed_hidden"):
            raise ValueError(f"head.column_order: expected hidden_embed or embed_hidden, found {column_order!r}")
        if init not in get_args(Init):
            raise ValueError(f"head.init: expected one of {get_args(Init)}, found {init!r}")
        if num_blocks < 1:
            raise ValueError(f"head.num_blocks: expected at least 1, found {num_blocks}")
        self.norms = check_norms(norms)
        self.column_order: ColumnOrder = column_order
        self.zero_first_embedding = zero_first_embedding
        self.init: Init = init
        self.seed = seed
        config = read_config(target_path, trust_remote_code=trust_remote_code)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            blocks = [
                PairBlock(config=config, norms=self.norms, column_order=column_order, bias=projection_bias) for _ in range(num_blocks)
            ]
            for name, part in blocks[0].named_children():  # the first block's parts are the head's own: their names have no prefix
                self.add_module(name, part)
            self.later_blocks = nn.ModuleList(blocks[1:])
            self._blocks = tuple(blocks)
            self._initialise(target_path, std=config.initializer_range, last_layer=config.num_hidden_layers - 1)

    def _initialise(self, target_path: Path, *, std: float, last_layer: int) -> None:
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=std)
        copied = {}
        if self.init == "target_last_layer":
            stacked = stack_experts(read_layer(target_path, last_layer))
            skipped = () if self.norms["input"] else ("input_layernorm.",)
            copied = {name: tensor.float() for name, tensor in stacked.items() if not name.startswith(skipped)}
        for block in self._blocks:
            if block.projection.bias is not None:
                nn.init.zeros_(block.projection.bias)
            if self.norms["output"]:
                block.output_norm.get_parameter("weight").data.copy_(self.shared.final_norm_weight_D)
            if self.init == "least_squares":
                silence_branches(block.decoder.layer)
            elif self.init == "target_last_layer":
                block.decoder.layer.load_state_dict(copied)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def row_wise(self) -> list[nn.Module]:
        return [part for block in self._blocks for part in block.row_wise()]

    def feed_forward(self) -> list[nn.Module]:
        return self.decoder.feed_forward() if self.num_blocks == 1 else []

    def settings(self) -> dict[str, Any]:
        return {
            **({"num_blocks": self.num_blocks} if self.num_blocks > 1 else {}),
            **({"projection_bias": True} if self.projection.bias is not None else {}),
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
        """Fit each block's projection, one after the other: what block k makes of the pair at base i, where those before it are
        as they were fitted, should be, up to the output norm, h_{i+1+k}."""
        for number, block in enumerate(self._blocks):
            weight_DE = block.projection.weight
            system = LeastSquares(num_inputs=weight_DE.shape[1], num_outputs=weight_DE.shape[0], device=weight_DE.device)
            for batch in batches:
                rows = loss_rows(batch, ahead=number + 2)
                token_ids_T, position_T = read_tokens(batch, depth=number), rotary_positions(batch, depth=number)
                pair_TE = self._pair(token_ids_T, self._state_before(batch, number), position_T, number=number)
                wanted_MD = batch.hidden_TD[rows.teacher_M].to(weight_DE.dtype)
                system.add(pair_TE[rows.base_M], self._before_output_norm(block, wanted_MD))
            weight_DE.data.copy_(system.solve(ridge=RIDGE))

    def _state_before(self, batch: Batch, number: int) -> torch.Tensor:
        """What block ``number`` reads of each base in place of the target's hidden state."""
        states = (drafted.feedback_TD for _, drafted in self.drafted(batch))
        return batch.hidden_TD if number == 0 else next(itertools.islice(states, number - 1, None))

    def _before_output_norm(self, block: PairBlock, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Rows that the output norm turns into ``hidden_MD``."""
        if not self.norms["output"]:
            return hidden_MD
        return before_norm(hidden_MD, weight_D=block.output_norm.get_parameter("weight"), eps=self.shared.rms_norm_eps)

    def _pair(self, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor, *, number: int) -> torch.Tensor:
        """What the projection of block ``number`` reads, (T, 2 D); base 0 of a sequence has position ``number`` there."""
        block = self._blocks[number]
        dtype = block.projection.weight.dtype
        embed_TD = self.embed(token_ids_T).to(dtype)
        if self.zero_first_embedding:
            embed_TD = embed_TD.masked_fill((position_T == number)[:, None], 0.0)
        return block.pair(embed_TD, hidden_TD.to(dtype))

    def draft(self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor, context: DraftContext) -> Drafted:
        def through(number: int, state_TD: torch.Tensor) -> Drafted:
            pair_TE = self._pair(token_ids_T, state_TD, position_T, number=number)
            return self._blocks[number].draft(pair_TE, position_T=position_T, context=context.block(number))

        number = min(context.depth, self.num_blocks - 1)
        drafted = through(number, hidden_TD)
        state_TD = drafted.feedback_TD
        for later in range(number + 1, self.num_blocks):
            before_TD = context.states_before(later - 1, state_TD)
            if before_TD is None:
                break
            state_TD = through(later, before_TD).feedback_TD
        return drafted
