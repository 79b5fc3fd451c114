"""The rule for trees: the chain's rule where there is one child per node, the target's law at every node, and wrong ones fail.

That whole texts keep the target's joint law, and that wrong rules do not, is shown by the certificate
(``tests/engine/test_certificate.py``).
"""

from __future__ import annotations

import math

import pytest
import torch

from mtp_train.acceptance.draft import ROOT, Draft, chain
from mtp_train.acceptance.verify import draw, expected_distance, verify_greedy, verify_sampled
from mtp_train.acceptance.verify_tree import verify_tree_greedy, verify_tree_sampled

V = 5


def _laws(rows: int, seed: int, vocabulary: int = V) -> torch.Tensor:
    return (1.5 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))).softmax(-1)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_chain_is_judged_as_by_the_chains_rule(drawn: bool) -> None:
    """The same uniform draws give the same tokens, over texts of all lengths."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(300):
        length = trial % 5
        p, q = _laws(length + 1, trial), _laws(length, 1000 + trial)
        tokens = [int(draw(row[None], torch.rand(1, generator=generator, dtype=torch.float64))) for row in q]
        uniform = torch.rand(length + 1, generator=generator, dtype=torch.float64)
        draft = chain(tokens, q if drawn and length else None)
        found = verify_tree_sampled(p_RV=p, draft=draft, uniform_R=uniform)
        (count,), (token,) = verify_sampled(p_RV=p, q_QV=q if drawn and length else None, drafts=[tokens], uniform_R=uniform)
        assert (found.path, found.next_token) == (list(range(count)), token)
        best = p.argmax(-1).tolist()
        (count,), (token,) = verify_greedy(best_R=best, drafts=[tokens])
        assert verify_tree_greedy(best_R=best, draft=draft) == (list(range(count)), token)


TREE = Draft(token_ids=[3, 1, 4, 3, 0, 2], parents=[ROOT, ROOT, 0, 1, 1, 3])


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ([2, 0, 0, 0, 0, 0, 0], ([], 2)),
        ([3, 4, 0, 2, 0, 0, 0], ([0, 2], 2)),
        ([1, 9, 3, 9, 2, 9, 0], ([1, 3, 5], 0)),
        ([1, 9, 0, 9, 9, 7, 9], ([1, 4], 7)),
        ([1, 9, 2, 9, 9, 9, 9], ([1], 2)),
    ],
)
def test_greedy_walks_along_the_argmax(best: list[int], expected: tuple[list[int], int]) -> None:
    """Row n + 1 is the argmax behind node n."""
    assert verify_tree_greedy(best_R=best, draft=TREE) == expected


def test_nodes_that_are_no_candidates_are_not_judged() -> None:
    draft = Draft(token_ids=[3, 1, 2, 0], parents=[ROOT, 0, ROOT, 2], num_judged=2, observed=[3])
    assert draft.children() == [[0], [1], []] and draft.depth == 2 and not draft.is_chain
    assert verify_tree_greedy(best_R=[2, 9, 9], draft=draft) == ([], 2)
    assert verify_tree_greedy(best_R=[3, 1, 4], draft=draft) == ([0, 1], 4)
    nothing = Draft(token_ids=[5], parents=[ROOT], num_judged=0, observed=[0])
    assert nothing.depth == 0 and verify_tree_greedy(best_R=[6], draft=nothing) == ([], 6)


def _next_tokens(p: torch.Tensor, q: torch.Tensor, *, width: int, drawn: bool, num: int) -> torch.Tensor:
    """The first token that comes out behind ``num`` drafts of ``width`` siblings."""
    generator = torch.Generator().manual_seed(1)
    chosen = q.topk(width).indices.tolist()
    found = []
    for _ in range(num):
        tokens, left = [], q.clone()
        for _ in range(width):
            tokens.append(int(draw(left[None], torch.rand(1, generator=generator, dtype=torch.float64))))
            left[tokens[-1]] = 0.0
        draft = Draft(
            token_ids=tokens if drawn else chosen,
            parents=[ROOT] * width,
            q_PV=q[None] if drawn else None,
            q_rows=[0] * width if drawn else [],
        )
        uniform = torch.rand(width + 1, generator=generator, dtype=torch.float64)
        path, token = verify_tree_sampled(p_RV=p.expand(width + 1, -1), draft=draft, uniform_R=uniform)
        found.append(draft.token_ids[path[0]] if path else token)
    return torch.bincount(torch.tensor(found), minlength=V).double() / num


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, V])
def test_siblings_tried_in_turn_leave_the_targets_law(width: int, drawn: bool) -> None:
    num = 2500
    p, q = _laws(2, 7)
    frequencies = _next_tokens(p, q, width=width, drawn=drawn, num=num)
    assert float((frequencies - p).abs().sum() / 2) < expected_distance(p.tolist(), num) + 2 / math.sqrt(num)


def test_equal_laws_take_the_first_sibling_always() -> None:
    p = _laws(3, 3)
    draft = Draft(token_ids=[2, 0], parents=[ROOT, ROOT], q_PV=p[:1], q_rows=[0, 0])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        u = torch.full((3,), uniform, dtype=torch.float64)
        assert verify_tree_sampled(p_RV=p, draft=draft, uniform_R=u).path == [0]


def test_tokens_of_no_probability_are_never_taken() -> None:
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    draft = Draft(token_ids=[0, 2, 4], parents=[ROOT] * 3)
    assert verify_tree_sampled(p_RV=p, draft=draft, uniform_R=torch.zeros(4, dtype=torch.float64)) == ([], 1)
    all_but_one = Draft(token_ids=[1, 0, 3], parents=[ROOT] * 3)
    last = torch.tensor([0.6, 0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    assert verify_tree_sampled(p_RV=p, draft=all_but_one, uniform_R=last).path == [2], "what is left of p is this token alone"


def test_a_token_stands_once_behind_a_node() -> None:
    with pytest.raises(AssertionError, match="twice"):
        Draft(token_ids=[1, 1], parents=[ROOT, ROOT])
    assert Draft(token_ids=[1, 1], parents=[ROOT, 0]).depth == 2
