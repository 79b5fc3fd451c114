"""Whether a draft's most probable token is the one that stands there, without reading most rows' whole vocabulary.

A row whose own token loses by more than rounding against any other token is a miss, whatever the rest of the vocabulary says. What
a head says wrongly is mostly a token that the text holds elsewhere; so each row is first held against the tokens of the batch, some
hundreds, and only rows whose own token is best there, hits nearly all of them, against all.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_train.acceptance.verify import check_finite
from mtp_train.records import DraftStep
from mtp_train.target.draft_vocabulary import DraftVocabulary

# Rows of logits at a time.
_ROWS = 256


class GreedyHits:
    """The argmax against the token itself, for rows whose tokens are among ``labels_M`` (int64, the target's ids, with repeats).

    ``draft``: where the head speaks about a part of the vocabulary; a token outside it is never a hit. Of equal logits the lower id
    wins, as in decoding.
    """

    def __init__(self, labels_M: torch.Tensor, *, draft: DraftVocabulary | None) -> None:
        self._draft = draft
        ids_S = self._drafted(labels_M).unique()
        self._ids_S = ids_S[ids_S >= 0]

    def __call__(self, step: DraftStep, base_M: torch.Tensor, label_M: torch.Tensor) -> torch.Tensor:
        """Bool (M,): the step's argmax at these rows is ``label_M``, the target's ids. ValueError where the head says nothing finite."""
        ids_M = self._drafted(label_M)
        hit_M = ids_M >= 0
        if not len(self._ids_S):
            return hit_M
        few_SD = step.lm_head_UD[self._ids_S].to(step.hidden_TD.dtype)
        for rows_R in hit_M.nonzero(as_tuple=True)[0].split(_ROWS):
            hit_M[rows_R] = ~self._beaten(step.hidden_TD[base_M[rows_R]], few_SD, ids_M[rows_R])
        for rows_R in hit_M.nonzero(as_tuple=True)[0].split(_ROWS):
            logits_RU = step.project(step.hidden_TD[base_M[rows_R]])
            check_finite(logits_RU, of="head")  # states of NaN are beaten by nothing, and all come to here
            hit_M[rows_R] = logits_RU.max(-1).indices == ids_M[rows_R]
        return hit_M

    def _drafted(self, ids_M: torch.Tensor) -> torch.Tensor:
        return ids_M if self._draft is None else self._draft.index_V[ids_M]

    def _beaten(self, hidden_RD: torch.Tensor, few_SD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        """Whether some token's logit lies above the own one's by more than two products can differ in: either is rounded to the
        dtype once, and summed in another order."""
        logits_RS = functional.linear(hidden_RD, few_SD)
        own_R = logits_RS.gather(1, torch.searchsorted(self._ids_S, ids_R)[:, None])[:, 0].float()
        best_R = logits_RS.max(-1).values.float()
        tolerance = 4 * torch.finfo(hidden_RD.dtype).eps + 1e-3
        return best_R - own_R > tolerance * torch.maximum(best_R.abs(), own_R.abs())
