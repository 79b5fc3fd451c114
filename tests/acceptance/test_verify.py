"""The exact rule keeps the target's distribution; rules that look like it do not."""

import itertools
import math

import pytest
import torch

from mtp_train.acceptance.verify import (
    check_finite,
    draw,
    expected_distance,
    probabilities,
    request_generator,
    uniforms,
    verify_greedy,
    verify_sampled,
)

V, K, DRAWS = 5, 2, 40_000


def _markov(seed: int, sharpness: float) -> torch.Tensor:
    """A random model: probabilities of the next token given the last one, (V + 1, V); the last row begins a text."""
    return (torch.randn(V + 1, V, generator=torch.Generator().manual_seed(seed)) * sharpness).softmax(-1)


def _speculated(p: torch.Tensor, q: torch.Tensor, rule, *, greedy: bool, seed: int) -> torch.Tensor:
    """DRAWS texts of K + 1 tokens, each by drafting K tokens with q, judging by ``rule`` and, where fewer than K + 1
    come out, filling up with plain draws from p: exact exactly if the rule is. Returns (DRAWS, K + 1)."""
    generator = torch.Generator().manual_seed(seed)
    last, drafts, q_rows, p_rows = torch.full((DRAWS,), V), [], [], [p[torch.full((DRAWS,), V)]]
    for _ in range(K):
        q_rows.append(q[last])
        last = q[last].argmax(-1) if greedy else draw(q[last], torch.rand(DRAWS, generator=generator, dtype=torch.float64))
        drafts.append(last)
        p_rows.append(p[last])
    drafts_BK = torch.stack(drafts, 1)
    accepted, following = rule(
        p_RV=torch.stack(p_rows, 1).flatten(0, 1),
        q_QV=None if greedy else torch.stack(q_rows, 1).flatten(0, 1),
        drafts=drafts_BK.tolist(),
        uniform_R=torch.rand(DRAWS * (K + 1), generator=generator, dtype=torch.float64),
    )
    accepted_B, text = torch.tensor(accepted), torch.full((DRAWS, K + 1), -1)
    for position in range(K):
        text[:, position] = torch.where(position < accepted_B, drafts_BK[:, position], text[:, position])
    text[torch.arange(DRAWS), accepted_B] = torch.tensor(following)
    for position in range(1, K + 1):
        plain = draw(p[text[:, position - 1]], torch.rand(DRAWS, generator=generator, dtype=torch.float64))
        text[:, position] = torch.where(text[:, position] < 0, plain, text[:, position])
    return text


def _distance(text: torch.Tensor, p: torch.Tensor) -> tuple[float, float]:
    """Total variation distance of the texts' joint distribution from the target's, and its bound for exact draws."""
    joint = [p[V, a] * p[a, b] * p[b, c] for a, b, c in itertools.product(range(V), repeat=3)]
    expected = torch.stack(joint).double()
    codes = text[:, 0] * V * V + text[:, 1] * V + text[:, 2]
    found = torch.bincount(codes, minlength=V**3).double() / len(text)
    return float((found - expected).abs().sum() / 2), expected_distance(expected.tolist(), len(text))


def _accept_by_q_alone(*, p_RV, q_QV, drafts, uniform_R):
    """Wrong: accepts x with probability q(x), what the draft is sure of; the residual is right."""
    num_accepted, following = [], []
    for index, tokens in enumerate(drafts):
        rows, q_rows = p_RV[index * (K + 1) : (index + 1) * (K + 1)], q_QV[index * K : (index + 1) * K]
        u = uniform_R[index * (K + 1) : (index + 1) * (K + 1)]
        taken = [bool(u[k] < q_rows[k, token]) for k, token in enumerate(tokens)]
        count = taken.index(False) if False in taken else K
        left = rows[count] if count == K else (rows[count] - q_rows[count]).clamp(min=0)
        num_accepted.append(count)
        following.append(int(draw(left[None], u[K:])))
    return num_accepted, following


def _resample_from_p(*, p_RV, q_QV, drafts, uniform_R):
    """Wrong: after a rejection draws from p instead of the residual."""
    accepted, _ = verify_sampled(p_RV=p_RV, q_QV=q_QV, drafts=drafts, uniform_R=uniform_R)
    rows = torch.arange(len(drafts)) * (K + 1)
    return accepted, draw(p_RV[rows + torch.tensor(accepted)], uniform_R[rows + K]).tolist()


