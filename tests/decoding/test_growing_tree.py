"""Children are the most probable tokens, or follow q without replacement; what is kept of a tree is a tree."""

from __future__ import annotations

import itertools

import pytest
import torch

from mtp_train.acceptance.draft import ROOT
from mtp_train.decoding.growing_tree import Children, GrowingTree, drawn, most_probable


def _rows(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_the_most_probable_tokens_come_in_their_order() -> None:
    logits = _rows(3, 7)
    logits[2, 3:] = float("-inf")
    found = most_probable(logits, [1, 4, 5])
    q = logits.softmax(-1)
    for row, (children, count) in enumerate(zip(found, (1, 4, 3), strict=True)):
        assert children.token_ids == q[row].sort(descending=True).indices[:count].tolist(), "tokens of probability 0 are left out"
        assert children.shares == pytest.approx(q[row, children.token_ids].tolist()) and children.bounds == children.shares
        assert children.q_V is None
    tied = torch.tensor([[0.0, 5.0, 5.0, 5.0]])
    assert most_probable(tied, [1])[0].token_ids == [int(tied.argmax())]


def test_drawn_tokens_follow_q_without_replacement() -> None:
    """Frequencies of ordered pairs against q(a) q(b) / (1 - q(a)), by total variation."""
    vocabulary, num = 5, 8000
    logits = _rows(1, vocabulary, seed=2)
    generators = [torch.Generator().manual_seed(0)] * num
    found = drawn(logits.expand(num, -1), [2] * num, generators, temperature=1.5, top_p=1.0)
    q = (logits[0].double() / 1.5).softmax(-1)
    pairs = list(itertools.permutations(range(vocabulary), 2))
    expected = torch.stack([q[a] * q[b] / (1 - q[a]) for a, b in pairs])
    codes = torch.tensor([pairs.index((a, b)) for a, b in (children.token_ids for children in found)])
    frequencies = torch.bincount(codes, minlength=len(pairs)).double() / num
    bound = float((expected * (1 - expected) / num).sqrt().sum() / 2)
    assert float((frequencies - expected).abs().sum() / 2) < bound + 2 / num**0.5
    first = found[0]
    assert first.q_V is not None and torch.allclose(first.q_V.double(), q, atol=1e-6)
    assert first.shares == pytest.approx([float(q[token]) for token in first.token_ids])
    assert first.bounds[0] == pytest.approx(float(q.max())) and all(b >= s for b, s in zip(first.bounds, first.shares, strict=True))


def test_where_q_has_fewer_tokens_fewer_are_drawn() -> None:
    logits = torch.tensor([[3.0, 2.0, -9.0, -9.0], [0.0, 0.0, 0.0, 0.0]])
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    found = drawn(logits, [4, 3], generators, temperature=1.0, top_p=0.99)
    assert sorted(found[0].token_ids) == [0, 1] and len(found[1].token_ids) == 3


def test_more_children_than_tokens_cost_no_more_than_the_tokens() -> None:
    """A tree may be as wide as one likes: nothing is drawn, or made room for, beyond the vocabulary."""
    few, many = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    (all_drawn,), (asked,) = (drawn(_rows(1, 6), [n], [g], temperature=1.0, top_p=1.0) for n, g in ((6, few), (6000, many)))
    assert asked.token_ids == all_drawn.token_ids and torch.equal(few.get_state(), many.get_state())


def test_a_row_s_draws_do_not_hang_on_its_neighbours() -> None:
    logits = _rows(3, 6)
    together = drawn(logits, [2, 1, 3], [torch.Generator().manual_seed(s) for s in range(3)], temperature=1.0, top_p=1.0)
    for row, count in enumerate((2, 1, 3)):
        (alone,) = drawn(logits[row : row + 1], [count], [torch.Generator().manual_seed(row)], temperature=1.0, top_p=1.0)
        assert alone.token_ids == together[row].token_ids


def _grown(*, seed: int, temperature: float) -> GrowingTree:
    """Three depths of three children each."""
    tree = GrowingTree(slot=0, generator=torch.Generator().manual_seed(seed))
    nodes = [ROOT]
    for depth in range(3):
        logits = _rows(len(nodes), 8, seed=100 * seed + depth)
        counts = [3] * len(nodes)
        found = (
            most_probable(logits, counts)
            if temperature == 0
            else drawn(logits, counts, [tree.generator] * len(nodes), temperature=1.0, top_p=1.0)
        )
        nodes = [node for parent, children in zip(nodes, found, strict=True) for node in tree.add(parent, children)]
    return tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_nodes", [1, 4, 11, 39, 100])
def test_the_best_nodes_are_a_tree(num_nodes: int, temperature: float) -> None:
    for seed in range(20):
        tree = _grown(seed=seed, temperature=temperature)
        kept = tree.best(num_nodes)
        assert len(kept) == min(num_nodes, 39) and kept == sorted(kept)
        for node in kept:
            assert tree.parents[node] in (ROOT, *kept)
            elder = [other for other in range(node) if tree.parents[other] == tree.parents[node]]
            assert set(elder) <= set(kept), "siblings are tried in the order in which they were drawn"
        assert min(tree.bound[node] for node in kept) >= max((tree.bound[n] for n in range(39) if n not in kept), default=0.0)
        draft = tree.draft(kept)
        assert draft.num_candidates == len(kept)
        for index, node in enumerate(kept):
            assert draft.token_ids[index] == tree.token_ids[node]
            assert draft.parents[index] == (ROOT if tree.parents[node] == ROOT else kept.index(tree.parents[node]))
            if temperature:
                assert draft.q_PV is not None
                share = float(draft.q_PV[draft.q_rows[index], draft.token_ids[index]])
                above = 1.0 if tree.parents[node] == ROOT else tree.confidence[tree.parents[node]]
                assert above * share == pytest.approx(tree.confidence[node])


def test_whether_a_drawn_node_is_kept_does_not_hang_on_its_own_token() -> None:
    """Each node's token put in place of any other, with a subtree of its own behind it: the node stays, or stays away."""
    q = torch.tensor([0.5, 0.3, 0.15, 0.05])

    def tree_with(first: int, second: int) -> GrowingTree:
        tree = GrowingTree(slot=0, generator=None)
        tokens = [first, second]
        bounds = [float(q.max()), float(max(q[t] for t in range(4) if t != first))]
        nodes = tree.add(ROOT, Children(tokens, [float(q[t]) for t in tokens], bounds, q))
        for node in tree.most_confident(nodes, width=1, at_least=0.0):
            tree.add(node, Children([0, 1], [0.9, 0.1], [0.9, 0.1], q))
        return tree

    for num_nodes in range(1, 5):
        for second in range(4):
            kept = {0 in tree_with(first, second).best(num_nodes) for first in range(4) if first != second}
            assert len(kept) == 1
        for first in range(4):
            kept = {1 in tree_with(first, second).best(num_nodes) for second in range(4) if first != second}
            assert len(kept) == 1


def test_few_nodes_are_expanded_the_most_confident() -> None:
    tree = GrowingTree(slot=0, generator=None)
    nodes = tree.add(ROOT, Children([5, 6, 7, 8], [0.1, 0.4, 0.4, 0.05], [0.5] * 4, None))
    assert tree.most_confident(nodes, width=2, at_least=0.0) == [1, 2]
    assert tree.most_confident(nodes, width=3, at_least=0.0) == [0, 1, 2]
    assert tree.most_confident(nodes, width=3, at_least=0.2) == [1, 2]
    assert tree.most_confident(nodes, width=1, at_least=0.0) == [1], "of equals the earlier"
    assert tree.most_confident(nodes, width=3, at_least=0.5) == []
