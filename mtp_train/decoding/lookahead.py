"""``decoding=lookahead``: the target guesses several tokens ahead in the same forward that verifies (Fu et al. 2024). No head.

A window of guesses is read beside the candidates: W columns, each a place ahead, and N - 1 levels, each the target's answer
to the one before (Jacobi iteration). Column c of level 0 follows column c - 1; at later levels it follows its own column one
level before. So the window is a tree, and the column downwards, with the target's argmax behind its last level, is an
N-gram that the target itself would write. N-grams are collected by their first token; those that begin with the last token
are the candidates of the next verification, laid together where they begin alike.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_train.acceptance.draft import ROOT, Draft
from mtp_train.decoding.base import Decoding, Drafter, NewBases, check_at_least
from mtp_train.head.base import Head


@dataclass(frozen=True, kw_only=True)
class Lookahead(Decoding):
    """``window``: W, places guessed ahead; ``ngram``: N; ``max_candidates``: N-grams judged at once, and kept for each first
    token. ``from_prompt``: the prompt's own N-grams are collected too."""

    word = "lookahead"
    shape = "tree"
    needs_head = False
    draws = False

    window: int
    ngram: int
    max_candidates: int
    from_prompt: bool

    def __post_init__(self) -> None:
        check_at_least(1, {"window": self.window, "max_candidates": self.max_candidates})
        check_at_least(3, {"ngram": self.ngram})

    @property
    def depth(self) -> int:
        return self.ngram - 1

    @property
    def num_nodes(self) -> int:
        return self.max_candidates * (self.ngram - 1)

    @property
    def num_rows(self) -> int:
        return self.num_nodes + self.window * (self.ngram - 1) - 1

    def drafter(self, *, head: Head | None, num_slots: int, temperature: float, top_p: float) -> LookaheadDrafter:
        return LookaheadDrafter(settings=self, num_slots=num_slots)


class _Guesses:
    """One sequence's text, window and N-grams. ``levels_NW[0][0]`` is the text's last token; ``num_answered`` counts the rounds in
    which the target answered, of which the last N - 1 stand in the window."""

    def __init__(self, settings: Lookahead, first_token: int) -> None:
        self.settings = settings
        self.text = [first_token]
        self.levels_NW: list[list[int]] = []
        self.answers_W: list[int] = []
        self.num_answered = 0
        self.tails: dict[int, list[tuple[int, ...]]] = {}

    def collect(self, tokens: Sequence[int]) -> None:
        """Keep an N-gram as the newest of those with its first token."""
        found, tail = self.tails.setdefault(tokens[0], []), tuple(tokens[1:])
        if tail in found:
            found.remove(tail)
        found.append(tail)
        del found[: -self.settings.max_candidates]

    def read_prompt(self, tokens: Sequence[int]) -> None:
        known, ngram = len(self.text), self.settings.ngram
        self.text += tokens
        if self.settings.from_prompt:
            for end in range(max(known + 1, ngram), len(self.text) + 1):
                self.collect(self.text[end - ngram : end])

    def start(self) -> None:
        """Fill the window with any tokens, here of the text itself; the same for the same text."""
        chance, settings = random.Random(len(self.text)), self.settings
        self.levels_NW = [[chance.choice(self.text) for _ in range(settings.window)] for _ in range(settings.ngram - 1)]
        self.levels_NW[0][0] = self.text[-1]

    def advance(self, tokens: Sequence[int]) -> None:
        """The text grew by ``tokens``: collect the window's N-grams, and let each level become the one before.

        Columns stay where more than one token was accepted: what follows what is as good a few places on, and a column that
        starts anew is no N-gram of the target's for N - 2 rounds.
        """
        self.num_answered += 1
        if self.num_answered >= self.settings.ngram - 1:  # all levels but the first are the target's answers
            for column, answer in enumerate(self.answers_W):
                self.collect([*(level[column] for level in self.levels_NW), answer])
        self.text += tokens
        self.levels_NW = [*self.levels_NW[1:], self.answers_W]
        self.levels_NW[0][0] = self.text[-1]

    def draft(self) -> Draft:
        token_ids, parents = list[int](), list[int]()
        node_of: dict[tuple[int, int], int] = {}
        for tail in reversed(self.tails.get(self.text[-1], [])):
            node = ROOT
            for token in tail:
                if (node, token) not in node_of:
                    token_ids.append(token)
                    parents.append(node)
                    node_of[node, token] = len(token_ids) - 1
                node = node_of[node, token]
        num_judged = len(token_ids)
        above = [ROOT]
        for column in range(1, self.settings.window):
            token_ids.append(self.levels_NW[0][column])
            parents.append(above[-1])
            above.append(len(token_ids) - 1)
        for level in self.levels_NW[1:]:
            first = len(token_ids)
            token_ids += level
            parents += above
            above = list(range(first, len(token_ids)))
        return Draft(token_ids=token_ids, parents=parents, num_judged=num_judged, observed=above)


class LookaheadDrafter(Drafter):
    """Keeps each slot's window and N-grams."""

    def __init__(self, *, settings: Lookahead, num_slots: int) -> None:
        self.settings = settings
        self._guesses = [_Guesses(settings, 0) for _ in range(num_slots)]

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self._guesses[slot] = _Guesses(self.settings, token_ids[0])

    def settle(self, slot: int, path: Sequence[int], observed: Sequence[int]) -> int:
        self._guesses[slot].answers_W = list(observed)
        return 0

    def propose(self, new: Sequence[NewBases]) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        for bases in new:
            guesses = self._guesses[bases.slot]
            if guesses.answers_W:
                guesses.advance(bases.token_ids)
            else:
                guesses.read_prompt(bases.token_ids)
                if bases.drafts:
                    guesses.start()
            drafts.append(guesses.draft() if bases.drafts else None)
        return drafts
