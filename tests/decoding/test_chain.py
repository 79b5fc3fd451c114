"""After a rejection the head's cache is what it would be had it never guessed; its drafts are those of a fresh unroll."""

from __future__ import annotations

import pytest
import torch

from mtp_train.decoding.base import NewBases
from mtp_train.decoding.chain import Chain, ChainDrafter
from mtp_train.records import Batch

V, D = 96, 32


def _drafter(head, *, k=3, slots=3, temperature=0.0, refresh=True):
    return ChainDrafter(head=head, num_slots=slots, num_speculative_tokens=k, temperature=temperature, top_p=1.0, refresh=refresh)


def _unrolled_drafts(head, tokens, hidden, base, k):
    """The drafts at a base by ``unroll``, which reads the text: give it each draft as the text's next token."""
    text = list(tokens[: base + 2])
    for depth in range(k):
        padded = torch.tensor([*text, *[0] * (base + 2 + k - len(text))])
        count = len(padded)
        batch = Batch(
            token_ids_T=padded,
            loss_mask_T=torch.ones(count, dtype=torch.bool),
            hidden_TD=torch.cat([hidden[: base + 1], torch.zeros(count - base - 1, D)]),
            sample_T=torch.zeros(count, dtype=torch.int64),
            position_T=torch.arange(count),
            bounds=(0, count),
            sample_ids=("a",),
        )
        steps = head.unroll(batch)
        for _ in range(depth + 1):
            step = next(steps)
        text.append(int(step.project(step.hidden_TD[base]).argmax()))
    return text[base + 2 :]


@torch.inference_mode()
def test_drafts_are_those_of_the_unroll_for_sequences_of_different_lengths(head, text_of, bases_of):
    drafter = _drafter(head, k=4)
    texts = [text_of(length, seed) for seed, length in enumerate((9, 2, 30))]
    chains = drafter.propose([bases_of(slot, tokens, hidden, 0, len(tokens) - 1) for slot, (tokens, hidden) in enumerate(texts)])
    for chain, (tokens, hidden) in zip(chains, texts, strict=True):
        assert chain.token_ids == _unrolled_drafts(head, tokens, hidden, len(tokens) - 2, 4)
        assert chain.q_PV is None


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
@torch.inference_mode()
def test_refreshed_cache_equals_one_computed_from_scratch(head, num_accepted, text_of, bases_of, held_by):
    """Rounds of drafting, rejection and refresh against one pass over the final text with the target's hidden states."""
    drafter = _drafter(head)
    tokens, hidden = text_of(40, 1)
    known = 6
    for slot in (0, 2):
        drafter.propose([bases_of(slot, tokens, hidden, 0, known - 1)])
    while known + num_accepted + 1 < len(tokens):
        for slot in (2, 0):
            assert drafter.settle(slot, range(num_accepted), ()) == 0
        last = known + num_accepted
        drafter.propose([bases_of(slot, tokens, hidden, known - 1, last, drafts=slot == 0) for slot in (2, 0)])
        known = last + 1
    drafter.settle(0, (), ())
    fresh = _drafter(head)
    fresh.propose([bases_of(1, tokens, hidden, 0, known - 1, drafts=False)])
    for slot in (0, 2):
        assert drafter.cache.lengths[slot] == known - 1
        for ours, theirs in zip(held_by(drafter.cache, slot), held_by(fresh.cache, 1), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
@torch.inference_mode()
def test_without_refresh_the_heads_own_entries_of_accepted_tokens_stay(head, num_accepted, text_of, bases_of, held_by):
    drafter = _drafter(head, refresh=False)
    tokens, hidden = text_of(12, 2)
    (chain,) = drafter.propose([bases_of(0, tokens, hidden, 0, 7)])
    before = [part.clone() for part in held_by(drafter.cache, 0)]
    assert drafter.cache.lengths[0] == 7 + 2  # the bases, and the own entries of the first two of three drafts
    held = drafter.settle(0, range(num_accepted), ())
    assert held == min(num_accepted, 2) and drafter.cache.lengths[0] == 7 + held
    text = [*tokens[:8], *chain.token_ids[:num_accepted], 5]
    drafter.propose([NewBases(slot=0, token_ids=text[8 + held :], hidden_BD=hidden[7 + held : 8 + num_accepted], drafts=False)])
    after = held_by(drafter.cache, 0)
    assert drafter.cache.lengths[0] == 7 + num_accepted + 1
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours[:, : 7 + held], theirs[:, : 7 + held])
    fresh = _drafter(head)
    fresh.propose([NewBases(slot=0, token_ids=text[1:], hidden_BD=hidden[: len(text) - 1], drafts=False)])
    refreshed = held_by(fresh.cache, 0)[0]
    same = (after[0] - refreshed).abs().amax((0, 2)) < 1e-4
    assert same[:7].all() and not same[7 : 7 + held].any()


@torch.inference_mode()
def test_drawn_drafts_follow_q(head, text_of, bases_of):
    """Frequencies of the first of two drafts against q, by total variation, and q of the second given the first."""
    tokens, hidden = text_of(5, 3)
    num = 4000
    drafter = _drafter(head, k=2, slots=num, temperature=2.0)
    generators = [torch.Generator().manual_seed(seed) for seed in range(num)]
    chains = drafter.propose([bases_of(slot, tokens, hidden, 0, 4, generator=generators[slot]) for slot in range(num)])
    q = chains[0].q_PV[0].double()
    assert all(torch.allclose(chain.q_PV[0].double(), q, atol=1e-5) for chain in chains)
    found = torch.bincount(torch.tensor([chain.token_ids[0] for chain in chains]), minlength=V).double() / num
    bound = float((q * (1 - q) / num).sqrt().sum() / 2)
    assert float((found - q).abs().sum() / 2) < bound + 2 / num**0.5
    one, two = [next(chain for chain in chains if chain.token_ids[0] == first) for first in found.topk(2).indices.tolist()]
    assert not torch.allclose(one.q_PV[1], two.q_PV[1], atol=1e-3)


def test_no_draft_tokens_are_refused():
    with pytest.raises(ValueError, match="at least 1, found 0"):
        Chain(num_speculative_tokens=0, refresh=True)
