"""Every loss against its definition written out over the whole vocabulary, values and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from mtp_train.loss.base import Loss, LossChunk, TopTeacher, argmax_rows, scale_rows_
from mtp_train.loss.cross_entropy import CrossEntropy
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.loss.total_variation import TotalVariation, overlap
from mtp_train.target.draft_vocabulary import DraftVocabulary

ROWS, SIZE, VOCABULARY = 7, 16, 96


class Case:
    """Random hidden states and an lm_head in float64, and chunks made of them."""

    def __init__(self, *, num_top: int, sharpness: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(3)
        self.lm_head = torch.randn(VOCABULARY, SIZE, generator=draw, dtype=torch.float64)
        self.hidden = (sharpness * torch.randn(ROWS, SIZE, generator=draw, dtype=torch.float64)).requires_grad_()
        self.teacher = torch.randn(ROWS, SIZE, generator=draw, dtype=torch.float64)
        self.label = torch.randint(0, VOCABULARY, (ROWS,), generator=draw)
        logits = self.teacher @ self.lm_head.T
        log_probs, ids = logits.log_softmax(-1).topk(num_top)
        self.top = TopTeacher(ids_RC=ids, log_probs_RC=log_probs, log_sum_exp_R=logits.logsumexp(-1))

    def chunk(self, *, top: bool = True) -> LossChunk:
        return LossChunk(
            hidden_RD=self.hidden,
            teacher_hidden_RD=self.teacher,
            label_R=self.label,
            top=self.top if top else None,
            project=lambda hidden: hidden @ self.lm_head.T,
            project_teacher=lambda hidden: hidden @ self.lm_head.T,
        )

    def log_p(self) -> torch.Tensor:
        return (self.teacher @ self.lm_head.T).log_softmax(-1)

    def log_q(self) -> torch.Tensor:
        return (self.hidden @ self.lm_head.T).log_softmax(-1)

    def buckets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Teacher's and head's probabilities of the candidates and of all other tokens together."""
        other = torch.ones(ROWS, VOCABULARY, dtype=torch.float64).scatter_(1, self.top.ids_RC, 0.0)
        return tuple(
            torch.cat([probs.gather(1, self.top.ids_RC), (probs * other).sum(-1, keepdim=True)], -1)
            for probs in (self.log_p().exp(), self.log_q().exp())
        )


