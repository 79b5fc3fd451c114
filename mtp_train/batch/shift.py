"""The only code that aligns positions: which token a draft step reads, speaks about, and is taught by.

Tokens x_0 .. x_{n-1} of one sample; h_i the target's hidden state at i; z_i = lm_head(h_i) its logits, which predict
x_{i+1}. For the base position i and the depth k of the unroll (DESIGN.md, section 4):

======  =======================  ====================  ==============  ====================  ======================
depth   reads hidden             reads token           speaks about    taught by             rotary position
======  =======================  ====================  ==============  ====================  ======================
0       h_i (the target's)       x_{i+1}               x_{i+2}         h_{i+1}, z_{i+1}      i
1       its own of depth 0       x_{i+2}               x_{i+3}         h_{i+2}, z_{i+2}      i + 1
k       its own of depth k - 1   x_{i+1+k}             x_{i+2+k}       h_{i+1+k}, z_{i+1+k}  i + k
======  =======================  ====================  ==============  ====================  ======================

``ahead`` = k + 2 is the distance from the base to the token spoken about. Example: "a b c d" with the answer "c d"
(loss_mask 0 0 1 1). Depth 0 (ahead 2): base 0 reads h_a and "b", speaks about "c", and counts; base 1 reads h_b and
"c", speaks about "d", and counts; bases 2 and 3 speak about tokens past the end. Depth 1 (ahead 3): only base 0
remains, reads "c" and speaks about "d".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from mtp_train.records import Batch


class LossRows(NamedTuple):
    """Aligned row numbers of a batch, all int64 of shape (M,): at ``base_M`` the head speaks, ``teacher_M`` holds the
    target's hidden state and logits about the same token, ``label_M`` is that token's own row."""

    base_M: torch.Tensor
    teacher_M: torch.Tensor
    label_M: torch.Tensor


def read_tokens(batch: Batch, *, depth: int) -> torch.Tensor:
    """The token each of this process' bases reads at ``depth``: x_{i + 1 + depth}, int64 (T,).

    Rows whose token would lie outside their sample get token 0; they are never counted (``loss_rows``) and nothing
    that counts attends to them, since attention looks back only.
    """
    ahead = depth + 1
    shifted_T = torch.zeros_like(batch.token_ids_T)
    if ahead < batch.num_tokens:
        inside = batch.sample_T[ahead:] == batch.sample_T[:-ahead]
        shifted_T[:-ahead] = torch.where(inside, batch.token_ids_T[ahead:], 0)
    return own_rows(batch, shifted_T)


def states_at(own_TD: torch.Tensor, *, depth: int) -> torch.Tensor:
    """What a model that reads tokens alone holds behind the token that each base reads at ``depth``, x_{i + 1 + depth}: its state
    of that row. (T, D); rows whose token would lie outside their sample hold others', and are never counted (``loss_rows``)."""
    ahead = min(depth + 1, own_TD.shape[0])
    return functional.pad(own_TD[ahead:], (0, 0, 0, ahead))


def rotary_positions(batch: Batch, *, depth: int) -> torch.Tensor:
    """The rotary position of each of this process' bases at ``depth``: i + depth, int64 (T,), as the engines draft."""
    return own_rows(batch, batch.position_T) + depth


def own_rows(batch: Batch, column_T: torch.Tensor) -> torch.Tensor:
    """The rows of a column that this process computes: all, unless several share the batch."""
    return column_T if batch.share is None else batch.share.own(column_T)


def loss_rows(batch: Batch, *, ahead: int) -> LossRows:
    """The rows that count where a head speaks ``ahead`` tokens ahead of its base.

    Base i counts where x_{i + ahead} lies in the same sample and is the target's own text (``loss_mask``). Its
    teacher is row i + ahead - 1, whose logits speak about x_{i + ahead}.
    """
    assert ahead >= 1, ahead
    if ahead >= batch.num_tokens:
        none_M = batch.token_ids_T.new_zeros((0,))
        return LossRows(none_M, none_M, none_M)
    counts = (batch.sample_T[ahead:] == batch.sample_T[:-ahead]) & batch.loss_mask_T[ahead:]
    base_M = counts.nonzero(as_tuple=True)[0]
    return LossRows(base_M, base_M + (ahead - 1), base_M + ahead)


def rows_of_depths(batch: Batch, *, num_depths: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The bases that count at the last of ``num_depths`` depths, int64 (M,), and for each depth their teacher's rows."""
    deepest = loss_rows(batch, ahead=num_depths + 1)
    return deepest.base_M, tuple(deepest.base_M + depth + 1 for depth in range(num_depths))


def teacher_rows(loss_mask_T: torch.Tensor) -> torch.Tensor:
    """Positions j of one sample whose logits z_j a head may be taught: x_{j + 1} is the target's own, int64 (M,).

    This is what the cache keeps top-k for. j = 0 is kept too, though no draft ever speaks about x_1: it costs one
    row and keeps "every answer token has its teacher" true.
    """
    return loss_mask_T[1:].nonzero(as_tuple=True)[0]
