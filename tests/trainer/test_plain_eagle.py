"""The product's exact objective and EAGLE's recipe written plainly are one computation: same loss, same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtp_train.batch.packing import pack
from mtp_train.cache.reader import CacheReader
from mtp_train.head.eagle import Eagle
from mtp_train.head.pair import NORMS
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.target.weights import read_shared
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.plain_eagle import PlainEagle, pad
from mtp_train.trainer.rows import align


@pytest.mark.parametrize("chunk_rows", [5, 1000])
def test_the_exact_objective_has_the_plain_recipes_gradients(recipe: Any, chunk_rows: int) -> None:
    """In float32, over samples of different lengths: relative to the gradient's norm within 1e-5."""
    shared = read_shared(recipe.target)
    head = Eagle(
        target_path=recipe.target,
        shared=shared,
        norms=dict.fromkeys(NORMS, False),
        column_order="embed_hidden",
        zero_first_embedding=False,
        init="random",
        seed=3,
        trust_remote_code=False,
    )
    plain = PlainEagle(head, shared)
    reader = CacheReader(recipe.cache, verify="none")
    samples = [reader[number] for number in range(4)]
    assert len({sample.num_tokens for sample in samples}) > 1
    terms = {"hidden_l1": Term(1.0, HiddenL1()), "forward_kl": Term(0.1, ForwardKl())}
    objective = Objective(terms=terms, draft_steps=1, decay=1.0, chunk_rows=chunk_rows)
    aligned = align(pack(samples), draft_steps=1, need_top=False)
    ours = objective(head, aligned, 1.0 / aligned.counts_K.float(), measure=False).loss
    theirs = plain.loss(pad(samples), draft_steps=1, decay=1.0)
    ours.backward()
    theirs.backward()
    # The recipe's soft cross-entropy is the KL plus the teacher's entropy.
    p = (aligned.teacher_hidden_TD[aligned.rows[0].teacher_M] @ shared.lm_head_VD.T).softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean()
    assert theirs.item() == pytest.approx(ours.item() + 0.1 * entropy.item(), rel=1e-5)
    named, held = plain.named_weights(), dict(head.named_parameters())
    assert set(named) == set(held)
    difference = torch.stack([(held[name].grad - weight.grad).norm() for name, weight in named.items()]).norm()
    size = torch.stack([weight.grad.norm() for weight in named.values()]).norm()
    assert float(difference / size) < 1e-5 and size > 0
