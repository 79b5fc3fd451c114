"""How a verification is counted, and where an answer ends: one set of rules for the engine and for the estimate.

At the end of an answer the engines go on drafting K tokens and count what is accepted of them even where the answer ends
before (vLLM's scheduler counts before it trims). Here a drafted token counts only where the answer can hold it: drafted
up to the length limit, accepted up to the last token kept. A verification counts as a draft in both ways of counting, so
``num_drafts`` agrees with vLLM's exactly; only the last verification of an answer can differ in the deeper positions.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from mtp_train.records import PromptAcceptance


def keep(new_tokens: Sequence[int], *, remaining: int, stop_ids: Container[int]) -> tuple[int, Literal["stop", "length"] | None]:
    """How many of ``new_tokens`` the answer keeps, ``remaining`` being its room, and why it ends there (None: it goes on).

    A stop token is kept and ends the answer; so does the last token that there is room for.
    """
    assert remaining >= 1, remaining
    for index, token in enumerate(new_tokens[:remaining]):
        if token in stop_ids:
            return index + 1, "stop"
    return min(len(new_tokens), remaining), "length" if len(new_tokens) >= remaining else None


class Tally:
    """Counts verifications of one answer by position."""

    def __init__(self, *, num_speculative_tokens: int) -> None:
        self.num_drafts = 0
        self.drafted = [0] * num_speculative_tokens
        self.accepted = [0] * num_speculative_tokens
        self.accepted_flags: list[bool] = []

    def first_token(self) -> None:
        """The token that the prefill gives: emitted, never drafted."""
        self.accepted_flags.append(False)

    def verification(self, *, num_drafted: int, num_accepted: int, num_kept: int) -> None:
        """One verification of ``num_drafted`` tokens that accepted ``num_accepted``, of which with the target's own
        next token ``num_kept`` were kept."""
        assert 0 <= num_accepted <= num_drafted and 1 <= num_kept <= num_accepted + 1, (num_drafted, num_accepted, num_kept)
        counted = min(num_accepted, num_kept)
        self.num_drafts += 1
        for position in range(num_drafted):
            self.drafted[position] += 1
        for position in range(counted):
            self.accepted[position] += 1
        self.accepted_flags += [True] * counted + [False] * (num_kept - counted)

    def result(self, *, prompt_id: str, category: str, num_prompt_tokens: int, token_ids: Sequence[int]) -> PromptAcceptance:
        """The record of one answer."""
        assert len(token_ids) == len(self.accepted_flags), (len(token_ids), len(self.accepted_flags))
        return PromptAcceptance(
            prompt_id=prompt_id,
            category=category,
            num_prompt_tokens=num_prompt_tokens,
            token_ids=tuple(token_ids),
            accepted=tuple(self.accepted_flags),
            num_drafts=self.num_drafts,
            num_drafted_per_position=tuple(self.drafted),
            num_accepted_per_position=tuple(self.accepted),
        )


def num_passes_without_drafts(prompts: Sequence[PromptAcceptance]) -> int:
    """Passes of the target, the prefill left out, in which there was nothing to judge. Each emits one token of the target's own, as
    does each verification but one that the answer's end cuts."""
    return sum(p.accepted.count(False) - 1 - (p.num_drafts - (p.accepted[-1] is True)) for p in prompts if p.accepted)
