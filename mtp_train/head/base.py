"""The contract of a draft head: unroll for training, draft for inference, one computation behind both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from mtp_train.nn.attention import AttentionContext
from mtp_train.records import Batch, DraftStep
from mtp_train.target.weights import SharedWeights


class Drafted(NamedTuple):
    """What one call of ``draft`` gives for its T rows: ``hidden_TD`` is what ``project`` reads, ``feedback_TD`` what
    the next depth reads in place of the target's hidden state."""

    hidden_TD: torch.Tensor
    feedback_TD: torch.Tensor


class Head(nn.Module, ABC):
    """A draft head over a frozen target.

    Embedding and lm_head are the target's own (``shared``): frozen, not parameters of the head, not saved with it.
    """

    word: ClassVar[str]  # its name in conf/head, on the command line and in head.json
    method: ClassVar[str]  # the engines' word for how it drafts: mtp, eagle, eagle3, medusa, draft_model
    reads_hidden: ClassVar[bool] = True  # False: a model of its own, which reads tokens alone, each sequence's first one too

    def __init__(self, *, shared: SharedWeights) -> None:
        super().__init__()
        self._shared = shared

    @property
    def shared(self) -> SharedWeights:
        return self._shared

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """The target's embedding of tokens, (T, D), without a gradient."""
        return functional.embedding(token_ids_T, self._shared.embedding_VD)

    def project(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """The target's lm_head over rows of what the head speaks, (M, V).

        Under autocast the product is autocast's own: widening a bfloat16 lm_head to float32 rows first would copy V x D
        numbers on every call, only for autocast to narrow them again.
        """
        lm_head_VD = self._shared.lm_head_VD
        if not torch.is_autocast_enabled(hidden_MD.device.type):
            lm_head_VD = lm_head_VD.to(hidden_MD.dtype)
        return functional.linear(hidden_MD, lm_head_VD)

    @property
    def starts_from_data(self) -> bool:
        """Whether ``start`` is to be called, with the training data, before the first step."""
        return False

    def start(self, batches: Iterable[Batch]) -> None:
        """Set from data what has a closed form; no gradients. Heads that have nothing of the kind are never asked."""
        raise AssertionError(f"{self.word} does not start from data")

    @abstractmethod
    def unroll(self, batch: Batch) -> Iterator[DraftStep]:
        """Training: all positions of a packed batch, depth after depth, for as many as the caller takes.

        Equal to ``draft`` called incrementally from every base (a test of each head says so).
        """

    @abstractmethod
    def draft(self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor, context: AttentionContext) -> Drafted:
        """Inference: rows (h_i, x_{i+1}) at rotary position i of one or more sequences, over their KV cache."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The constructor's own arguments as plain JSON, target and shared weights left out."""

    def draft_config(self) -> dict[str, Any]:
        """All that an engine or exporter needs to rebuild the graph: what ``head.json`` says of the architecture."""
        return {"head": self.word, "method": self.method, "hidden_state": "post_norm", "settings": self.settings()}


class ParallelHead(Head):
    """A head that speaks about the next tokens all at once, from the target's hidden state alone, as Medusa does."""

    @property
    @abstractmethod
    def num_ahead(self) -> int:
        """How many tokens it speaks about at once."""

    @abstractmethod
    def ahead(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary, (``num_ahead``, B, V): at h_i, row k speaks about x_{i+2+k}."""
