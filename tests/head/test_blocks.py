"""Heads of several blocks, one per depth: training's unroll is drafting with a cache, along chains and trees, and each block learns."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from mtp_train.acceptance.draft import ROOT
from mtp_train.batch.packing import pack
from mtp_train.decoding.base import NewBases
from mtp_train.decoding.head_rows import HeadRows, Reading
from mtp_train.head.pair import NORMS, PairHead
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.records import Batch, Sample

DEPTHS = 4
MakeHead = Callable[..., PairHead]
# All norms; and states that grow raw from depth to depth.
MIXTURES = {"all": dict.fromkeys(NORMS, True), "none": dict.fromkeys(NORMS, False)}


def unrolled(head: PairHead, batch: Batch) -> list[torch.Tensor]:
    with torch.no_grad():
        return [step.hidden_TD for step in itertools.islice(head.unroll(batch), DEPTHS)]


@pytest.mark.parametrize("num_blocks", [2, 3, 5])
@pytest.mark.parametrize("norms", MIXTURES.values(), ids=MIXTURES.keys())
@pytest.mark.parametrize("zero_first_embedding", [True, False])
def test_unroll_is_drafting_with_a_cache_from_every_base(
    make_head: MakeHead, batch: Batch, samples: list[Sample], num_blocks: int, norms: dict[str, bool], zero_first_embedding: bool
) -> None:
    """Blocks fewer than the depths, whose last one serves on, and more."""
    head = make_head(num_blocks=num_blocks, norms=norms, zero_first_embedding=zero_first_embedding)
    steps = unrolled(head, batch)
    for number, sample in enumerate(samples):
        cache = RaggedCache(num_slots=1)
        for base in range(sample.num_tokens - 1):
            hidden = sample.hidden_TD[base : base + 1]
            for depth in range(min(DEPTHS, sample.num_tokens - 1 - base)):
                context = RaggedAttention(cache=cache, slots=[0], counts=[1], depth=depth)
                with torch.no_grad():
                    out = head.draft(
                        token_ids_T=sample.token_ids_T[base + 1 + depth][None],
                        hidden_TD=hidden,
                        position_T=torch.tensor([base + depth]),
                        context=context,
                    )
                context.commit()
                row = batch.bounds[number] + base
                torch.testing.assert_close(steps[depth][row], out.hidden_TD[0], rtol=1e-4, atol=1e-5)
                hidden = out.feedback_TD
            cache.truncate(0, base + 1)


def test_a_decoder_that_reads_several_bases_at_once_and_drafts_a_tree_says_the_same(make_head: MakeHead) -> None:
    """Two sequences in slots, bases in pieces of several lengths; a tree whose one path is the text: its rows are unroll's, though
    other nodes stand between them."""
    head, draw = make_head(num_blocks=3), torch.Generator().manual_seed(9)
    texts = [
        Sample(
            sample_id=str(length),
            token_ids_T=torch.randint(0, 320, (length,), generator=draw),
            loss_mask_T=torch.ones(length, dtype=torch.bool),
            hidden_TD=torch.randn(length, 64, generator=draw),
        )
        for length in (13, 10)
    ]
    expected = [unrolled(head, pack([text])) for text in texts]
    rows = HeadRows(head=head, num_slots=2, refresh=True)
    for slot, text in enumerate(texts):
        rows.begin(slot, text.token_ids_T.tolist())
    first = [0, 0]
    for pieces in ([1, 3], [4, 2], [3, 1]):
        new = []
        for slot, (text, count) in enumerate(zip(texts, pieces, strict=True)):
            here = slice(first[slot], first[slot] + count)
            tokens = text.token_ids_T[here.start + 1 : here.stop + 1].tolist()
            new.append(NewBases(slot=slot, token_ids=tokens, hidden_BD=text.hidden_TD[here], drafts=True))
            first[slot] += count
        with torch.no_grad():
            found = rows.enter(new)
            hidden_RD, feedback_RD = found.hidden_BD, found.feedback_BD
            for depth in range(DEPTHS - 1):
                for slot in range(2):
                    base = first[slot] - 1
                    if base + 1 + depth < texts[slot].num_tokens:
                        apart = float((hidden_RD[slot] - expected[slot][depth][base]).abs().max())
                        assert apart < 1e-4, (slot, depth, base, apart)
                # Three nodes per depth and slot: the text's token, and two others, which follow the same parent.
                readings = []
                for slot, text in enumerate(texts):
                    place = min(first[slot] + 1 + depth, text.num_tokens - 1)
                    nodes, parent = [3 * depth, 3 * depth + 1, 3 * depth + 2], 3 * depth - 2 if depth else ROOT
                    token = int(text.token_ids_T[place])
                    readings.append(Reading(slot, nodes, [parent] * 3, [(token + 7) % 320, token, (token + 5) % 320]))
                drafted = rows.read(readings, feedback_RD.repeat_interleave(3, dim=0))
                hidden_RD, feedback_RD = drafted.hidden_TD[1::3], drafted.feedback_TD[1::3]
        for slot in range(2):
            assert rows.settle(slot, []) == 0


def test_packed_samples_are_those_alone(make_head: MakeHead, batch: Batch, samples: list[Sample]) -> None:
    head = make_head(num_blocks=2)
    together = unrolled(head, batch)
    for number, sample in enumerate(samples):
        for depth, alone in enumerate(unrolled(head, pack([sample]))):
            inside = max(0, sample.num_tokens - 1 - depth)
            rows = slice(batch.bounds[number], batch.bounds[number] + inside)
            torch.testing.assert_close(together[depth][rows], alone[:inside], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depths", [False, True])
def test_gradients_reach_every_block_also_where_depths_are_computed_again(make_head: MakeHead, batch: Batch, depths: bool) -> None:
    def gradients(head: PairHead) -> dict[str, torch.Tensor]:
        total = sum(step.hidden_TD.sin().sum() for step in itertools.islice(head.unroll(batch), 3))
        assert isinstance(total, torch.Tensor)
        total.backward()
        return {name: parameter.grad for name, parameter in head.named_parameters() if parameter.grad is not None}

    plain, again = make_head(num_blocks=3), make_head(num_blocks=3)
    again.recompute_activations(depths=depths)
    expected, found = gradients(plain), gradients(again)
    assert expected.keys() == found.keys() == dict(plain.named_parameters()).keys()
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_one_block_is_the_head_without_more_of_them(make_head: MakeHead, batch: Batch) -> None:
    """The first block's tensors keep their names, and the same seed draws the same numbers for them."""
    one, three = make_head(num_blocks=1), make_head(num_blocks=3)
    assert "num_blocks" not in one.settings() and three.settings()["num_blocks"] == 3
    shared = one.state_dict().keys()
    assert three.state_dict().keys() - shared == {f"later_blocks.{n}.{name}" for n in (0, 1) for name in shared}
    three.load_state_dict({**three.state_dict(), **one.state_dict()})
    assert torch.equal(unrolled(one, batch)[0], unrolled(three, batch)[0])
    assert not torch.allclose(unrolled(one, batch)[1], unrolled(three, batch)[1], atol=1e-3)


