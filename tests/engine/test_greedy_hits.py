"""Hits found with little of the vocabulary are those that the argmax over all of it gives, ties included."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mtp_train.engine.greedy_hits import GreedyHits
from mtp_train.records import DraftStep
from mtp_train.target.draft_vocabulary import DraftVocabulary

V, D, ROWS = 400, 16, 600


def _step(dtype: torch.dtype, *, num_drafted: int) -> tuple[DraftStep, list[int]]:
    """Random states over a vocabulary in which every token has a twin, so that half of all rows are ties; and how many rows go through
    all of it."""
    draw = torch.Generator().manual_seed(0)
    half_UD = torch.randn(num_drafted // 2, D, generator=draw)
    lm_head_UD = torch.cat([half_UD, half_UD])[torch.randperm(num_drafted, generator=draw)].to(dtype)
    projected: list[int] = []

    def project(hidden_RD: torch.Tensor) -> torch.Tensor:
        projected.append(hidden_RD.shape[0])
        return functional.linear(hidden_RD, lm_head_UD)

    hidden_TD = torch.randn(ROWS, D, generator=draw).to(dtype)
    return DraftStep(ahead=2, hidden_TD=hidden_TD, project=project, lm_head_UD=lm_head_UD), projected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_drafted", [V, 100])
def test_hits_are_those_of_the_argmax(dtype: torch.dtype, num_drafted: int) -> None:
    step, projected = _step(dtype, num_drafted=num_drafted)
    draw = torch.Generator().manual_seed(1)
    ids_U = None if num_drafted == V else torch.randperm(V, generator=draw)[:num_drafted].sort().values
    draft = None if ids_U is None else DraftVocabulary.of(ids_U, vocab_size=V)
    best_T = step.project(step.hidden_TD).max(-1).indices
    best_T = best_T if ids_U is None else ids_U[best_T]
    base_M = torch.arange(3, ROWS)
    # A third of the labels are the argmax, a third another of the same, which lies elsewhere, the rest any token.
    choice = torch.randint(3, (len(base_M),), generator=draw)
    anything = torch.randint(V, (len(base_M),), generator=draw)
    label_M = torch.where(choice == 0, best_T[base_M], torch.where(choice == 1, best_T[base_M].roll(1), anything))
    projected.clear()
    found = GreedyHits(label_M, draft=draft)(step, base_M, label_M)
    assert torch.equal(found, best_T[base_M] == label_M)
    assert int(found.sum()) <= sum(projected) < 0.7 * len(base_M)


def test_a_twin_of_a_lower_id_wins() -> None:
    """Within rounding nothing is decided early: both rows go through the whole vocabulary, and the lower id is the argmax."""
    lm_head_UD = torch.eye(4)[[0, 1, 1, 2]]
    step = DraftStep(
        ahead=2, hidden_TD=torch.eye(4)[[1, 1]], project=lambda hidden: functional.linear(hidden, lm_head_UD), lm_head_UD=lm_head_UD
    )
    labels = torch.tensor([1, 2])
    assert GreedyHits(labels, draft=None)(step, torch.tensor([0, 1]), labels).tolist() == [True, False]


@pytest.mark.parametrize("said", [float("nan"), float("inf")])
def test_states_that_mean_nothing_are_refused(said: float) -> None:
    """Nothing compares with NaN: their argmax would be counted, as if it were a draft."""
    step, _ = _step(torch.float32, num_drafted=V)
    step.hidden_TD[7] = said
    labels = torch.arange(ROWS) % V
    with pytest.raises(ValueError, match="head: expected finite logits, found NaN or infinite ones in 1 of"):
        GreedyHits(labels, draft=None)(step, torch.arange(ROWS), labels)


def test_answers_wholly_outside_the_draft_vocabulary_are_never_hit() -> None:
    step, projected = _step(torch.float32, num_drafted=100)
    labels = torch.full((5,), V - 1)
    draft = DraftVocabulary.of(torch.arange(100), vocab_size=V)
    assert not GreedyHits(labels, draft=draft)(step, torch.arange(5), labels).any()
    assert not projected
