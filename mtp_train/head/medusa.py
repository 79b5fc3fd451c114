"""``head=medusa``: parallel heads on the target's last hidden state, one for each of the next tokens (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from mtp_train.batch.shift import own_rows, rows_of_depths
from mtp_train.head.base import ParallelHead
from mtp_train.nn.least_squares import RIDGE, LeastSquares, before_silu
from mtp_train.nn.wanted import WantedRows
from mtp_train.records import Batch, DraftStep
from mtp_train.target.weights import SharedWeights

Init = Literal["zeros", "least_squares"]


class ResidualBlock(nn.Module):
    """x + SiLU(W x), as many times as it has layers; with W = 0 it changes nothing."""

    def __init__(self, *, size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=False) for _ in range(num_layers)])
        for layer in self.layers:
            nn.init.zeros_(layer.get_parameter("weight"))

    def forward(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden_MD = hidden_MD + functional.silu(layer(hidden_MD))
        return hidden_MD


class Medusa(ParallelHead):
    """At h_i, head k says lm_head_k(block_k(h_i)) about x_{i+2+k}, knowing none of the tokens between (Medusa-1, arXiv 2401.10774,
    section 2.1). ``num_heads`` of them, each a block of ``num_layers``, 1 in the paper.

    ``own_lm_heads``: each head trains an lm_head of its own, which begins as the target's, as in the paper; False: all speak
    through the target's, which stays as it is, so that a head has D x D weights and not V x D more.
    ``init``: ``zeros``, the paper's: at first each head repeats what the target says about x_{i+1}. ``least_squares``: what of h_i
    tells most of h_{i+1+k}, fitted to the training data. Through the target's lm_head, W is the linear map to what SiLU would
    have to be given to add the difference; an lm_head of its own begins as the target's behind the linear map from one state to
    the other. Nothing is drawn, and nothing of the target but its shared weights is read (``target_path``, ``trust_remote_code``).
    """

    word = "medusa"
    method = "medusa"

    def __init__(
        self,
        *,
        target_path: Path,
        shared: SharedWeights,
        num_heads: int,
        num_layers: int,
        own_lm_heads: bool,
        init: Init,
        trust_remote_code: bool,
    ) -> None:
        super().__init__(shared=shared)
        for name, value in (("num_heads", num_heads), ("num_layers", num_layers)):
            if value < 1:
                raise ValueError(f"head.{name}: expected at least 1, found {value}")
        if init not in get_args(Init):
            raise ValueError(f"head.init: expected one of {get_args(Init)}, found {init!r}")
        self.init: Init = init
        vocab_size, size = shared.lm_head_VD.shape
        self.blocks = nn.ModuleList([ResidualBlock(size=size, num_layers=num_layers) for _ in range(num_heads)])
        self.lm_heads = nn.ModuleList([nn.Linear(size, vocab_size, bias=False) for _ in range(num_heads)]) if own_lm_heads else None
        self._num_layers = num_layers
        for lm_head in self.lm_heads or ():
            lm_head.get_parameter("weight").data.copy_(shared.lm_head_VD)

    @property
    def num_ahead(self) -> int:
        return len(self.blocks)

    @property
    def projection_parameters(self) -> tuple[torch.Tensor, ...]:
        return () if self.lm_heads is None else tuple(self.lm_heads.parameters())

    def row_wise(self) -> list[nn.Module]:
        return list(self.blocks)

    def settings(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_ahead,
            "num_layers": self._num_layers,
            "own_lm_heads": self.lm_heads is not None,
            "init": self.init,
        }

    def unroll(self, batch: Batch, *, wanted: WantedRows | None = None) -> Iterator[DraftStep]:
        """Training: one step per head, all from the target's hidden states."""
        hidden_TD = self._read(own_rows(batch, batch.hidden_TD))
        for number, block in enumerate(self.blocks):
            own = () if self.lm_heads is None else (self.lm_heads[number].get_parameter("weight"),)
            yield DraftStep(
                ahead=number + 2,
                hidden_TD=block(hidden_TD),
                project=partial(self._project, number),
                lm_head_UD=own[0] if own else self.lm_head_UD,
                parameters=own,
            )

    def ahead(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        hidden_BD = self._read(hidden_BD)
        return torch.stack([self._project(number, block(hidden_BD)) for number, block in enumerate(self.blocks)])

    def _read(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return hidden_TD.to(next(self.blocks.parameters()).dtype)

    def _project(self, number: int, hidden_MD: torch.Tensor) -> torch.Tensor:
        if self.lm_heads is None:
            return self.project(hidden_MD)
        logits_MV: torch.Tensor = self.lm_heads[number](hidden_MD)
        return logits_MV

    @property
    def starts_from_data(self) -> bool:
        return self.init == "least_squares"

    def start(self, batches: Iterable[Batch]) -> None:
        """Fit all heads in one system, over the bases that the last one counts."""
        lm_head_VD = self.shared.lm_head_VD
        size = lm_head_VD.shape[1]
        system = LeastSquares(num_inputs=size, num_outputs=self.num_ahead * size, device=lm_head_VD.device)
        for batch in batches:
            base_M, teachers = rows_of_depths(batch, num_depths=self.num_ahead)
            hidden_MD = batch.hidden_TD[base_M].float()
            wanted = [batch.hidden_TD[teacher_M].float() for teacher_M in teachers]
            if self.lm_heads is None:
                wanted = [before_silu(next_MD - hidden_MD) for next_MD in wanted]
            system.add(hidden_MD, torch.cat(wanted, dim=1))
        for number, map_DD in enumerate(system.solve(ridge=RIDGE).split(size)):
            if self.lm_heads is None:
                self.blocks[number].get_parameter("layers.0.weight").data.copy_(map_DD)
            else:
                self.lm_heads[number].get_parameter("weight").data.copy_(lm_head_VD.float() @ map_DD)
