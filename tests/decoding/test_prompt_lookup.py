"""The longest n-gram at the text's end that stands earlier is continued as it was there; the index grows with the text."""

from __future__ import annotations

import random

import pytest
import torch

from mtp_train.decoding.base import NewBases
from mtp_train.decoding.prompt_lookup import PromptLookup, PromptLookupDrafter

SETTINGS = PromptLookup(num_speculative_tokens=4, max_ngram=3, min_ngram=1)
NOTHING = torch.zeros(0, 8)


def _drafter(slots: int = 1, settings: PromptLookup = SETTINGS) -> PromptLookupDrafter:
    return settings.drafter(head=None, num_slots=slots, temperature=0.0, top_p=1.0)


def _drafted(text: list[int], settings: PromptLookup = SETTINGS) -> list[int] | None:
    drafter = _drafter(settings=settings)
    drafter.begin(0, text)
    (draft,) = drafter.propose([NewBases(slot=0, token_ids=text[1:], hidden_BD=NOTHING, drafts=True)])
    assert draft is None or draft.is_chain
    return None if draft is None else draft.token_ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3], [9, 8, 7, 6]),
        ([7, 3, 4, 1, 2, 3, 9, 2, 3], [9, 2, 3]),  # two tokens match before one does; the copy ends with the text
        ([5, 1, 6, 1, 8, 1], [6, 1, 8, 1]),  # of several matches the first
        ([1, 2, 3, 4], None),
        ([4, 4, 4], [4]),  # a match may overlap the end
        ([4], None),
        ([2, 2], [2]),
    ],
)
def test_what_followed_is_copied(text, expected):
    assert _drafted(text) == expected


def test_only_ngrams_of_the_lengths_asked_for():
    pairs = PromptLookup(num_speculative_tokens=2, max_ngram=2, min_ngram=2)
    assert _drafted([1, 2, 3, 9, 2], pairs) is None
    assert _drafted([1, 2, 3, 9, 1, 2], pairs) == [3, 9]


def _by_search(text: list[int]) -> list[int] | None:
    """The same, looked for from the start each time."""
    for length in range(SETTINGS.max_ngram, SETTINGS.min_ngram - 1, -1):
        for end in range(length, len(text)):
            if text[end - length : end] == text[len(text) - length :]:
                return text[end : end + SETTINGS.num_speculative_tokens]
    return None


def test_a_text_that_grows_is_searched_as_one_that_is_whole():
    chance = random.Random(0)
    texts = [[chance.randrange(6) for _ in range(60)] for _ in range(3)]
    drafter = _drafter(slots=3)
    known = [0, 0, 0]
    for slot, text in enumerate(texts):
        drafter.begin(slot, text[:5])
    while max(known) < 50:
        new = []
        for slot, text in enumerate(texts):
            first, known[slot] = known[slot], known[slot] + chance.randrange(1, 5)
            new.append(NewBases(slot=slot, token_ids=text[first + 1 : known[slot] + 1], hidden_BD=NOTHING, drafts=slot != 1))
        for slot, draft in enumerate(drafter.propose(new)):
            expected = _by_search(texts[slot][: known[slot] + 1]) if slot != 1 else None
            assert (None if draft is None else draft.token_ids) == expected
    drafter.begin(0, [1, 2])
    assert drafter.propose([NewBases(slot=0, token_ids=[2], hidden_BD=NOTHING, drafts=True)]) == [None], "a new text forgets the old one"


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="expected at least min_ngram=3, found 2"):
        PromptLookup(num_speculative_tokens=4, max_ngram=2, min_ngram=3)
    with pytest.raises(ValueError, match=r"decoding\.min_ngram: expected at least 1, found 0"):
        PromptLookup(num_speculative_tokens=4, max_ngram=2, min_ngram=0)
