"""``sampled_kl``: exact where all is drawn, unbiased in the partition function where not, and exact when it evaluates."""

from __future__ import annotations

import math

import pytest
import torch

from mtp_train.loss.base import LossChunk, TopTeacher
from mtp_train.loss.sampled_kl import SampledKl
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.loss.vocabulary_sample import VocabularySample

ROWS, SIZE, VOCABULARY, CANDIDATES = 6, 12, 90, 8


def chunk(loss: SampledKl | None, *, seed: str = "a", sharpness: float = 1.0) -> LossChunk:
    """Random rows in float64; with a sample drawn for ``loss``."""
    draw = torch.Generator().manual_seed(0)
    lm_head = torch.randn(VOCABULARY, SIZE, generator=draw, dtype=torch.float64)
    hidden = (sharpness * torch.randn(ROWS, SIZE, generator=draw, dtype=torch.float64)).requires_grad_()
    teacher = torch.randn(ROWS, SIZE, generator=draw, dtype=torch.float64)
    logits = teacher @ lm_head.T
    log_probs, ids = logits.log_softmax(-1).topk(CANDIDATES)
    sample = None if loss is None else loss.draw(ids, vocab_size=VOCABULARY, seed=seed)
    return LossChunk(
        hidden_RD=hidden,
        teacher_hidden_RD=teacher,
        label_R=torch.zeros(ROWS, dtype=torch.int64),
        top=TopTeacher(ids_RC=ids, log_probs_RC=log_probs, log_sum_exp_R=logits.logsumexp(-1)),
        project=lambda x: x @ lm_head.T,
        project_teacher=lambda x: x @ lm_head.T,
        vocabulary_sample=sample,
        project_sampled=None if sample is None else lambda x: x @ lm_head[sample.ids_S].T,
    )


def value_and_gradient(loss: SampledKl | TopkKl, rows: LossChunk) -> tuple[torch.Tensor, torch.Tensor]:
    value = loss(rows)
    (gradient,) = torch.autograd.grad(value.sum(), rows.hidden_RD)
    return value.detach(), gradient


def test_the_whole_vocabulary_drawn_is_topk_kl() -> None:
    loss = SampledKl(num_top=2, num_random=VOCABULARY)
    found, expected = value_and_gradient(loss, chunk(loss)), value_and_gradient(TopkKl(), chunk(None))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_nothing_drawn_is_topk_kl() -> None:
    found, expected = value_and_gradient(SampledKl(num_top=2, num_random=5), chunk(None)), value_and_gradient(TopkKl(), chunk(None))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_it_is_the_bucket_kl_of_the_corrected_softmax() -> None:
    """Written out: probabilities over the drawn tokens, each weighted by what it stands for; candidates not drawn in the tail."""
    loss = SampledKl(num_top=2, num_random=20)
    rows = chunk(loss)
    sample, top = rows.vocabulary_sample, rows.top
    assert sample is not None and top is not None
    weight = sample.log_weight_S.double().exp()
    joint = rows.sampled_projected_RS.exp() * weight
    q = joint / joint.sum(-1, keepdim=True)
    place = [{int(v): s for s, v in enumerate(sample.ids_S.tolist())}.get(int(v), -1) for v in top.ids_RC.flatten()]
    column = torch.tensor(place).view(ROWS, CANDIDATES)
    inside = column >= 0
    assert inside.any() and not inside.all() and (column[:, :2] >= 0).all()
    p = top.log_probs_RC.exp() * inside
    q_c = q.gather(1, column.clamp_min(0))
    tail_p, tail_q = 1 - p.sum(-1), 1 - (q_c * inside).sum(-1)
    expected = (p * (top.log_probs_RC - q_c.log())).sum(-1) + tail_p * (tail_p / tail_q).log()
    (gradient,) = torch.autograd.grad(expected.sum(), rows.hidden_RD, retain_graph=True)
    found, found_gradient = value_and_gradient(loss, rows)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-6, atol=1e-8)


def test_the_partition_function_is_unbiased_and_its_logarithm_low_by_half_the_variance() -> None:
    loss, drawn = SampledKl(num_top=4, num_random=30), []
    exact = chunk(None, sharpness=0.3).logits_RU.detach().logsumexp(-1)
    for number in range(400):
        rows = chunk(loss, seed=str(number), sharpness=0.3)
        assert rows.vocabulary_sample is not None
        drawn.append(rows.vocabulary_sample.corrected(rows.sampled_projected_RS.detach()).logsumexp(-1))
    error = torch.stack(drawn) - exact
    ratio = error.exp()
    deviation = ratio.std(0) / math.sqrt(len(drawn))
    assert ((ratio.mean(0) - 1).abs() < 4 * deviation).all() and (deviation > 0).all()
    bias = -0.5 * ratio.var(0)
    assert error.mean() < 0
    assert error.mean(0) == pytest.approx(bias, abs=4 * float(deviation.max()))


def test_a_sample_holds_what_must_be_in_and_repeats_by_its_seed() -> None:
    always = torch.tensor([[5, 7], [7, 80]])
    first = VocabularySample.draw(always, num_others=10, vocab_size=VOCABULARY, seed="0/3/s1")
    again = VocabularySample.draw(always, num_others=10, vocab_size=VOCABULARY, seed="0/3/s1")
    other = VocabularySample.draw(always, num_others=10, vocab_size=VOCABULARY, seed="0/4/s1")
    assert torch.equal(first.ids_S, again.ids_S) and not torch.equal(first.ids_S, other.ids_S)
    assert first.ids_S[:3].tolist() == [5, 7, 80] and first.ids_S.unique().shape[0] == 13
    assert torch.equal(first.column_V[first.ids_S], torch.arange(13)) and int((first.column_V == 13).sum()) == VOCABULARY - 13
    assert first.log_weight_S[:3].tolist() == [0, 0, 0] and first.log_weight_S[3].item() == pytest.approx(math.log(87 / 10))


@pytest.mark.parametrize("settings", [{"num_top": 0, "num_random": 5}, {"num_top": 5, "num_random": 0}])
def test_settings_that_draw_nothing_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="num_top and num_random of at least 1"):
        SampledKl(**settings)
