"""``head=eagle3``: reads layers tapped low, middle and high, and speaks through an lm_head of its own (Li et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from mtp_train.batch.shift import loss_rows
from mtp_train.head.base import Drafted, Head
from mtp_train.nn.attention import AttentionContext
from mtp_train.nn.layer import layer_parts, read_config, silence_branches
from mtp_train.nn.least_squares import RIDGE, LeastSquares, before_norm
from mtp_train.nn.paired_layer import PairedLayer
from mtp_train.records import Batch
from mtp_train.target.draft_vocabulary import fingerprint
from mtp_train.target.spec import default_tap_ids
from mtp_train.target.weights import SharedWeights, read_layer

NORMS = ("taps", "feedback")
Init = Literal["random", "target_last_layer", "least_squares"]


class Eagle3(Head):
    """A fused state of tapped layers, one decoder layer over pairs (embed(x_{i+1}), state), an output norm, an lm_head.

    ``target_layer_ids``: the taps, joined and projected to one state by ``fusion``; None takes the engines' default, low,
    middle and high; empty reads the target's post-norm hidden state instead, without a projection.
    ``draft_vocab_size``: U tokens that the lm_head speaks about, chosen by ``use_draft_ids`` before training; None: all V.
    ``norms``: ``taps`` puts an RMSNorm on each tap before the projection, ``feedback`` feeds the state after the output norm
    to the next depth. Both on is EAGLE-3.1 (the engines' ``fc_norm`` and ``norm_output``; arXiv 2605.09992), both off EAGLE-3
    (arXiv 2503.01840). The norms on embedding and state, inside the layer, and the output norm are always there.
    ``init``: ``random`` (normal with the target's initializer_range), ``target_last_layer`` (the state begins as the last tap and
    the layer as the target's last one), or ``least_squares``: the layer's two branches begin silent, and the projection as the
    linear map from the taps to the target's next hidden state that fits the training data best. Output norm and lm_head start
    from the target's own in all.
    """

    word = "eagle3"
    method = "eagle3"

    def __init__(
        self,
        *,
        target_path: Path,
        shared: SharedWeights,
        target_layer_ids: Sequence[int] | None,
        draft_vocab_size: int | None,
        norms: Mapping[str, bool],
        init: Init,
        seed: int,
        trust_remote_code: bool,
    ) -> None:
        super().__init__(shared=shared)
        if init not in get_args(Init):
            raise ValueError(f"head.init: expected one of {get_args(Init)}, found {init!r}")
        config = read_config(target_path, trust_remote_code=trust_remote_code)
        num_layers, size = config.num_hidden_layers, config.hidden_size
        self._layer_ids = default_tap_ids(num_layers) if target_layer_ids is None else tuple(target_layer_ids)
        self.norms = _check(norms, layer_ids=self._layer_ids, num_layers=num_layers)
        if init == "least_squares" and not self._layer_ids:
            raise ValueError(
                "head.init: expected random or target_last_layer where no layer is tapped, found least_squares, which fits the taps"
            )
        self.init: Init = init
        self.seed = seed
        norm = layer_parts(config).norm
        num_taps, vocab_size = len(self._layer_ids), shared.embedding_VD.shape[0]
        if draft_vocab_size is not None and not 2 <= draft_vocab_size < vocab_size:
            raise ValueError(
                f"head.draft_vocab_size: expected 2 to {vocab_size - 1}, or null for all {vocab_size} tokens, found {draft_vocab_size}"
            )
        num_drafted = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.draft_ids: torch.Tensor | None
        self.register_buffer("draft_ids", None if draft_vocab_size is None else torch.arange(draft_vocab_size))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tap_norms = nn.ModuleList([norm(size, eps=config.rms_norm_eps) for _ in range(num_taps if self.norms["taps"] else 0)])
            self.fusion = nn.Linear(num_taps * size, size, bias=False) if num_taps else None
            self.decoder = PairedLayer(config=config)
            self.output_norm = norm(size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(size, num_drafted, bias=False)
            self._initialise(target_path, std=config.initializer_range, last_layer=num_layers - 1)

    def _initialise(self, target_path: Path, *, std: float, last_layer: int) -> None:
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=std)
        self.output_norm.get_parameter("weight").data.copy_(self.shared.final_norm_weight_D)
        if self.draft_ids is None:
            self.lm_head.weight.data.copy_(self.shared.lm_head_VD)
        if self.init == "least_squares":
            silence_branches(self.decoder.layer)
        elif self.init == "target_last_layer":
            self.decoder.load_target_layer(read_layer(target_path, last_layer))
            if self.fusion is not None:
                size = self.fusion.out_features
                self.fusion.weight.data.zero_()
                self.fusion.weight.data[:, -size:].copy_(torch.eye(size))

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self._layer_ids

    @property
    def draft_ids_U(self) -> torch.Tensor | None:
        return self.draft_ids

    @property
    def draft_vocab_size(self) -> int | None:
        return None if self.draft_ids is None else self.draft_ids.shape[0]

    @property
    def lm_head_UD(self) -> torch.Tensor:
        return self.lm_head.weight

    @property
    def projection_parameters(self) -> tuple[torch.Tensor, ...]:
        return (self.lm_head.weight,)

    def use_draft_ids(self, ids_U: torch.Tensor) -> None:
        """Draft from these tokens; the lm_head's rows begin as the target's rows of them."""
        assert self.draft_ids is not None and ids_U.shape == self.draft_ids.shape, (ids_U.shape, self.draft_vocab_size)
        with torch.no_grad():
            self.draft_ids.copy_(ids_U)
            self.lm_head.weight.copy_(self.shared.lm_head_VD[ids_U.to(self.shared.lm_head_VD.device)])

    def row_wise(self) -> list[nn.Module]:
        parts = [part for name, part in self.decoder.layer.named_children() if name != "self_attn"]
        return [*self.tap_norms, self.decoder.hidden_norm, self.output_norm, *parts]

    def feed_forward(self) -> list[nn.Module]:
        return [self.decoder.layer.get_submodule("mlp")]

    def settings(self) -> dict[str, Any]:
        return {
            "target_layer_ids": list(self._layer_ids),
            "draft_vocab_size": self.draft_vocab_size,
            "norms": dict(self.norms),
            "init": self.init,
            "seed": self.seed,
        }

    def draft_config(self) -> dict[str, Any]:
        """Also the sha256 of its draft vocabulary: weights and tokens belong together."""
        stated = None if self.draft_ids is None else fingerprint(self.draft_ids)
        return {**super().draft_config(), "draft_vocabulary_sha256": stated}

    @property
    def starts_from_data(self) -> bool:
        return self.init == "least_squares"

    def start(self, batches: Iterable[Batch]) -> None:
        """Fit the projection: what it makes of the taps at base i should be, up to the output norm, h_{i+1}."""
        assert self.fusion is not None
        weight_DE, norm_D = self.fusion.weight, self.output_norm.get_parameter("weight")
        system = LeastSquares(num_inputs=weight_DE.shape[1], num_outputs=weight_DE.shape[0], device=weight_DE.device)
        for batch in batches:
            assert batch.taps_TLD is not None
            rows = loss_rows(batch, ahead=2)
            wanted_MD = batch.hidden_TD[rows.teacher_M].to(weight_DE.dtype)
            system.add(self._joined(batch.taps_TLD)[rows.base_M], before_norm(wanted_MD, weight_D=norm_D, eps=self.shared.rms_norm_eps))
        weight_DE.data.copy_(system.solve(ridge=RIDGE))

    def _joined(self, taps_TLD: torch.Tensor) -> torch.Tensor:
        """What the projection reads, (T, L D)."""
        taps_TLD = taps_TLD.to(self.lm_head.weight.dtype)
        if self.norms["taps"]:
            taps_TLD = torch.stack([norm(taps_TLD[:, index]) for index, norm in enumerate(self.tap_norms)], dim=1)
        return taps_TLD.flatten(1)

    def read_target(self, hidden_TD: torch.Tensor, taps_TLD: torch.Tensor | None) -> torch.Tensor:
        if self.fusion is None:
            return hidden_TD
        assert taps_TLD is not None and taps_TLD.shape[1] == len(self._layer_ids), "whoever reads the target hands over the taps asked for"
        state_TD: torch.Tensor = self.fusion(self._joined(taps_TLD))
        return state_TD

    def project(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        logits_MU: torch.Tensor = self.lm_head(hidden_MD)
        return logits_MU

    def draft(self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor, context: AttentionContext) -> Drafted:
        dtype = self.lm_head.weight.dtype
        embed_TD = self.embed(token_ids_T).to(dtype)
        raw_TD = self.decoder(embed_TD, hidden_TD.to(dtype), position_T=position_T, context=context)
        out_TD = self.output_norm(raw_TD)
        return Drafted(out_TD, out_TD if self.norms["feedback"] else raw_TD)


def _check(norms: Mapping[str, bool], *, layer_ids: tuple[int, ...], num_layers: int) -> dict[str, bool]:
    """The switches, complete and possible, and layers that are there."""
    if set(norms) != set(NORMS):
        raise ValueError(f"head.norms: expected exactly the switches {NORMS}, found {tuple(norms)}")
    if norms["taps"] and not layer_ids:
        raise ValueError("head.norms: expected taps=false where no layer is tapped (target_layer_ids=[]), found true")
    # vLLM hands taps out in the order of the layers, whatever order a head's config names (0.32.0, measured).
    if any(not 0 <= i < num_layers for i in layer_ids) or list(layer_ids) != sorted(set(layer_ids)):
        raise ValueError(
            f"head.target_layer_ids: expected ascending ids from 0 to {num_layers - 1} (output of layer i, before the final norm), "
            f"found {list(layer_ids)}"
        )
    return {name: bool(norms[name]) for name in NORMS}
