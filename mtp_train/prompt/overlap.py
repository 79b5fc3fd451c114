"""Near-duplicates among texts: which pairs share a run of n words, so that nothing held out has been trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# 13 words is the usual length for this check since GPT-3 (Brown et al. 2020, appendix C): long enough that stock phrases pass.
NGRAM_WORDS = 13
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class SharedNgram:
    """One pair of texts with a run of words in common.

    ``index_a`` and ``index_b`` are positions in the two lists given (in the one list, ``index_a < index_b``, where a list
    is compared with itself); ``ngram`` is the first such run in text b, lower-cased, without punctuation.
    """

    index_a: int
    index_b: int
    ngram: str


def word_ngrams(text: str, *, n: int) -> list[tuple[str, ...]]:
    """All runs of ``n`` words of ``text``, in order; words are lower-cased runs of letters, digits and underscores."""
    words = _WORD.findall(text.lower())
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def shared_ngrams(texts_a: Sequence[str], texts_b: Sequence[str] | None, n: int = NGRAM_WORDS) -> list[SharedNgram]:
    """Pairs (one text of ``texts_a``, one of ``texts_b``) that share at least one run of ``n`` words.

    ``texts_b`` None compares ``texts_a`` with itself, every unordered pair once and no text with itself. One entry per
    pair, by ``index_b``, then ``index_a``; an empty list says that the texts are disjoint. A text of fewer than ``n``
    words has no runs, so it shares none: compare such texts by equality too. ``ValueError`` for ``n`` < 1.
    """
    if n < 1:
        raise ValueError(f"shared_ngrams: expected n >= 1 words, found {n}")
    within = texts_b is None
    holders: dict[tuple[str, ...], list[int]] = {}
    if not within:
        _register(holders, enumerate(texts_a), n)
    shared: list[SharedNgram] = []
    for index_b, text in enumerate(texts_a if texts_b is None else texts_b):
        first: dict[int, str] = {}
        for ngram in word_ngrams(text, n=n):
            for index_a in holders.get(ngram, ()):
                first.setdefault(index_a, " ".join(ngram))
        shared += [SharedNgram(index_a=index_a, index_b=index_b, ngram=first[index_a]) for index_a in sorted(first)]
        if within:
            _register(holders, [(index_b, text)], n)
    return shared


def _register(holders: dict[tuple[str, ...], list[int]], texts: Iterable[tuple[int, str]], n: int) -> None:
    for index, text in texts:
        for ngram in set(word_ngrams(text, n=n)):
            holders.setdefault(ngram, []).append(index)
