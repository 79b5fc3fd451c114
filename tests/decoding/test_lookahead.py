"""The window iterates to what the target writes, its columns become n-grams, and those that fit are the candidates."""

from __future__ import annotations

import itertools

import pytest
import torch

from mtp_train.acceptance.draft import ROOT, Draft
from mtp_train.acceptance.verify_tree import verify_tree_greedy
from mtp_train.decoding.base import NewBases
from mtp_train.decoding.lookahead import Lookahead

NOTHING = torch.zeros(0, 8)
W, N, G = 4, 4, 2
SETTINGS = Lookahead(window=W, ngram=N, max_candidates=G, from_prompt=False)


def _next(token: int) -> int:
    """The target of these tests: what follows hangs on the last token alone."""
    return (token * 5 + 3) % 23


def _paths(draft: Draft) -> list[list[int]]:
    paths: list[list[int]] = []
    for node, parent in enumerate(draft.parents):
        paths.append([*([] if parent == ROOT else paths[parent]), node])
    return paths


def _round(drafter, draft: Draft, last: int) -> tuple[list[int], Draft]:
    """Let the target judge a draft greedily and answer behind the window; returns the new tokens and the next draft."""
    best = [_next(last), *(_next(token) for token in draft.token_ids[: draft.num_candidates])]
    path, next_token = verify_tree_greedy(best_R=best, draft=draft)
    assert drafter.settle(0, path, [_next(draft.token_ids[node]) for node in draft.observed]) == 0
    tokens = [*(draft.token_ids[node] for node in path), next_token]
    (made,) = drafter.propose([NewBases(slot=0, token_ids=tokens, hidden_BD=NOTHING, drafts=True)])
    return tokens, made


def _started(settings: Lookahead, prompt: list[int]):
    drafter = settings.drafter(head=None, num_slots=1, temperature=0.0, top_p=1.0)
    drafter.begin(0, prompt)
    (draft,) = drafter.propose([NewBases(slot=0, token_ids=prompt[1:], hidden_BD=NOTHING, drafts=True)])
    return drafter, draft


def test_the_window_is_a_tree_of_columns() -> None:
    _, draft = _started(SETTINGS, [1, 2, 3, 4, 5])
    assert draft.num_candidates == 0 and len(draft.token_ids) == W * (N - 1) - 1 == SETTINGS.num_rows - SETTINGS.num_nodes
    lengths = sorted(len(path) for path in _paths(draft))
    # Column c of level l stands c + l places ahead: level 0 has columns 1, 2, 3 beside the last token itself.
    assert lengths == sorted([1, 2, 3] + [column + level for level in (1, 2) for column in range(W)])
    assert [len(_paths(draft)[node]) for node in draft.observed] == [2, 3, 4, 5], "the last level, column by column"
    assert set(draft.token_ids) <= {1, 2, 3, 4, 5}, "places not guessed yet start from the text's own tokens"


def test_the_text_is_the_targets_and_the_longest_candidates_are_taken() -> None:
    prompt = [2, 13]
    drafter, draft = _started(SETTINGS, prompt)
    text, accepted = list(prompt), []
    for _ in range(40):
        tokens, draft = _round(drafter, draft, text[-1])
        text += tokens
        accepted.append(len(tokens) - 1)
        assert draft.num_candidates <= SETTINGS.num_nodes and draft.depth <= N - 1
    assert all(after == _next(before) for before, after in itertools.pairwise(text))
    assert max(accepted[:N]) == 0 and accepted[-10:] == [N - 1] * 10, "once n-grams are known, each pass takes N tokens"


def test_ngrams_of_the_prompt_are_candidates() -> None:
    asked = Lookahead(window=W, ngram=N, max_candidates=G, from_prompt=True)
    _, draft = _started(asked, [9, 1, 5, 6, 7, 1, 5, 6, 8, 1, 2, 3, 4, 1])
    candidates = [[draft.token_ids[n] for n in path] for path in _paths(draft)[: draft.num_candidates] if len(path) == N - 1]
    assert candidates == [[2, 3, 4], [5, 6, 8]], "the newest G with this first token"
    assert draft.num_candidates == 6
    _, none = _started(asked, [1, 5, 6, 7, 2])
    assert none.num_candidates == 0


def test_ngrams_that_begin_alike_share_nodes() -> None:
    asked = Lookahead(window=2, ngram=N, max_candidates=3, from_prompt=True)
    _, draft = _started(asked, [1, 5, 6, 7, 1, 5, 6, 8, 1, 5, 3, 4, 1])
    assert draft.num_candidates == 6, "5; 3 4 behind it; 6 behind it; 8 and 7 behind that"


def test_each_level_becomes_the_one_before_it_however_many_tokens_are_accepted() -> None:
    drafter, _ = _started(SETTINGS, [2, 13])
    for taken in (0, 1, 3):
        guesses = drafter._guesses[0]
        before, answers = [list(level) for level in guesses.levels_NW], list(range(100, 100 + W))
        drafter.settle(0, (), answers)
        new = list(range(50, 51 + taken))
        drafter.propose([NewBases(slot=0, token_ids=new, hidden_BD=NOTHING, drafts=True)])
        assert guesses.levels_NW == [[new[-1], *before[1][1:]], before[2], answers]


@pytest.mark.parametrize(
    ("change", "message"), [({"window": 0}, r"decoding\.window"), ({"ngram": 2}, r"decoding\.ngram: expected at least 3, found 2")]
)
def test_impossible_settings_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        Lookahead(**{"window": 4, "ngram": 4, "max_candidates": 2, "from_prompt": True, **change})
