"""The dynamic tree expands its most confident nodes, keeps the best of all, and stops where none is confident enough."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mtp_train.decoding.dynamic_tree import DynamicTree
from mtp_train.decoding.growing_tree import GrowingTree
from mtp_train.decoding.head_rows import HeadRows, Reading

ALL = DynamicTree(max_depth=4, width=3, max_nodes=1000, min_confidence=0.0, refresh=True)


def _drafted(head, settings, bases, temperature=0.0):
    """The draft and the tree that it was cut from."""
    drafter = settings.drafter(head=head, num_slots=3, temperature=temperature, top_p=1.0)
    trees: list[GrowingTree] = []
    keep = drafter.keep
    drafter.keep = lambda tree: trees.append(tree) or keep(tree)
    return drafter.propose(bases), trees


@torch.inference_mode()
def test_confidence_is_q_along_the_path_multiplied(head, text_of, bases_of):
    tokens, hidden = text_of(9, 1)
    (draft,), (tree,) = _drafted(head, ALL, [bases_of(0, tokens, hidden, 0, 8)])
    assert len(draft.token_ids) == 3 + 9 + 9 + 9
    for node in range(len(draft.token_ids)):
        rows = HeadRows(head=head, num_slots=1, refresh=True)
        _, hidden_BD, feedback = rows.enter([bases_of(0, tokens, hidden, 0, 8)])
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = draft.parents[at]
        expected = 1.0
        for step, on_path in enumerate(path):
            token = draft.token_ids[on_path]
            expected *= float(rows.logits(hidden_BD)[0].softmax(-1)[token])
            hidden_BD, feedback = rows.read([Reading(0, [step], [step - 1], [token])], feedback)
        assert tree.confidence[node] == pytest.approx(expected, rel=1e-3)


@torch.inference_mode()
def test_the_most_confident_of_each_depth_are_expanded_and_the_best_of_all_are_kept(head, text_of, bases_of):
    texts = [text_of(length, seed) for seed, length in enumerate((9, 2, 30))]
    bases = [bases_of(slot, *text, 0, len(text[0]) - 1) for slot, text in enumerate(texts)]
    whole, trees = _drafted(head, ALL, bases)
    few, _ = _drafted(head, dataclasses.replace(ALL, max_nodes=7), bases)
    for all_nodes, draft, tree in zip(whole, few, trees, strict=True):
        depth = [len(ranks) for ranks in tree.ranks]
        for level in (1, 2, 3):
            here = [node for node in range(len(depth)) if depth[node] == level]
            expanded = {tree.parents[node] for node in range(len(depth)) if depth[node] == level + 1}
            assert expanded == set(sorted(here, key=lambda node: -tree.confidence[node])[:3])
        best = sorted(range(len(depth)), key=lambda node: -tree.confidence[node])[:7]
        assert sorted(tree.ranks[node] for node in best) == sorted(
            tree.ranks[node] for node in range(len(depth)) if tree.confidence[node] >= min(tree.confidence[n] for n in best)
        )
        assert draft.token_ids == [all_nodes.token_ids[node] for node in sorted(best)]


@torch.inference_mode()
def test_it_stops_early_where_no_node_is_confident(head, text_of, bases_of):
    texts = [text_of(length, seed) for seed, length in enumerate((9, 2, 30))]
    bases = [bases_of(slot, *text, 0, len(text[0]) - 1) for slot, text in enumerate(texts)]
    _, trees = _drafted(head, ALL, bases)
    tops = sorted(max(tree.confidence) for tree in trees)
    bar = (tops[0] + tops[1]) / 2
    early, cut = _drafted(head, dataclasses.replace(ALL, min_confidence=bar), bases)
    for draft, tree in zip(early, cut, strict=True):
        expanded = {parent for parent in tree.parents if parent >= 0}
        assert expanded == {node for node in range(len(tree.parents)) if tree.confidence[node] >= bar and len(tree.ranks[node]) < 4}
        assert draft.depth == max(len(ranks) for ranks in tree.ranks)
    assert min(draft.depth for draft in early) == 1 < max(draft.depth for draft in early)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"width": 0}, r"decoding\.width"), ({"max_nodes": 0}, r"decoding\.max_nodes"), ({"min_confidence": 1.0}, "a probability from 0")],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ALL, **change)
