"""The walk counts only where a draft would have started, and ends where the answer ended."""

import pytest
import torch

from mtp_train.acceptance.estimate import Answer, answers, bases, coupled_hits, walk
from mtp_train.acceptance.tally import Tally, keep


def _walk(hits, *, num_tokens, max_new_tokens=100, k=3):
    return walk(
        hits,
        prompt_id="p",
        category="c",
        num_prompt_tokens=4,
        token_ids=list(range(num_tokens)),
        num_speculative_tokens=k,
        max_new_tokens=max_new_tokens,
    )


def test_counts_leading_hits_and_jumps_over_them():
    y, n = True, False
    # Token 0 comes from the prefill. The draft at base 0 is right twice: tokens 1, 2, and 3 from the target itself.
    # The next draft starts from base 3 (hits of bases 1 and 2 are skipped) and misses: token 4. Base 4 would hit, token 5.
    hits = [[y, y, n], [y, y, y], [y, y, y], [n, y, y], [y, n, n]]
    found = _walk(hits, num_tokens=6)
    assert found.accepted == (n, y, y, n, n, y)
    assert found.num_drafts == 3
    assert found.num_accepted_per_position == (2, 1, 0)
    assert found.num_drafted_per_position == (3, 3, 3)


def test_the_length_limit_cuts_what_is_drafted_and_an_end_token_what_is_accepted():
    always = [[True] * 3 for _ in range(4)]
    at_limit = _walk(always, num_tokens=5, max_new_tokens=5, k=3)
    # Emitted 1, then 3 drafts and the bonus token: all five.
    assert (at_limit.num_drafts, at_limit.num_drafted_per_position, at_limit.num_accepted_per_position) == (1, (1, 1, 1), (1, 1, 1))
    short = _walk(always[:2], num_tokens=3, max_new_tokens=3, k=3)
    assert (short.num_drafted_per_position, short.num_accepted_per_position, short.accepted) == ((1, 1, 0), (1, 1, 0), (False, True, True))
    stopped = _walk(always[:2], num_tokens=3, max_new_tokens=100, k=3)
    assert (stopped.num_drafted_per_position, stopped.num_accepted_per_position) == ((1, 1, 1), (1, 1, 0))


def test_an_answer_of_one_token_has_no_drafts():
    assert _walk([], num_tokens=1).num_drafts == 0


def test_a_limit_below_the_answer_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens=3"):
        _walk([[True] * 3] * 4, num_tokens=5, max_new_tokens=3)


def test_answers_are_the_runs_of_the_mask():
    assert answers([False, False, True, True, False, True]) == [Answer(2, 4), Answer(5, 6)]
    assert answers([True, True, True]) == [Answer(1, 3)]
    assert answers([True, False]) == []
    assert list(bases(Answer(2, 6))) == [1, 2, 3]


def test_what_is_kept_of_a_verification():
    assert keep([5, 6, 7], remaining=9, stop_ids=()) == (3, None)
    assert keep([5, 6, 7], remaining=3, stop_ids=()) == (3, "length")
    assert keep([5, 6, 7], remaining=2, stop_ids={7}) == (2, "length")
    assert keep([5, 6, 7], remaining=3, stop_ids={6}) == (2, "stop")
    assert keep([5, 6, 7], remaining=3, stop_ids={7}) == (3, "stop")


def test_tally_does_not_count_what_is_cut():
    tally = Tally(num_speculative_tokens=3)
    tally.first_token()
    tally.verification(num_drafted=3, num_accepted=3, num_kept=2)
    assert (tally.num_drafts, tally.drafted, tally.accepted, tally.accepted_flags) == (1, [1, 1, 1], [1, 1, 0], [False, True, True])


def test_coupled_hits_accept_with_the_overlap():
    """Over text drawn from p, the share of hits is sum min(p, q), and hits have the law of accepted drafts: min(p, q)."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 6, generator=generator).softmax(-1)
    text = p.multinomial(40_000, replacement=True, generator=generator)
    hits = coupled_hits(p[text], q[text], torch.rand(40_000, generator=generator, dtype=torch.float64))
    overlap = torch.minimum(p, q)
    found = torch.bincount(text[hits], minlength=6) / 40_000
    assert (found - overlap).abs().max() < 4 * (0.25 / 40_000) ** 0.5
