"""The tree is the best part of the product of what the heads say, each node drawn from the head of its depth."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from mtp_train.decoding.base import NewBases
from mtp_train.decoding.medusa_tree import MedusaTree
from mtp_train.head.base import ParallelHead
from mtp_train.target.weights import SharedWeights

V, K, D = 11, 3, 4


class Said(ParallelHead):
    """Its logits are linear in the hidden state, by a random matrix per head."""

    word = method = "said"
    num_ahead = K

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        super().__init__(
            shared=SharedWeights(
                embedding_VD=torch.zeros(V, D), lm_head_VD=torch.zeros(V, D), final_norm_weight_D=torch.ones(D), rms_norm_eps=1e-5
            )
        )
        self.map_KVD = torch.randn(K, V, D, generator=generator)

    def unroll(self, batch: Any) -> Any:
        raise AssertionError("not used here")

    def settings(self) -> dict[str, Any]:
        return {}

    def ahead(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return torch.einsum("kvd,bd->kbv", self.map_KVD, hidden_BD)


def _bases(num: int, **changes: Any) -> list[NewBases]:
    hidden = torch.randn(num, 5, D, generator=torch.Generator().manual_seed(1))
    return [NewBases(slot=slot, token_ids=[1] * 5, hidden_BD=hidden[slot], **{"drafts": True, **changes}) for slot in range(num)]


def _paths(draft) -> dict[tuple[int, ...], int]:
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(draft.parents):
        paths.append((*(() if parent < 0 else paths[parent]), draft.token_ids[node]))
    return {path: node for node, path in enumerate(paths)}


@pytest.mark.parametrize("max_nodes", [1, 5, 20, 1000])
def test_the_nodes_are_the_best_of_the_product(max_nodes: int) -> None:
    head, top_k = Said(), 3
    drafter = MedusaTree(max_depth=K, top_k=top_k, max_nodes=max_nodes).drafter(head=head, num_slots=2, temperature=0.0, top_p=1.0)
    bases = _bases(2)
    for given, draft in zip(bases, drafter.propose(bases), strict=True):
        q_KV = head.ahead(given.hidden_BD[-1:])[:, 0].softmax(-1)
        best = q_KV.topk(top_k).indices.tolist()
        product = [path for depth in range(1, K + 1) for path in itertools.product(*best[:depth])]
        value = {path: math.prod(float(q_KV[depth, token]) for depth, token in enumerate(path)) for path in product}
        expected = sorted(product, key=lambda path: -value[path])[:max_nodes]
        assert set(_paths(draft)) == set(expected) and draft.q_PV is None
        assert len(draft.token_ids) == min(max_nodes, 3 + 9 + 27)


def test_drawn_nodes_carry_the_distribution_of_their_depth() -> None:
    head = Said()
    drafter = MedusaTree(max_depth=2, top_k=4, max_nodes=12).drafter(head=head, num_slots=1, temperature=0.7, top_p=1.0)
    for seed in range(10):
        (given,) = _bases(1, generator=torch.Generator().manual_seed(seed))
        (draft,) = drafter.propose([given])
        q_KV = (head.ahead(given.hidden_BD[-1:])[:, 0] / 0.7).softmax(-1)
        assert len(draft.token_ids) == 12 and draft.depth <= 2
        for path, node in _paths(draft).items():
            torch.testing.assert_close(draft.q_PV[draft.q_rows[node]], q_KV[len(path) - 1])


def test_no_drafts_where_none_are_asked_for() -> None:
    drafter = MedusaTree(max_depth=2, top_k=2, max_nodes=4).drafter(head=Said(), num_slots=2, temperature=0.0, top_p=1.0)
    first, second = _bases(2)
    assert drafter.propose([NewBases(slot=0, token_ids=[1], hidden_BD=first.hidden_BD[:1], drafts=False)]) == [None]
    assert [
        draft is None for draft in drafter.propose([second, NewBases(slot=0, token_ids=[1], hidden_BD=first.hidden_BD[:1], drafts=False)])
    ] == [
        False,
        True,
    ]
