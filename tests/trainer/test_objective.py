"""The chunked objective against the same sum written plainly, with every logit kept."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from mtp_train.batch.packing import pack as pack_samples
from mtp_train.batch.shift import loss_rows
from mtp_train.cache.reader import CacheReader
from mtp_train.loss.cross_entropy import CrossEntropy
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.loss.sampled_kl import SampledKl
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.loss.total_variation import TotalVariation
from mtp_train.records import Batch
from mtp_train.trainer.objective import Objective, Result, Term
from mtp_train.trainer.pack_share import PackShare
from mtp_train.trainer.rows import align
from mtp_train.trainer.summary import report

WEIGHTS = {"hidden_l1": 0.7, "forward_kl": 1.3, "cross_entropy": 0.4, "total_variation": 0.9}
LOSSES = {
    "hidden_l1": HiddenL1(),
    "forward_kl": ForwardKl(),
    "cross_entropy": CrossEntropy(),
    "total_variation": TotalVariation(teacher="exact"),
}
DEPTHS, DECAY = 3, 0.6


@pytest.fixture
def batch(recipe: Any) -> Batch:
    reader = CacheReader(recipe.cache, verify="none")
    return pack_samples([reader[number] for number in range(4)])


def objective(*, chunk_rows: int, words: tuple[str, ...] = tuple(WEIGHTS)) -> Objective:
    losses = {**LOSSES, "topk_kl": TopkKl()}
    terms = {word: Term(WEIGHTS.get(word, 1.0), losses[word]) for word in words}
    return Objective(terms=terms, draft_steps=DEPTHS, decay=DECAY, chunk_rows=chunk_rows)


def run(head: Any, batch: Batch, objective: Objective, *, measure: bool = False) -> Result:
    pack = align(batch, draft_steps=objective.draft_steps, need_top=objective.needs("topk_teacher"))
    return objective(head, pack, 1.0 / pack.counts_K.float().clamp_min(1), measure=measure)


def gradients(loss: torch.Tensor, head: Any) -> dict[str, torch.Tensor]:
    names, parameters = zip(*head.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def plainly(head: Any, batch: Batch) -> torch.Tensor:
    """The definition: all logits of all rows, all losses written out, means over rows, weights, decay."""
    total = torch.zeros(())
    for depth, step in enumerate(itertools.islice(head.unroll(batch), DEPTHS)):
        rows = loss_rows(batch, ahead=depth + 2)
        hidden, teacher = step.hidden_TD[rows.base_M], batch.hidden_TD[rows.teacher_M]
        log_q = (hidden @ head.shared.lm_head_VD.T).log_softmax(-1)
        log_p = (teacher @ head.shared.lm_head_VD.T).log_softmax(-1)
        means = {
            "hidden_l1": functional.smooth_l1_loss(hidden, teacher),
            "forward_kl": (log_p.exp() * (log_p - log_q)).sum(-1).mean(),
            "cross_entropy": functional.nll_loss(log_q, batch.token_ids_T[rows.label_M]),
            "total_variation": 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1).mean(),
        }
        total = total + DECAY**depth * sum(WEIGHTS[word] * mean for word, mean in means.items())
    return total


@pytest.mark.parametrize("chunk_rows", [1, 7, 10_000])
def test_chunked_gradients_are_the_plain_ones(recipe: Any, batch: Batch, chunk_rows: int) -> None:
    head = recipe.head()
    expected = plainly(head, batch)
    result = run(head, batch, objective(chunk_rows=chunk_rows))
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-5)
    expected_grads, grads = gradients(expected, head), gradients(result.loss, head)
    for name, expected_grad in expected_grads.items():
        torch.testing.assert_close(grads[name], expected_grad, rtol=1e-4, atol=1e-5 * float(expected_grad.abs().max()) + 1e-7)


def test_the_cached_teacher_with_all_tokens_is_the_exact_one(recipe: Any, batch: Batch) -> None:
    assert batch.teacher is not None
    logits_MV = batch.hidden_TD[batch.teacher.row_M] @ recipe.head().shared.lm_head_VD.T
    log_probs, ids = logits_MV.log_softmax(-1).sort(-1, descending=True)
    full = replace(batch, teacher=replace(batch.teacher, ids_MC=ids, log_probs_MC=log_probs))
    head = recipe.head()
    cached = run(head, full, objective(chunk_rows=7, words=("topk_kl",)))
    exact = run(head, full, objective(chunk_rows=7, words=("forward_kl",)))
    cached_grads = gradients(cached.loss, head)
    for name, grad in gradients(exact.loss * (1 / WEIGHTS["forward_kl"]), head).items():
        torch.testing.assert_close(cached_grads[name], grad, rtol=1e-3, atol=1e-6)


def test_agreement_and_overlap_are_counted_over_the_rows_that_count(recipe: Any, batch: Batch) -> None:
    head = recipe.head()
    chosen = objective(chunk_rows=7)
    with torch.no_grad():
        sums_KX = run(head, batch, chosen, measure=True).sums_KX
        for depth, step in enumerate(itertools.islice(head.unroll(batch), DEPTHS)):
            rows = loss_rows(batch, ahead=depth + 2)
            q = (step.hidden_TD[rows.base_M] @ head.shared.lm_head_VD.T).softmax(-1)
            p = (batch.hidden_TD[rows.teacher_M] @ head.shared.lm_head_VD.T).softmax(-1)
            found = dict(zip(chosen.columns, sums_KX[depth].tolist(), strict=True))
            assert found["rows"] == len(rows.base_M)
            assert found["agree"] == int((q.argmax(-1) == p.argmax(-1)).sum())
            assert found["overlap"] == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-5)


def test_a_pack_without_rows_gives_zero_and_reaches_every_parameter(recipe: Any, batch: Batch) -> None:
    head = recipe.head()
    empty = replace(batch, loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    result = run(head, empty, objective(chunk_rows=7))
    assert result.loss.item() == 0.0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in gradients(result.loss, head).values())


def test_a_cache_without_top_k_is_refused_by_the_losses_that_need_it(recipe: Any, batch: Batch) -> None:
    with pytest.raises(ValueError, match="precompute's top_k"):
        run(recipe.head(), replace(batch, teacher=None), objective(chunk_rows=7, words=("topk_kl",)))


def test_without_logits_nothing_is_projected(recipe: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    head = recipe.head()
    monkeypatch.setattr(head, "project", lambda hidden: pytest.fail("projected to the vocabulary for a loss that reads hidden states only"))
    sums_KX = run(head, batch, objective(chunk_rows=7, words=("hidden_l1",))).sums_KX
    assert sums_KX[:, 2].isnan().all()  # agreement was not measured, and says so


@pytest.mark.parametrize(
    "change",
    [
        {"terms": {}},
        {"terms": {"hidden_l1": Term(0.0, HiddenL1())}},
        {"draft_steps": 0},
        {"decay": 0.0},
        {"chunk_rows": 0},
        {"depth_weights": (1.0, 0.5)},
        {"depth_weights": (0.0,)},
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"terms": {"hidden_l1": Term(1.0, HiddenL1())}, "draft_steps": 1, "decay": 1.0, "chunk_rows": 8}
    with pytest.raises(ValueError, match="expected"):
        Objective(**{**settings, **change})


def test_depths_can_be_weighed_one_by_one(recipe: Any, batch: Batch) -> None:
    head, chosen = recipe.head(), objective(chunk_rows=7)
    with torch.no_grad():
        as_decay = run(head, batch, replace(chosen, depth_weights=tuple(DECAY**depth for depth in range(DEPTHS)))).loss
        alone = [
            run(head, batch, replace(chosen, depth_weights=tuple(float(k == depth) for k in range(DEPTHS)))).loss for depth in range(DEPTHS)
        ]
    torch.testing.assert_close(as_decay, run(head, batch, chosen).loss.detach())
    torch.testing.assert_close(as_decay, sum(DECAY**depth * loss for depth, loss in enumerate(alone)))


def drawn(head: Any, batch: Batch, loss: SampledKl, *, measure: bool) -> tuple[Objective, Result]:
    chosen = Objective(terms={"sampled_kl": Term(1.0, loss)}, draft_steps=DEPTHS, decay=DECAY, chunk_rows=7)
    pack = PackShare(0, 1, None).align(batch, chosen, vocab_size=head.shared.lm_head_VD.shape[0], seed="0/0")
    return chosen, chosen(head, pack, 1.0 / pack.counts_K.float().clamp_min(1), measure=measure)


def test_a_vocabulary_drawn_whole_gives_the_whole_ones_gradients(recipe: Any, batch: Batch) -> None:
    head = recipe.head()
    _, found = drawn(head, batch, SampledKl(num_top=4, num_random=10_000), measure=False)
    expected = run(head, batch, objective(chunk_rows=7, words=("topk_kl",)))
    torch.testing.assert_close(found.loss, expected.loss)
    grads = gradients(found.loss, head)
    for name, grad in gradients(expected.loss, head).items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)


def test_training_draws_and_evaluation_is_exact_and_tells_the_bias(recipe: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    head, loss = recipe.head(), SampledKl(num_top=2, num_random=60)
    with torch.no_grad():
        chosen, measured = drawn(head, batch, loss, measure=True)
        exact = run(head, batch, objective(chunk_rows=7, words=("topk_kl",)), measure=True)
    torch.testing.assert_close(measured.loss, exact.loss)
    line = report(chosen, measured.sums_KX.tolist())
    assert line["agreement"] == report(objective(chunk_rows=7, words=("topk_kl",)), exact.sums_KX.tolist())["agreement"]
    assert all(abs(bias) < 0.5 and bias != 0 for bias in line["log_partition_bias_nats"])
    monkeypatch.setattr(head, "project", lambda hidden: pytest.fail("projected to the whole vocabulary in training"))
    _, trained = drawn(head, batch, loss, measure=False)
    assert trained.loss.item() == pytest.approx(exact.loss.item(), rel=0.3) and trained.loss.item() != exact.loss.item()
    assert all(bool(grad.isfinite().all()) for grad in gradients(trained.loss, head).values())


def test_a_head_with_an_lm_head_of_its_own_is_told_what_else_is_fast(recipe: Any, batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"sampled_kl: expected a head that speaks through the target's own lm_head.*draft_vocab_size"):
        drawn(replace(recipe, word="eagle3").head(), batch, SampledKl(num_top=2, num_random=60), measure=False)
