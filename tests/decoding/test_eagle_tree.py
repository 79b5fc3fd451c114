"""The static tree fills its places with the head's tokens along each path, and its entries are kept along the accepted one."""

from __future__ import annotations

import math

import pytest
import torch

from mtp_train.decoding.base import NewBases
from mtp_train.decoding.chain import ChainDrafter
from mtp_train.decoding.eagle_tree import EagleTree, EagleTreeDrafter, places
from mtp_train.decoding.head_rows import HeadRows, Reading

SHAPE = (3, 4, 2, 1)


def _drafter(head, *, shape=SHAPE, slots=3, temperature=0.0, refresh=True) -> EagleTreeDrafter:
    return EagleTreeDrafter(head=head, num_slots=slots, nodes_per_depth=shape, temperature=temperature, top_p=1.0, refresh=refresh)


@pytest.mark.parametrize("shape", [(4, 8, 8, 4, 2), SHAPE, (1, 1, 1), (5,), (1, 9)])
def test_places_are_a_tree_of_that_many_nodes_per_depth(shape):
    found = places(shape)
    assert [sum(len(node) == depth + 1 for node in found) for depth in range(len(shape))] == list(shape)
    for node in found:
        assert node[:-1] in ((), *found)
        assert all((*node[:-1], place) in found for place in range(node[-1])), "no place before an elder sibling's"
        cost = math.prod(place + 1 for place in node)
        later = [(*node[:-1], node[-1] + 1)]
        assert all(math.prod(place + 1 for place in other) >= cost for other in later)
    assert places((1, 1)) == [(0,), (0, 0)] and places((2, 3)) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("shape", [(4, 8, 8, 4, 2), (2, 12, 3), (9, 2, 9), (1, 6, 6)])
def test_places_are_those_of_the_smallest_products(shape):
    """Against all places that there are."""
    level, found = [()], []
    for count in shape:
        level = sorted(
            ((*node, place) for node in level for place in range(count)), key=lambda node: (math.prod(i + 1 for i in node), node)
        )
        level = level[:count]
        found += level
    assert places(shape) == found


def _path(parents, node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@torch.inference_mode()
def test_each_node_is_what_the_head_says_behind_its_path(head, text_of, bases_of):
    """Against the head reading each path alone, for sequences of different lengths."""
    texts = [text_of(length, seed) for seed, length in enumerate((9, 2, 30))]
    drafts = _drafter(head).propose([bases_of(slot, *text, 0, len(text[0]) - 1) for slot, text in enumerate(texts)])
    for (tokens, hidden), draft in zip(texts, drafts, strict=True):
        assert draft.q_PV is None and len(draft.token_ids) == sum(SHAPE)
        children = draft.children()
        for node in range(-1, len(draft.token_ids)):
            rows = HeadRows(head=head, num_slots=1, refresh=True)
            _, hidden_BD, feedback = rows.enter([bases_of(0, tokens, hidden, 0, len(tokens) - 1)])
            for step, on_path in enumerate(_path(draft.parents, node)):
                hidden_BD, feedback = rows.read([Reading(0, [step], [step - 1], [draft.token_ids[on_path]])], feedback)
            best = rows.logits(hidden_BD)[0].sort(descending=True).indices.tolist()
            assert [draft.token_ids[child] for child in children[node + 1]] == best[: len(children[node + 1])]


@torch.inference_mode()
def test_drawn_nodes_carry_what_they_were_drawn_from(head, text_of, bases_of):
    tokens, hidden = text_of(9, 1)
    drafter = _drafter(head, temperature=1.3)
    (draft,) = drafter.propose([bases_of(0, tokens, hidden, 0, 8, generator=torch.Generator().manual_seed(0))])
    for node in range(len(draft.token_ids)):
        rows = HeadRows(head=head, num_slots=1, refresh=True)
        _, hidden_BD, feedback = rows.enter([bases_of(0, tokens, hidden, 0, 8)])
        for step, on_path in enumerate(_path(draft.parents, draft.parents[node])):
            hidden_BD, feedback = rows.read([Reading(0, [step], [step - 1], [draft.token_ids[on_path]])], feedback)
        q = (rows.logits(hidden_BD)[0] / 1.3).softmax(-1)
        torch.testing.assert_close(draft.q_PV[draft.q_rows[node]], q, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("refresh", [True, False])
@torch.inference_mode()
def test_the_cache_after_a_round_is_that_of_a_chain_that_drafted_the_accepted_path(head, text_of, bases_of, held_by, refresh):
    """Every path to a node accepted in turn: with refresh nothing of the guesses is left, without the path's own entries are."""
    tokens, hidden = text_of(9, 1)
    paths = [[]] + [_path(_drafter(head).propose([bases_of(0, tokens, hidden, 0, 8)])[0].parents, node) for node in range(sum(SHAPE))]
    for path in paths:
        drafter = _drafter(head, refresh=refresh)
        # Slot 1 drafts at the same time and must not be touched.
        draft, other = drafter.propose([bases_of(slot, tokens, hidden, 0, 8) for slot in (0, 1)])
        before = [part.clone() for part in held_by(drafter.cache, 1)]
        held = drafter.settle(0, path, ())
        for ours, theirs in zip(held_by(drafter.cache, 1), before, strict=True):
            assert torch.equal(ours, theirs)
        assert other.token_ids == draft.token_ids
        accepted = [draft.token_ids[node] for node in path]
        rows = HeadRows(head=head, num_slots=1, refresh=False)
        _, _, feedback = rows.enter([bases_of(0, tokens, hidden, 0, 8)])
        # A node of the last depth, or one without children, was never read by the head.
        read = 0 if refresh else sum(bool(draft.children()[node + 1]) for node in path)
        assert held == read and drafter.cache.lengths[0] == 8 + read
        for step in range(read):
            _, feedback = rows.read([Reading(0, [step], [step - 1], [accepted[step]])], feedback)
        for ours, theirs in zip(held_by(drafter.cache, 0), held_by(rows.cache, 0), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_refreshed_cache_equals_one_computed_from_scratch(head, text_of, bases_of, held_by):
    drafter = _drafter(head)
    tokens, hidden = text_of(30, 1)
    (draft,) = drafter.propose([bases_of(0, tokens, hidden, 0, 5)])
    known = 6
    while known + 3 < len(tokens):
        path = _path(draft.parents, len(draft.token_ids) - 1)[:2]
        assert drafter.settle(0, path, ()) == 0
        (draft,) = drafter.propose([bases_of(0, tokens, hidden, known - 1, known + 2)])
        known += 3
    drafter.settle(0, (), ())
    fresh = ChainDrafter(head=head, num_slots=1, num_speculative_tokens=1, temperature=0.0, top_p=1.0, refresh=True)
    fresh.propose([NewBases(slot=0, token_ids=tokens[1:known], hidden_BD=hidden[: known - 1], drafts=False)])
    for ours, theirs in zip(held_by(drafter.cache, 0), held_by(fresh.cache, 0), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("nodes", [[], [4, 0], [-1]])
def test_impossible_shapes_are_refused(nodes):
    with pytest.raises(ValueError, match=r"decoding\.nodes_per_depth"):
        EagleTree(nodes_per_depth=nodes, refresh=True)


def test_the_settings_are_plain_json():
    tree = EagleTree(nodes_per_depth=[2, 1], refresh=True)
    assert tree.stated() == {"nodes_per_depth": [2, 1], "refresh": True}
    assert (tree.depth, tree.num_nodes, tree.num_rows) == (2, 3, 3)
