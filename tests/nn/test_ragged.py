"""The ragged KV cache: any split into forwards gives the same rows; tokens are taken back, kept along a tree, replaced."""

from __future__ import annotations

import pytest
import torch

from mtp_train.nn.attention import PackedAttention
from mtp_train.nn.ragged import FIRST_CAPACITY_TOKENS, RaggedAttention, RaggedCache
from mtp_train.nn.tree import Tree

SCALE = 0.3
LENGTH = 12


def tokens(seed: int, heads: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randn((heads, length, 8), generator=torch.Generator().manual_seed(seed))


def attend(cache: RaggedCache, slots: list[int], parts: list[tuple[torch.Tensor, ...]], **more):  # type: ignore[no-untyped-def]
    context = RaggedAttention(cache=cache, slots=slots, counts=[part[0].shape[1] for part in parts], **more)
    q, k, v = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    out = context.attend(0, q, k, v, scale=SCALE, window=None)
    context.commit()
    return out.split(context.counts, dim=1)


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return PackedAttention(bounds=(0, q.shape[1])).attend(0, q, k, v, scale=SCALE, window=None)


@pytest.mark.parametrize("num_slots", [2, 5])
def test_pieces_of_several_sequences_equal_each_in_one(num_slots: int) -> None:
    sequences = [(tokens(10 * s, 4), tokens(10 * s + 1, 2), tokens(10 * s + 2, 2)) for s in range(num_slots)]
    cache = RaggedCache(num_slots=num_slots)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for begin, end in ((0, 7), (7, 8), (8, 12)):
        order = list(reversed(range(num_slots)))
        outs = attend(cache, order, [tuple(x[:, begin:end] for x in sequences[s]) for s in order])
        for slot, out in zip(order, outs, strict=True):
            found[slot].append(out)
    for pieces, sequence in zip(found, sequences, strict=True):
        torch.testing.assert_close(torch.cat(pieces, 1), whole(*sequence), rtol=1e-5, atol=1e-5)
    assert cache.lengths == [LENGTH] * num_slots


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tree", [False, True])
def test_neighbours_that_attend_together_equal_each_alone(window: int | None, count: int, tree: bool) -> None:
    """Slots hold 6, 4, 90, 5 and 7 tokens: a pair is always worth it, three with one of 90 are not."""
    held = [6, 4, 90, 5, 7]
    sees = Tree([-1, 0, 0][:count])
    trees = [sees, None, None, sees, sees] if tree else None
    caches = RaggedCache(num_slots=5), RaggedCache(num_slots=5)
    for slot, length in enumerate(held):
        for cache in caches:
            attend(cache, [slot], [(tokens(slot, 4, length), tokens(slot + 10, 2, length), tokens(slot + 20, 2, length))])
    new = [(tokens(s + 30, 4, count), tokens(s + 40, 2, count), tokens(s + 50, 2, count)) for s in range(5)]

    def run(cache: RaggedCache, slots: list[int]) -> tuple[torch.Tensor, RaggedAttention]:
        chosen = None if trees is None else [trees[slot] for slot in slots]
        context = RaggedAttention(cache=cache, slots=slots, counts=[count] * len(slots), trees=chosen)
        q, k, v = (torch.cat([new[slot][i] for slot in slots], 1) for i in range(3))
        return context.attend(0, q, k, v, scale=SCALE, window=window), context

    together, context = run(caches[0], list(range(5)))
    assert context._runs() == [(0, 2), (2, 4), (4, 5)]
    alone = torch.cat([run(caches[1], [slot])[0] for slot in range(5)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_tokens_taken_back_leave_no_trace() -> None:
    q, k, v = tokens(0, 4), tokens(1, 2), tokens(2, 2)
    cache = RaggedCache(num_slots=1)
    attend(cache, [0], [(q[:, :8], k[:, :8], v[:, :8])])
    attend(cache, [0], [(tokens(7, 4, 3), tokens(8, 2, 3), tokens(9, 2, 3))])
    cache.truncate(0, 8)
    (out,) = attend(cache, [0], [(q[:, 8:], k[:, 8:], v[:, 8:])])
    torch.testing.assert_close(out, whole(q, k, v)[:, 8:], rtol=1e-5, atol=1e-5)


def test_a_tree_sees_its_ancestors_and_keeps_one_path() -> None:
    """Rows 8..11 as a tree: 8 - 9 and 8 - 10 - 11; the path 8, 10, 11 equals those rows as a chain."""
    q, k, v = tokens(0, 4), tokens(1, 2), tokens(2, 2)
    cache = RaggedCache(num_slots=1)
    attend(cache, [0], [(q[:, :8], k[:, :8], v[:, :8])])
    (tree,) = attend(cache, [0], [(q[:, 8:], k[:, 8:], v[:, 8:])], trees=[Tree([-1, 0, 0, 2])])
    path = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    chain = whole(q[:, path], k[:, path], v[:, path])
    torch.testing.assert_close(tree[:, [0, 2, 3]], chain[:, 8:], rtol=1e-5, atol=1e-5)
    cache.keep(0, 8, [0, 2, 3])
    new = (tokens(3, 4, 1), tokens(4, 2, 1), tokens(5, 2, 1))
    (out,) = attend(cache, [0], [new])
    longer = whole(*(torch.cat([x[:, path], n], 1) for x, n in zip((q, k, v), new, strict=True)))
    torch.testing.assert_close(out, longer[:, -1:], rtol=1e-5, atol=1e-5)


def test_the_cache_grows_and_slots_are_used_again() -> None:
    long = FIRST_CAPACITY_TOKENS + 50
    q, k, v = tokens(0, 2, long), tokens(1, 2, long), tokens(2, 2, long)
    cache = RaggedCache(num_slots=2)
    attend(cache, [0], [(q[:, :10], k[:, :10], v[:, :10])])
    (out,) = attend(cache, [0], [(q[:, 10:], k[:, 10:], v[:, 10:])])
    torch.testing.assert_close(out, whole(q, k, v)[:, 10:], rtol=1e-5, atol=1e-5)
    assert cache.capacity == 2 * FIRST_CAPACITY_TOKENS
    cache.clear(0)
    (out,) = attend(cache, [0], [(q[:, :5], k[:, :5], v[:, :5])])
    torch.testing.assert_close(out, whole(q[:, :5], k[:, :5], v[:, :5]), rtol=1e-5, atol=1e-5)


def test_committing_twice_is_a_fault_of_ours() -> None:
    cache = RaggedCache(num_slots=1)
    context = RaggedAttention(cache=cache, slots=[0], counts=[2])
    context.commit()
    with pytest.raises(AssertionError, match="committed twice"):
        context.commit()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_tree_that_grows_over_several_forwards_equals_each_path_as_a_chain(window: int | None, num_slots: int) -> None:
    """Rows of one depth in one forward, as a head drafts; in a sliding window, positions count and not where rows are stored."""
    parents, levels = [-1, -1, 0, 0, 1, 2, 4], [(0, 2), (2, 5), (5, 7)]
    known = 8
    sequences = [(tokens(3 * s, 4, known + 7), tokens(3 * s + 1, 2, known + 7), tokens(3 * s + 2, 2, known + 7)) for s in range(num_slots)]
    cache = RaggedCache(num_slots=num_slots)
    slots = list(range(num_slots))
    attend(cache, slots, [tuple(x[:, :known] for x in sequence) for sequence in sequences])
    outs = []
    for first, last in levels:
        trees = [Tree(parents[:last])] * num_slots
        context = RaggedAttention(cache=cache, slots=slots, counts=[last - first] * num_slots, trees=trees)
        assert context.positions(torch.device("cpu")).tolist() == [known + depth for depth in trees[0].depth[first:]] * num_slots
        q, k, v = (torch.cat([sequence[i][:, known + first : known + last] for sequence in sequences], 1) for i in range(3))
        outs.append(context.attend(0, q, k, v, scale=SCALE, window=window).split(last - first, dim=1))
        context.commit()
    for slot, sequence in enumerate(sequences):
        found = torch.cat([out[slot] for out in outs], 1)
        for node in range(len(parents)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            rows = [*range(known), *(known + row for row in path)]
            chain = PackedAttention(bounds=(0, len(rows))).attend(0, *(x[:, rows] for x in sequence), scale=SCALE, window=window)
            torch.testing.assert_close(found[:, node], chain[:, -1], rtol=1e-5, atol=1e-5)
