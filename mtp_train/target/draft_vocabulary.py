"""A draft vocabulary: the target's tokens that a head with an lm_head of its own can speak about, and how they are numbered.

Draft token u is the target's token ``ids_U[u]``; the ids ascend. EAGLE-3 (Li et al. 2025) takes the most frequent tokens of
the training answers, so that the lm_head, which is most of the work of a draft step, becomes small. A token outside is
never drafted: it counts as rejected wherever acceptance is counted. The engines' files hold the same numbering as ``d2t``
(offsets: the target's id of u is u + d2t[u]) and ``t2d`` (bool over the target's vocabulary).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mtp_train.records import Sample


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Both directions: ``ids_U`` (int64) the target's id of each draft token, ``index_V`` (int64) the draft token of each of
    the target's ids, -1 where it has none."""

    ids_U: torch.Tensor
    index_V: torch.Tensor

    @classmethod
    def of(cls, ids_U: torch.Tensor, *, vocab_size: int) -> DraftVocabulary:
        index_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids_U.device)
        index_V[ids_U] = torch.arange(ids_U.shape[0], device=ids_U.device)
        return cls(ids_U=ids_U, index_V=index_V)


def count_answer_tokens(samples: Iterable[Sample], *, vocab_size: int) -> torch.Tensor:
    """How often each token stands in the target's own text (``loss_mask``), int64 (V,)."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts_V += sample.token_ids_T[sample.loss_mask_T].bincount(minlength=vocab_size)
    return counts_V


def most_frequent(counts_V: torch.Tensor, *, size: int) -> torch.Tensor:
    """The ``size`` tokens with the largest counts, ascending, int64 (U,); of equal counts the lower ids.

    Where fewer have been seen, the lowest ids fill it up: tokenizers number the more frequent pieces first.
    Errors: ValueError where ``size`` is not from 2 to below the vocabulary, or nothing was counted.
    """
    vocab_size = counts_V.shape[0]
    if not 2 <= size < vocab_size:
        raise ValueError(f"head.draft_vocab_size: expected 2 to {vocab_size - 1}, or null for all {vocab_size} tokens, found {size}")
    if int(counts_V.sum()) == 0:
        raise ValueError("head.draft_vocab_size: expected answer tokens to count in the cache, found none; precompute answers first")
    order_V = counts_V.sort(descending=True, stable=True).indices
    return order_V[:size].sort().values


def fingerprint(ids_U: torch.Tensor) -> str:
    """sha256 over the ids as little-endian int64: two heads draft from the same tokens where it is the same."""
    return hashlib.sha256(ids_U.to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def to_offsets(ids_U: torch.Tensor) -> torch.Tensor:
    """``d2t`` as the engines store it, int64 (U,)."""
    return ids_U - torch.arange(ids_U.shape[0], dtype=torch.int64, device=ids_U.device)


def from_offsets(d2t_U: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """The ids that ``d2t`` stands for.

    Errors: ValueError where one lies outside the target's vocabulary or stands twice.
    """
    ids_U = d2t_U.to(torch.int64) + torch.arange(d2t_U.shape[0], dtype=torch.int64, device=d2t_U.device)
    if int(ids_U.min()) < 0 or int(ids_U.max()) >= vocab_size or ids_U.unique().shape[0] != ids_U.shape[0]:
        raise ValueError(
            f"d2t: expected offsets to different tokens from 0 to {vocab_size - 1}, found ids from {int(ids_U.min())} to "
            f"{int(ids_U.max())}, {ids_U.unique().shape[0]} of {ids_U.shape[0]} different; it is of another target, or holds ids"
        )
    return ids_U


def to_mask(ids_U: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """``t2d``, bool (V,): which of the target's tokens can be drafted."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=ids_U.device)
    mask_V[ids_U] = True
    return mask_V


def from_mask(t2d_V: torch.Tensor) -> torch.Tensor:
    """The ids that ``t2d`` stands for, ascending, int64 (U,)."""
    return t2d_V.nonzero(as_tuple=True)[0]
