"""The acceptance estimate: what real drafts would have had accepted, counted on the target's own text without decoding.

Given for every base of an answer which drafted tokens the target would take (``hits``), *walk* as a decoder does: start
at the last prompt position, count the leading hits, jump hits + 1. Bases that a draft never starts from don't count;
counting them all (agreement) is biased, since runs of hits are skipped by real drafts.

For text drawn from the target (temperature above 0) with drafts drawn from q, ``coupled_hits`` is exact in distribution:
under the rule of Leviathan et al. 2023 the emitted token y has distribution p, and given y it was the accepted draft with
probability min(p(y), q(y)) / p(y) (the maximal coupling of p and q). So one may take the text as what was emitted and
throw that coin. With greedy drafts q is one-hot and the coin is "y is the draft's argmax".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mtp_train.acceptance.tally import Tally
from mtp_train.records import PromptAcceptance


class Answer(NamedTuple):
    """One answer within a sample: rows ``first`` .. ``last - 1`` are the target's own tokens."""

    first: int
    last: int


def answers(loss_mask: Sequence[bool]) -> list[Answer]:
    """The runs of the target's own tokens, one per assistant turn. A run at row 0 gives its first token to the prompt,
    since nothing stands before it to draft from."""
    found: list[Answer] = []
    start: int | None = None
    for row, own in enumerate([*loss_mask, False]):
        if own and start is None:
            start = row
        elif not own and start is not None:
            if row > max(start, 1):
                found.append(Answer(max(start, 1), row))
            start = None
    return found


def bases(answer: Answer) -> range:
    """The bases that a draft can start from with at least one token of the answer to speak about: base i speaks about
    x_{i + 2} first, and the answer's first token is never drafted."""
    return range(answer.first - 1, answer.last - 2)


def coupled_hits(p_M: torch.Tensor, q_M: torch.Tensor, uniform_M: torch.Tensor) -> torch.Tensor:
    """Whether the emitted token was the accepted draft, bool (M,), from its probabilities under p and q."""
    return uniform_M.double() * p_M.double() < q_M.double()


def walk(
    hits: Sequence[Sequence[bool]],
    *,
    prompt_id: str,
    category: str,
    num_prompt_tokens: int,
    token_ids: Sequence[int],
    num_speculative_tokens: int,
    max_new_tokens: int,
) -> PromptAcceptance:
    """Count acceptance along one answer as ``speculate`` would, ending as it ended.

    ``hits[b][k]``: the target takes the token that base ``num_prompt_tokens - 1 + b`` drafts at depth k; there are
    ``len(token_ids) - 1`` bases, and what a draft says beyond the answer is not looked at. ``max_new_tokens`` is the
    limit that the answer was generated under.
    """
    num_tokens = len(token_ids)
    if not 1 <= num_tokens <= max_new_tokens:
        raise ValueError(
            f"{prompt_id}: expected an answer of 1 to max_new_tokens={max_new_tokens} tokens, found {num_tokens}; "
            "give the limit that the answers were generated under"
        )
    assert len(hits) == num_tokens - 1, (len(hits), num_tokens)
    tally = Tally(num_speculative_tokens=num_speculative_tokens)
    tally.first_token()
    emitted = 1
    while emitted < num_tokens:
        num_drafted = min(num_speculative_tokens, max_new_tokens - emitted)
        left = num_tokens - emitted
        leading = hits[emitted - 1][: min(num_drafted, left)]
        num_accepted = leading.index(False) if False in leading else len(leading)
        num_kept = min(num_accepted + 1, left)
        tally.verification(num_drafted=num_drafted, num_accepted=num_accepted, num_kept=num_kept)
        emitted += num_kept
    return tally.result(prompt_id=prompt_id, category=category, num_prompt_tokens=num_prompt_tokens, token_ids=token_ids)