@pytest.mark.parametrize("norms", MIXTURES.values(), ids=MIXTURES.keys())
def test_least_squares_fits_each_block_to_its_depth(make_head: MakeHead, norms: dict[str, bool]) -> None:
    """Hidden states in which all of the past but the last three tokens is lost, in pieces of their own: what depth 1 is to say is a
    linear map of what depth 0 said and the token that it reads, up to the output norm."""
    head = make_head(num_blocks=2, norms=norms, init="least_squares")
    draw = torch.Generator().manual_seed(5)
    shift, read = torch.zeros(64, 64), torch.zeros(64, 64)
    shift[21:, :-21] = torch.eye(43)  # what stood in a third moves to the next one
    read[:21] = torch.randn(21, 64, generator=draw)

    def sample(number: int) -> Sample:
        ids = torch.randint(0, 320, (40,), generator=draw)
        embed, hidden = head.embed(ids), [torch.randn(64, generator=draw)]
        for position in range(39):
            raw = shift @ functional.rms_norm(hidden[-1] / _weight(head), (64,)) + read @ functional.rms_norm(embed[position + 1], (64,))
            hidden.append(functional.rms_norm(raw, (64,)) * _weight(head))
        return Sample(sample_id=str(number), token_ids_T=ids, loss_mask_T=torch.ones(40, dtype=torch.bool), hidden_TD=torch.stack(hidden))

    with torch.no_grad():
        head.start([pack([sample(number)]) for number in range(60)])
        unseen = pack([sample(99)])
        first, second = (step.hidden_TD for step in itertools.islice(head.unroll(unseen), 2))
    one = functional.cosine_similarity(first[3:38], unseen.hidden_TD[4:39]).mean()
    two = functional.cosine_similarity(second[3:37], unseen.hidden_TD[5:39]).mean()
    random = unrolled(make_head(num_blocks=2, norms=norms), unseen)[1]
    assert one > 0.9 and two > 0.8, (one, two)
    assert functional.cosine_similarity(random[3:37], unseen.hidden_TD[5:39]).mean() < 0.3


def _weight(head: PairHead) -> torch.Tensor:
    return head.output_norm.get_parameter("weight") if head.norms["output"] else torch.ones(64)


def test_what_cannot_be_is_refused(make_head: MakeHead) -> None:
    with pytest.raises(ValueError, match="num_blocks: expected at least 1, found 0"):
        make_head(num_blocks=0)
    with pytest.raises(ValueError, match=r"decoding\.refresh: expected true for a head of 2 blocks"):
        HeadRows(head=make_head(num_blocks=2), num_slots=1, refresh=False)
