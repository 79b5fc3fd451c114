"""The contract of a draft head: unroll for training, draft for inference, one computation behind both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mtp_train.batch.shift import own_rows, read_tokens, rotary_positions
from mtp_train.nn.attention import DraftContext, PackedAttention
from mtp_train.nn.recompute import by_rows
from mtp_train.nn.wanted import WantedRows, rows_only
from mtp_train.records import Batch, DraftStep
from mtp_train.target.weights import SharedWeights


class Drafted(NamedTuple):
    """What one call of ``draft`` gives for its T rows: ``hidden_TD`` is what ``project`` reads, ``feedback_TD`` what
    the next depth reads in place of the target's hidden state."""

    hidden_TD: torch.Tensor
    feedback_TD: torch.Tensor


class Head(nn.Module, ABC):
    """A draft head over a frozen target.

    Embedding and lm_head are the target's own (``shared``): frozen, not parameters of the head, not saved with it. A head
    with an lm_head of its own overrides ``project`` and says so in ``projection_parameters``, and in ``draft_ids_U`` where
    that speaks about a part of the target's vocabulary only.
    """

    word: ClassVar[str]  # its name in conf/head, on the command line and in head.json
    method: ClassVar[str]  # the engines' word for how it drafts: mtp, eagle, eagle3, medusa, draft_model
    reads_hidden: ClassVar[bool] = True  # False: a model of its own, which reads tokens alone, each sequence's first one too

    def __init__(self, *, shared: SharedWeights) -> None:
        super().__init__()
        self._shared = shared
        self._recompute_depths = False

    @property
    def shared(self) -> SharedWeights:
        return self._shared

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The decoder layers of the target whose outputs it reads (DESIGN.md, Words); empty: its last hidden state."""
        return ()

    @property
    def draft_ids_U(self) -> torch.Tensor | None:
        """The target's id of each token that it can draft, ascending, int64 (U,); None: all of them, U = V."""
        return None

    @property
    def lm_head_UD(self) -> torch.Tensor:
        """What ``project`` multiplies with."""
        return self._shared.lm_head_VD

    @property
    def projection_parameters(self) -> tuple[torch.Tensor, ...]:
        """What ``project`` reads of the head's own parameters (at any depth: each ``DraftStep`` says what it reads)."""
        return ()

    @property
    def num_depths(self) -> int | None:
        """How many depths ``unroll`` gives; None: as many as the caller takes."""
        return None

    @property
    def draft_vocab_size(self) -> int | None:
        """How many tokens ``use_draft_ids`` must be given before training; None: the head chooses none."""
        return None

    @property
    def num_blocks(self) -> int:
        """How many sets of weights its depths go through, one after the other; the last one serves all deeper ones."""
        return 1

    def use_draft_ids(self, ids_U: torch.Tensor) -> None:
        """Draft from these tokens of the target, before training (``target/draft_vocabulary.py``)."""
        raise AssertionError(f"{self.word} speaks about all of the target's tokens")

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """The target's embedding of tokens, (T, D), without a gradient."""
        return functional.embedding(token_ids_T, self._shared.embedding_VD)

    def read_target(self, hidden_TD: torch.Tensor, taps_TLD: torch.Tensor | None) -> torch.Tensor:
        """What ``draft`` reads as ``hidden_TD`` at depth 0, made of what the target computed at the same positions:
        its post-norm hidden state, and the outputs of ``target_layer_ids`` in that order. Called once per position."""
        return hidden_TD

    def project(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Logits of rows of what the head speaks, (M, U): the target's lm_head, unless overridden.

        Under autocast the product is autocast's own: widening a bfloat16 lm_head to float32 rows first would copy V x D
        numbers on every call, only for autocast to narrow them again.
        """
        lm_head_VD = self._shared.lm_head_VD
        if not torch.is_autocast_enabled(hidden_MD.device.type):
            lm_head_VD = lm_head_VD.to(hidden_MD.dtype)
        return functional.linear(hidden_MD, lm_head_VD)

    def over_target(self, logits_MU: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary as logits over the target's, (M, V): -inf outside, so that q is exactly 0 there,
        the argmax never lies there, and every rule of verification holds as it is. The same tensor where U = V."""
        if self.draft_ids_U is None:
            return logits_MU
        logits_MV = logits_MU.new_full((logits_MU.shape[0], self._shared.embedding_VD.shape[0]), float("-inf"))
        return logits_MV.index_copy_(1, self.draft_ids_U, logits_MU)

    @property
    def starts_from_data(self) -> bool:
        """Whether ``start`` is to be called, with the training data, before the first step."""
        return False

    def start(self, batches: Iterable[Batch]) -> None:
        """Set from data what has a closed form; no gradients. Heads that have nothing of the kind are never asked.

        ``batches`` can be gone through more than once."""
        raise AssertionError(f"{self.word} does not start from data")

    def unroll(self, batch: Batch, *, wanted: WantedRows | None = None) -> Iterator[DraftStep]:
        """Training: all positions of a packed batch, depth after depth, for as many as the caller takes.

        Calls ``draft`` with all bases at once; each depth reads the states of the one before and attends to its own base's
        keys of all earlier ones (training-time test, Li et al. 2025, section 3.2). Equal to ``draft`` called incrementally
        from every base (a test of each head says so). ``wanted``: bases that somebody reads at some depth; what the others then hold
        means nothing, and need not be computed.
        """
        wanted = wanted if self.num_blocks == 1 else None  # a later block attends to all rows of its depth
        for depth, (rows_M, drafted) in enumerate(self.drafted(batch, wanted=wanted)):
            spoken_TD = drafted.hidden_TD
            if rows_M is not None:
                spoken_TD = spoken_TD.new_zeros((batch.num_tokens, spoken_TD.shape[1])).index_copy(0, rows_M, spoken_TD)
            yield DraftStep(
                ahead=depth + 2,
                hidden_TD=spoken_TD,
                project=self.project,
                lm_head_UD=self.lm_head_UD,
                parameters=self.projection_parameters,
            )

    def drafted(self, batch: Batch, *, wanted: WantedRows | None = None) -> Iterator[tuple[torch.Tensor | None, Drafted]]:
        """``unroll``, with what each depth feeds back, and the rows that there are: None for all, as at depth 0."""
        assert wanted is None or batch.share is None
        context = PackedAttention(bounds=batch.bounds, share=batch.share)
        if wanted is not None:
            context.ask(wanted)
        taps_TLD = None if batch.taps_TLD is None else own_rows(batch, batch.taps_TLD)
        hidden_TD = self.read_target(own_rows(batch, batch.hidden_TD), taps_TLD)
        rows_M: torch.Tensor | None = None
        for depth in count():
            token_ids_T, position_T = read_tokens(batch, depth=depth), rotary_positions(batch, depth=depth)
            drafted = self.draft_to_train(
                token_ids_T=token_ids_T if rows_M is None else token_ids_T[rows_M],
                hidden_TD=hidden_TD,
                position_T=position_T if rows_M is None else position_T[rows_M],
                context=context,
                feed_forward_M=wanted.rows_M if wanted is not None and not depth else None,
            )
            yield rows_M, drafted
            hidden_TD = drafted.feedback_TD
            if wanted is not None and not depth:
                context.restrict(wanted)
                rows_M, hidden_TD = wanted.rows_M, hidden_TD[wanted.rows_M]
            if wanted is not None and wanted.still is not None and rows_M is not None:
                still_M = wanted.still(depth + 1)
                context.narrow(still_M)
                rows_M, hidden_TD = still_M, hidden_TD[torch.searchsorted(rows_M, still_M)]
            context.next_depth()

    @abstractmethod
    def draft(self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor, context: DraftContext) -> Drafted:
        """Inference: rows (h_i, x_{i+1}) at rotary position i of one or more sequences, over their KV cache; h_i is what
        ``read_target`` gave, at later depths what the depth before fed back."""

    def row_wise(self) -> list[nn.Module]:
        """Its parts that treat each row by itself and keep much for the backward: norms, the layer's feed-forward part."""
        return []

    def feed_forward(self) -> list[nn.Module]:
        """Those of ``row_wise`` that hold matrices."""
        return []

    def recompute_activations(self, *, depths: bool) -> None:
        """Before training over long packs: from now on ``row_wise`` parts keep their input alone and are computed again in the
        backward, a stretch of rows at a time. With ``depths`` so is each depth of ``unroll``, which then keeps what it reads and
        gives; for one depth alone that saves nothing and costs the attention's forward once more."""
        for module in self.row_wise():
            by_rows(module)
        self._recompute_depths = depths

    def draft_to_train(
        self,
        *,
        token_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        position_T: torch.Tensor,
        context: PackedAttention,
        feed_forward_M: torch.Tensor | None,
    ) -> Drafted:
        """``draft`` as ``unroll`` calls it (Chen et al. 2016, arXiv 1604.06174, where depths are computed again), its feed-forward
        part over some rows only where ``feed_forward_M`` names them."""

        def draft(context: DraftContext) -> Drafted:
            with rows_only(self.feed_forward(), feed_forward_M):
                return self.draft(token_ids_T=token_ids_T, hidden_TD=hidden_TD, position_T=position_T, context=context)

        if not (self._recompute_depths and torch.is_grad_enabled()):
            return draft(context)
        drafted: Drafted = checkpoint(draft, context.at_this_depth(), use_reentrant=False)
        return drafted

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The constructor's own arguments as plain JSON, target and shared weights left out."""

    def draft_config(self) -> dict[str, Any]:
        """All that an engine or exporter needs to rebuild the graph: what ``head.json`` says of the architecture."""
        return {"head": self.word, "method": self.method, "hidden_state": "post_norm", "settings": self.settings()}


class ParallelHead(Head):
    """A head that speaks about the next tokens all at once, from the target's hidden state alone, as Medusa does.

    It keeps nothing between drafts and reads no drafted tokens: ``ahead`` is all of its inference.
    """

    @property
    @abstractmethod
    def num_ahead(self) -> int:
        """How many tokens it speaks about at once."""

    @property
    def num_depths(self) -> int:
        return self.num_ahead

    @property
    def num_blocks(self) -> int:
        return self.num_ahead

    @abstractmethod
    def ahead(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary, (``num_ahead``, B, V): at h_i, row k speaks about x_{i+2+k}."""

    def draft(self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor, context: DraftContext) -> Drafted:
        raise AssertionError(f"{self.word} drafts all tokens at once: ahead")
