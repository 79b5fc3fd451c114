"""Draft vocabularies: counted in the target's own text, and the same set of tokens in every form that it is stored in."""

from __future__ import annotations

import pytest
import torch

from mtp_train.records import Sample
from mtp_train.target.draft_vocabulary import (
    DraftVocabulary,
    count_answer_tokens,
    fingerprint,
    from_mask,
    from_offsets,
    most_frequent,
    to_mask,
    to_offsets,
)

V = 50


def sample(tokens: list[int], mask: list[int]) -> Sample:
    return Sample(
        sample_id="s",
        token_ids_T=torch.tensor(tokens),
        loss_mask_T=torch.tensor(mask, dtype=torch.bool),
        hidden_TD=torch.zeros(len(tokens), 2),
    )


def test_only_the_targets_own_tokens_are_counted() -> None:
    counts_V = count_answer_tokens([sample([3, 3, 7, 9], [0, 1, 1, 1]), sample([9, 9, 1], [1, 0, 1])], vocab_size=V)
    assert {token: int(count) for token, count in enumerate(counts_V) if count} == {1: 1, 3: 1, 7: 1, 9: 2}


def test_the_most_frequent_are_taken_ascending_and_ties_go_to_the_lower_id() -> None:
    counts_V = torch.zeros(V, dtype=torch.int64)
    counts_V[[40, 20, 30, 5]] = torch.tensor([9, 4, 4, 1])
    assert most_frequent(counts_V, size=2).tolist() == [20, 40]
    assert most_frequent(counts_V, size=4).tolist() == [5, 20, 30, 40]
    assert most_frequent(counts_V, size=6).tolist() == [0, 1, 5, 20, 30, 40], "filled up with the lowest ids"


@pytest.mark.parametrize("size", [1, V, V + 1])
def test_a_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="draft_vocab_size: expected 2 to 49"):
        most_frequent(torch.ones(V, dtype=torch.int64), size=size)
    with pytest.raises(ValueError, match="found none; precompute answers"):
        most_frequent(torch.zeros(V, dtype=torch.int64), size=3)


@pytest.mark.parametrize("ids", [[0, 1, 2], [47, 48, 49], [0, 3, 4, 20, 49]])
def test_offsets_mask_and_index_stand_for_the_same_tokens(ids: list[int]) -> None:
    ids_U = torch.tensor(ids)
    assert torch.equal(from_offsets(to_offsets(ids_U), vocab_size=V), ids_U)
    assert torch.equal(from_mask(to_mask(ids_U, vocab_size=V)), ids_U)
    assert int(to_mask(ids_U, vocab_size=V).sum()) == len(ids)
    both = DraftVocabulary.of(ids_U, vocab_size=V)
    assert torch.equal(both.index_V[ids_U], torch.arange(len(ids)))
    assert torch.equal(both.index_V >= 0, to_mask(ids_U, vocab_size=V))


@pytest.mark.parametrize("offsets", [[0, 0, 48], [-1, 0, 0], [1, 0, 0]])
def test_offsets_to_no_set_of_tokens_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="expected offsets to different tokens from 0 to 49"):
        from_offsets(torch.tensor(offsets), vocab_size=V)


def test_the_fingerprint_is_of_the_tokens() -> None:
    one = fingerprint(torch.tensor([1, 2, 9]))
    assert one == fingerprint(torch.tensor([1, 2, 9], dtype=torch.int32))
    assert one != fingerprint(torch.tensor([1, 2, 10])) and len(one) == 64