def assert_same(case: Case, value_R: torch.Tensor, expected_R: torch.Tensor, *, tolerance: float = 1e-9) -> None:
    weight_R = torch.linspace(0.5, 2.0, ROWS, dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad((expected_R * weight_R).sum(), case.hidden, retain_graph=True)
    (grad,) = torch.autograd.grad((value_R * weight_R).sum(), case.hidden)
    torch.testing.assert_close(value_R, expected_R, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grad, expected_grad, rtol=tolerance, atol=tolerance)


def test_forward_kl_is_its_definition() -> None:
    case = Case(num_top=8)
    expected = (case.log_p().exp() * (case.log_p() - case.log_q())).sum(-1)
    assert_same(case, ForwardKl()(case.chunk()), expected)


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
def test_topk_kl_holds_the_tail_in_one_bucket(sharpness: float) -> None:
    case = Case(num_top=8, sharpness=sharpness)
    p, q = case.buckets()
    assert_same(case, TopkKl()(case.chunk()), (p * (p.log() - q.log())).sum(-1))


def test_topk_kl_over_all_tokens_is_forward_kl() -> None:
    case = Case(num_top=VOCABULARY)
    value = TopkKl()(case.chunk())
    expected = (case.log_p().exp() * (case.log_p() - case.log_q())).sum(-1)
    assert_same(case, value, expected, tolerance=1e-7)


def test_topk_kl_is_a_lower_bound_that_rises_with_the_candidates() -> None:
    values = [TopkKl()(Case(num_top=number).chunk()).detach() for number in (1, 4, 16, VOCABULARY)]
    for fewer, more in itertools.pairwise(values):
        assert (fewer <= more + 1e-9).all()


def test_topk_kl_stays_exact_where_the_head_leaves_the_tail_nothing() -> None:
    """In float32, 1 - sum q_c would be 0 here and its logarithm infinite."""
    logits = torch.zeros(1, VOCABULARY).requires_grad_()
    with torch.no_grad():
        logits[0, :2] = 60.0
    ids, log_probs = torch.tensor([[0, 1]]), torch.tensor([[0.45, 0.45]]).log()
    top = TopTeacher(ids_RC=ids, log_probs_RC=log_probs, log_sum_exp_R=torch.zeros(1))
    chunk = LossChunk(
        hidden_RD=logits,
        teacher_hidden_RD=logits.detach(),
        label_R=torch.zeros(1, dtype=torch.int64),
        top=top,
        project=lambda x: x,
        project_teacher=lambda x: x,
    )
    value = TopkKl()(chunk)
    (grad,) = torch.autograd.grad(value.sum(), logits)
    wide = logits.detach().double().log_softmax(-1)
    expected = 2 * 0.45 * (torch.tensor(0.45).double().log() - wide[0, 0]) + 0.1 * (
        torch.tensor(0.1).double().log() - wide[0, 2:].logsumexp(0)
    )
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert grad[0, 2:].sum().item() == pytest.approx(-0.1, rel=1e-4)
    assert torch.isfinite(grad).all()


def test_cross_entropy_is_the_surprise_at_the_label() -> None:
    case = Case(num_top=8)
    assert_same(case, CrossEntropy()(case.chunk()), -case.log_q().gather(1, case.label[:, None])[:, 0])


def test_total_variation_is_half_the_absolute_difference() -> None:
    case = Case(num_top=8)
    assert_same(case, TotalVariation(teacher="exact")(case.chunk()), 0.5 * (case.log_p().exp() - case.log_q().exp()).abs().sum(-1))
    p, q = case.buckets()
    assert_same(case, TotalVariation(teacher="topk")(case.chunk()), 0.5 * (p - q).abs().sum(-1))
    torch.testing.assert_close(overlap(case.chunk()), 1.0 - 0.5 * (case.log_p().exp() - case.log_q().exp()).abs().sum(-1))


def test_hidden_l1_is_the_mean_over_the_hidden_size() -> None:
    case = Case(num_top=8)
    difference = (case.hidden - case.teacher).abs()
    expected = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean(-1)
    assert_same(case, HiddenL1()(case.chunk()), expected)


@pytest.mark.parametrize("loss", [TopkKl(), TotalVariation(teacher="topk")])
def test_a_missing_cached_teacher_is_said(loss: Loss) -> None:
    with pytest.raises(ValueError, match="top_k"):
        loss(Case(num_top=8).chunk(top=False))


def test_losses_keep_the_logits_that_others_share() -> None:
    case = Case(num_top=8)
    chunk = case.chunk()
    before = chunk.projected_RU.detach().clone()
    for loss in (TopkKl(), ForwardKl(), CrossEntropy(), TotalVariation(teacher="exact")):
        loss(chunk)
    assert torch.equal(chunk.projected_RU.detach(), before)


@pytest.mark.parametrize("num_columns", [96, 64, 97, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_rows_finds_a_largest_entry(num_columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(33, num_columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = x.gather(1, argmax_rows(x)[:, None])[:, 0]
    assert torch.equal(found, x.amax(-1))


def test_scale_rows_rounds_once() -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    factor = torch.linspace(0.1, 0.3, 5)
    assert torch.equal(scale_rows_(x.clone(), factor), (x.float() * factor[:, None]).bfloat16())


def test_bfloat16_logits_give_float32_values() -> None:
    case = Case(num_top=8)
    lm_head = case.lm_head.bfloat16()
    chunk = LossChunk(
        hidden_RD=case.hidden.detach().bfloat16(),
        teacher_hidden_RD=case.teacher.bfloat16(),
        label_R=case.label,
        top=TopTeacher(ids_RC=case.top.ids_RC, log_probs_RC=case.top.log_probs_RC.float(), log_sum_exp_R=case.top.log_sum_exp_R.float()),
        project=lambda hidden: functional.linear(hidden, lm_head),
        project_teacher=lambda hidden: functional.linear(hidden, lm_head),
    )
    for loss in (TopkKl(), ForwardKl(), CrossEntropy(), TotalVariation(teacher="exact"), HiddenL1()):
        assert loss(chunk).dtype == torch.float32


IDS = torch.arange(1, VOCABULARY, 3)  # 32 tokens that the head can draft


def drafted(case: Case) -> LossChunk:
    """The case's chunk for a head whose lm_head holds the rows of ``IDS`` only."""
    return LossChunk(
        hidden_RD=case.hidden,
        teacher_hidden_RD=case.teacher,
        label_R=case.label,
        top=case.top,
        project=lambda hidden: hidden @ case.lm_head[IDS].T,
        project_teacher=lambda hidden: hidden @ case.lm_head.T,
        draft=DraftVocabulary.of(IDS, vocab_size=VOCABULARY),
    )


def log_q_inside(case: Case) -> torch.Tensor:
    return (case.hidden @ case.lm_head[IDS].T).log_softmax(-1)


def test_over_a_draft_vocabulary_a_row_counts_by_what_the_head_can_reach() -> None:
    case = Case(num_top=8)
    p = case.log_p().exp()[:, IDS]
    inside = p.sum(-1)
    renormalised = p / inside[:, None]
    expected = inside * (renormalised * (renormalised.log() - log_q_inside(case))).sum(-1)
    assert (inside < 0.9).any() and (expected > 0).all()
    assert_same(case, ForwardKl()(drafted(case)), expected)
    # EAGLE-3 would count all of these rows alike, or not at all.
    outside = ~torch.isin(case.log_p().argmax(-1), IDS)
    assert outside.any() and not outside.all()


@pytest.mark.parametrize("num_top", [2, 8])
def test_topk_kl_over_a_draft_vocabulary_keeps_the_tail_and_leaves_out_what_is_outside(num_top: int) -> None:
    case = Case(num_top=num_top)
    p_RC, can = case.top.log_probs_RC.exp(), torch.isin(case.top.ids_RC, IDS)
    assert can.any() and (~can).any()
    assert num_top == 8 or ((~can).all(-1).any() and can.all(-1).any()), "rows with all candidates inside and with none"
    tail = 1 - p_RC.sum(-1)
    column = torch.searchsorted(IDS, case.top.ids_RC).clamp_max(len(IDS) - 1)
    log_q = log_q_inside(case).gather(1, column)
    q_rest = 1 - (log_q.exp() * can).sum(-1)
    inside = (p_RC * can).sum(-1) + tail
    expected = (p_RC * (p_RC.log() - log_q) * can).sum(-1) + tail * (tail.log() - q_rest.log()) - inside * inside.log()
    assert_same(case, TopkKl()(drafted(case)), expected, tolerance=1e-7)


def test_topk_kl_over_a_draft_vocabulary_with_all_candidates_is_forward_kl() -> None:
    case = Case(num_top=VOCABULARY)
    assert_same(case, TopkKl()(drafted(case)), ForwardKl()(drafted(case)), tolerance=1e-7)


def test_the_rejection_rate_counts_what_cannot_be_drafted() -> None:
    case = Case(num_top=VOCABULARY)
    p, q = case.log_p().exp(), torch.zeros(ROWS, VOCABULARY, dtype=torch.float64)
    q = q.index_copy(1, IDS, log_q_inside(case).exp())
    expected = 0.5 * (p - q).abs().sum(-1)
    for teacher in ("exact", "topk"):
        assert_same(case, TotalVariation(teacher=teacher)(drafted(case)), expected)
    assert (overlap(drafted(case)) <= p[:, IDS].sum(-1) + 1e-12).all()


def test_labels_and_top_tokens_are_the_targets() -> None:
    case = Case(num_top=8)
    chunk = drafted(case)
    inside = torch.isin(case.label, IDS)
    assert inside.any() and not inside.all()
    value = CrossEntropy()(chunk)
    assert torch.equal(value[~inside], torch.zeros(int((~inside).sum()), dtype=torch.float64))
    column = torch.searchsorted(IDS, case.label[inside])
    torch.testing.assert_close(value[inside], -log_q_inside(case)[inside].gather(1, column[:, None])[:, 0])
    assert torch.equal(chunk.top_R, IDS[log_q_inside(case).argmax(-1)])
    assert torch.equal(chunk.teacher_top_R, case.log_p().argmax(-1))
