"""Shared runs of words are found whatever the case, the punctuation and the place, and nothing shorter is reported."""

from __future__ import annotations

import pytest

from mtp_train.prompt.overlap import SharedNgram, shared_ngrams

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"


def test_thirteen_words_in_common_are_found_through_case_and_punctuation() -> None:
    other = "Before it. " + THIRTEEN.title().replace(" ", ",\n") + "! And after"
    assert shared_ngrams(["unrelated", THIRTEEN], [other]) == [SharedNgram(index_a=1, index_b=0, ngram=THIRTEEN)]


def test_twelve_words_in_common_are_not() -> None:
    twelve = THIRTEEN.rsplit(" ", 1)[0]
    assert shared_ngrams([THIRTEEN], [f"zero {twelve} fourteen"]) == []


def test_a_list_against_itself_pairs_each_once_and_none_with_itself() -> None:
    texts = [f"{THIRTEEN} {THIRTEEN}", "nothing in common", THIRTEEN, f"x {THIRTEEN}"]
    found = shared_ngrams(texts, None)
    assert [(s.index_a, s.index_b) for s in found] == [(0, 2), (0, 3), (2, 3)]


def test_one_entry_per_pair_names_the_first_run_of_text_b() -> None:
    assert [s.ngram for s in shared_ngrams(["a b c d"], ["z b c d a b c"], n=2)] == ["b c"]


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="n >= 1"):
        shared_ngrams(["a"], None, n=0)
