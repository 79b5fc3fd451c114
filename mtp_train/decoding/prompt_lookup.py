"""``decoding=prompt_lookup``: what followed the last few tokens when they stood in the text before (Saxena 2023). No head.

The longest n-gram at the text's end, of ``max_ngram`` down to ``min_ngram`` tokens, that stands earlier in the text is looked
up where it stands first, as vLLM's ``ngram`` method does; the tokens behind it there are the draft. Without one nothing is
drafted, and the target decodes one token as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_train.acceptance.draft import Draft, chain
from mtp_train.decoding.base import Decoding, Drafter, NewBases, check_at_least
from mtp_train.head.base import Head


@dataclass(frozen=True, kw_only=True)
class PromptLookup(Decoding):
    """``num_speculative_tokens``: tokens copied at the most."""

    word = "prompt_lookup"
    shape = "chain"
    needs_head = False
    draws = False

    num_speculative_tokens: int
    max_ngram: int
    min_ngram: int

    def __post_init__(self) -> None:
        check_at_least(1, {"num_speculative_tokens": self.num_speculative_tokens, "min_ngram": self.min_ngram})
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"decoding.max_ngram: expected at least min_ngram={self.min_ngram}, found {self.max_ngram}")

    @property
    def depth(self) -> int:
        return self.num_speculative_tokens

    @property
    def num_nodes(self) -> int:
        return self.num_speculative_tokens

    def drafter(self, *, head: Head | None, num_slots: int, temperature: float, top_p: float) -> PromptLookupDrafter:
        return PromptLookupDrafter(settings=self, num_slots=num_slots)


class PromptLookupDrafter(Drafter):
    """Keeps the text of each slot and where each of its n-grams stands first."""

    def __init__(self, *, settings: PromptLookup, num_slots: int) -> None:
        self.settings = settings
        self._text: list[list[int]] = [[] for _ in range(num_slots)]
        # Of an n-gram the position behind its first occurrence; those at the text's very end are not in it yet.
        self._behind: list[dict[tuple[int, ...], int]] = [{} for _ in range(num_slots)]
        self._num_indexed = [0] * num_slots

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self._text[slot], self._behind[slot], self._num_indexed[slot] = [token_ids[0]], {}, 0

    def settle(self, slot: int, path: Sequence[int], observed: Sequence[int]) -> int:
        return 0

    def propose(self, new: Sequence[NewBases]) -> list[Draft | None]:
        for bases in new:
            self._text[bases.slot] += bases.token_ids
        return [self._look_up(bases.slot) if bases.drafts else None for bases in new]

    def _look_up(self, slot: int) -> Draft | None:
        text, behind = self._text[slot], self._behind[slot]
        lengths = range(self.settings.min_ngram, self.settings.max_ngram + 1)
        for end in range(self._num_indexed[slot] + 1, len(text)):
            for length in lengths:
                if length <= end:
                    behind.setdefault(tuple(text[end - length : end]), end)
        self._num_indexed[slot] = len(text) - 1
        for length in reversed(lengths):
            if length < len(text) and (start := behind.get(tuple(text[-length:]))) is not None:
                return chain(text[start : start + self.settings.num_speculative_tokens])
        return None