def _subtract_scalar(*, p_RV, q_QV, drafts, uniform_R):
    """Wrong: subtracts q(x) of the rejected token from every entry of p."""
    accepted, following = verify_sampled(p_RV=p_RV, q_QV=q_QV, drafts=drafts, uniform_R=uniform_R)
    rows = torch.arange(len(drafts)) * (K + 1)
    at = torch.tensor(accepted)
    rejected = at < K
    token = torch.tensor(drafts)[torch.arange(len(drafts)), at.clamp(max=K - 1)]
    q_x = q_QV[(torch.arange(len(drafts)) * K + at.clamp(max=K - 1)), token]
    wrong = draw((p_RV[rows + at] - q_x[:, None]).clamp(min=1e-9), uniform_R[rows + K])
    return accepted, torch.where(rejected, wrong, torch.tensor(following)).tolist()


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("sharpness", [0.5, 2.0])
def test_sampled_speculation_has_the_targets_joint_distribution(greedy, sharpness):
    p, q = _markov(1, sharpness), _markov(2, sharpness)
    found, bound = _distance(_speculated(p, q, verify_sampled, greedy=greedy, seed=3), p)
    # The bound is on the mean; one run of a correct rule strays from its mean by less than 4 / (2 sqrt(DRAWS)) (McDiarmid, 1 - 3e-4).
    assert found < bound + 2 / math.sqrt(DRAWS)


@pytest.mark.parametrize("rule", [_accept_by_q_alone, _resample_from_p, _subtract_scalar])
def test_wrong_rules_do_not(rule):
    p, q = _markov(1, 2.0), _markov(2, 2.0)
    found, bound = _distance(_speculated(p, q, rule, greedy=False, seed=3), p)
    assert found > bound + 2 / math.sqrt(DRAWS)


def test_acceptance_probability_is_the_overlap_of_p_and_q():
    p, q = _markov(4, 1.5)[:1], _markov(5, 1.5)[:1]
    generator = torch.Generator().manual_seed(0)
    drafts = draw(q.expand(DRAWS, V), torch.rand(DRAWS, generator=generator, dtype=torch.float64))
    verified = verify_sampled(
        p_RV=p.repeat(2 * DRAWS, 1),
        q_QV=q.repeat(DRAWS, 1),
        drafts=drafts[:, None].tolist(),
        uniform_R=torch.rand(2 * DRAWS, generator=generator, dtype=torch.float64),
    )
    rate, expected = sum(verified.num_accepted) / DRAWS, float(torch.minimum(p, q).sum())
    assert abs(rate - expected) < 4 * math.sqrt(expected * (1 - expected) / DRAWS)


def test_greedy_takes_the_leading_hits_and_then_the_argmax():
    verified = verify_greedy(best_R=[3, 4, 5, 7, 1, 2, 9], drafts=[[3, 4], [8], [], []])
    assert verified == ([2, 0, 0, 0], [5, 7, 2, 9])


def test_sequences_of_different_draft_lengths_are_judged_as_each_alone():
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 1, 2]
    p = torch.randn(sum(lengths) + 4, 7, generator=generator).softmax(-1)
    q = torch.randn(sum(lengths), 7, generator=generator).softmax(-1)
    u = torch.rand(sum(lengths) + 4, generator=generator, dtype=torch.float64)
    drafts = [torch.randint(7, (n,), generator=generator).tolist() for n in lengths]
    together = verify_sampled(p_RV=p, q_QV=q, drafts=drafts, uniform_R=u)
    row = used = 0
    for index, tokens in enumerate(drafts):
        rows, q_rows = slice(row, row + len(tokens) + 1), slice(used, used + len(tokens))
        alone = verify_sampled(p_RV=p[rows], q_QV=q[q_rows], drafts=[tokens], uniform_R=u[rows])
        assert (alone.num_accepted[0], alone.next_token[0]) == (together.num_accepted[index], together.next_token[index])
        row, used = rows.stop, q_rows.stop


def test_tokens_of_no_probability_are_never_drawn():
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    edges = torch.tensor([0.0, 0.49999999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(p.expand(4, 5), edges).tolist() == [1, 1, 3, 3]
    verified = verify_sampled(p_RV=p.expand(2, 5), q_QV=None, drafts=[[0]], uniform_R=torch.zeros(2, dtype=torch.float64))
    assert verified.num_accepted == [0] and verified.next_token == [1]


def test_top_p_keeps_the_smallest_set_that_holds_the_share():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert torch.allclose(probabilities(logits, temperature=1.0, top_p=0.7), torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    assert torch.allclose(probabilities(logits, temperature=1.0, top_p=0.01), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert torch.allclose(probabilities(logits, temperature=0.5, top_p=1.0), (logits * 2).softmax(-1))


def test_a_requests_draws_are_its_own():
    one, two = request_generator(seed=1, request_id="a"), request_generator(seed=1, request_id="b")
    alone, apart = uniforms([one], [3]), uniforms([two], [2])
    again = uniforms([request_generator(seed=1, request_id="b"), request_generator(seed=1, request_id="a")], [2, 3])
    assert torch.equal(again, torch.cat([apart, alone]))
    assert not torch.equal(alone[:2], apart)
    assert not torch.equal(alone, uniforms([request_generator(seed=2, request_id="a")], [3]))


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [0.0, math.inf], [-math.inf, -math.inf]])
def test_rows_that_no_token_can_be_chosen_by_are_counted(bad):
    good = [[0.0, 1.0], [-math.inf, 3.0]]
    check_finite(torch.tensor(good), of="head")
    with pytest.raises(ValueError, match="head x: expected finite logits, found NaN or infinite ones in 2 of 4 rows"):
        check_finite(torch.tensor([*good, bad, bad]), of="head x")
