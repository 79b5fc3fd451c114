"""Generation over the ragged cache equals transformers' own, whoever else is in the batch."""

import math

import pytest
import torch

from mtp_train.engine.base import GenerateRequest, Sampling
from mtp_train.engine.hf_generate import generate, share_rows, watched

GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=40, seed=0)
DRAWN = Sampling(temperature=0.8, top_p=0.9, max_new_tokens=25, seed=3)


def _requests(prompts):
    return [GenerateRequest(request_id=f"r{index}", token_ids=prompt, max_new_tokens=1000) for index, prompt in enumerate(prompts)]


def _answers(engine, requests, sampling):
    return {answer.request_id: answer for answer in engine.generate(requests, sampling)}


@pytest.mark.parametrize("target", ["tiny_target", "windowed_target"])
def test_greedy_equals_transformers_generate(target, request, make_engine, plain_model, prompts, stop_ids):
    path = request.getfixturevalue(target)
    found = _answers(make_engine(path), _requests(prompts), GREEDY)
    model = plain_model(path)
    for index, prompt in enumerate(prompts):
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=40, pad_token_id=0
            )
        expected = tuple(expected[0, len(prompt) :].tolist())
        assert found[f"r{index}"].token_ids == expected
        assert found[f"r{index}"].finish_reason == ("stop" if expected[-1] in stop_ids else "length")
    assert {answer.finish_reason for answer in found.values()} == {"stop", "length"}


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_answers_do_not_depend_on_the_batch(tiny_target, make_engine, prompts, sampling):
    alone = _answers(make_engine(tiny_target, batch_size=1), _requests(prompts), sampling)
    for batch_size, chunk in ((3, 16), (9, 512)):
        engine = make_engine(tiny_target, batch_size=batch_size, max_prefill_tokens=chunk)
        assert _answers(engine, _requests(prompts)[::-1], sampling) == alone


def test_samples_follow_the_seed_and_the_request(tiny_target, make_engine, prompts):
    engine = make_engine(tiny_target)
    same = [GenerateRequest(request_id=f"r{index}", token_ids=prompts[0], max_new_tokens=1000) for index in range(6)]
    first, again = _answers(engine, same, DRAWN), _answers(engine, same, DRAWN)
    assert first == again
    assert len({answer.token_ids for answer in first.values()}) == 6
    other = _answers(engine, same, Sampling(temperature=0.8, top_p=0.9, max_new_tokens=25, seed=4))
    assert other["r0"].token_ids != first["r0"].token_ids


def test_drawn_tokens_have_the_targets_distribution(tiny_target, make_engine, plain_model, prompts):
    """First tokens of 4000 requests against softmax(logits / T), by total variation."""
    engine = make_engine(tiny_target, batch_size=500, max_prefill_tokens=8192)
    sampling = Sampling(temperature=1.5, top_p=1.0, max_new_tokens=1, seed=0)
    same = [GenerateRequest(request_id=f"r{index}", token_ids=prompts[3], max_new_tokens=1000) for index in range(4000)]
    tokens = torch.tensor([answer.token_ids[0] for answer in engine.generate(same, sampling)])
    with torch.inference_mode():
        p = (plain_model(tiny_target)(torch.tensor([prompts[3]])).logits[0, -1] / 1.5).softmax(-1).double()
    found = torch.bincount(tokens, minlength=len(p)).double() / len(tokens)
    bound = float((p * (1 - p) / len(tokens)).sqrt().sum() / 2)
    assert float((found - p).abs().sum() / 2) < bound + 2 / len(tokens) ** 0.5


def test_prompts_share_what_decoding_leaves():
    assert share_rows([1, 1, 100, 30], budget=50) == [1, 1, 48, 0]
    assert share_rows([20, 1, 30], budget=64) == [20, 1, 30]
    assert share_rows([1, 1, 9], budget=2) == [1, 1, 1]


def test_an_empty_prompt_is_refused(tiny_target, make_engine):
    with pytest.raises(ValueError, match="r0"):
        list(make_engine(tiny_target).generate([GenerateRequest(request_id="r0", token_ids=(), max_new_tokens=9)], GREEDY))


@pytest.mark.parametrize(("token", "found"), [(160, "found 160"), (-1, "found -1")])
def test_a_token_that_the_target_has_no_embedding_of_is_refused(tiny_target, make_engine, token, found):
    with pytest.raises(ValueError, match=f"request r0: expected token ids from 0 to 159, which the target has, {found}"):
        list(make_engine(tiny_target).generate([GenerateRequest(request_id="r0", token_ids=(8, token, 9), max_new_tokens=9)], GREEDY))


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_target_of_broken_weights_is_refused(tiny_target, make_engine, prompts, sampling):
    engine = make_engine(tiny_target)
    with torch.no_grad():
        engine.target.lm_head.weight[5, 0] = float("nan")
    with pytest.raises(ValueError, match="target: expected finite logits, found NaN or infinite ones in 4 of 4 rows"):
        _answers(engine, _requests(prompts[:1] * 4), sampling)


@pytest.mark.parametrize("temperature", [-1.0, 1e-30, 0.001, 1e7, math.inf, math.nan])
def test_a_temperature_that_engines_do_not_draw_at_is_refused(temperature):
    """vLLM would draw at 0.01 in place of less, and softmax(logits / 1e-38) is no distribution in float32."""
    with pytest.raises(ValueError, match=r"sampling.temperature: expected 0 \(greedy\), or 0.01 to 1e\+06, found"):
        Sampling(temperature=temperature, top_p=1.0, max_new_tokens=1, seed=0)
    assert Sampling(temperature=0.01, top_p=1.0, max_new_tokens=1, seed=0).temperature == 0.01


def test_a_requests_own_limit_holds_beside_the_samplings(tiny_target, make_engine, prompts):
    requests = [GenerateRequest(request_id=f"r{limit}", token_ids=prompts[4], max_new_tokens=limit) for limit in (1, 3, 1000)]
    found = _answers(make_engine(tiny_target), requests, Sampling(temperature=0.0, top_p=1.0, max_new_tokens=5, seed=0))
    assert [len(found[f"r{limit}"].token_ids) for limit in (1, 3, 1000)] == [1, 3, 5]


def test_no_requests_no_answers(tiny_target, make_engine):
    assert list(make_engine(tiny_target).generate([], GREEDY)) == []


def test_the_watch_hears_of_every_token(tiny_target, make_engine, prompts, capsys):
    """Prompts are read once, in pieces too; what is written and what answers that ended early left over is all that was allowed."""
    heard, requests = [], _requests(prompts)
    written = list(
        generate(
            make_engine(tiny_target).target,
            requests,
            GREEDY,
            batch_size=1,
            max_prefill_tokens=4,
            watch=lambda *counts: heard.append(counts),
        )
    )
    read, new, spared = (sum(column) for column in zip(*heard, strict=True))
    assert read == sum(map(len, prompts)) and new == sum(len(answer.token_ids) for answer in written)
    assert new + spared == 40 * len(prompts) and spared > 0
    assert any(read and not new for read, new, _ in heard)  # the bar moves before anything is written

    with watched(num_prompt_tokens=sum(map(len, prompts)), most_new_tokens=40 * len(prompts), desc="write, float32") as watch:
        for counts in heard:
            watch(*counts)
    said = capsys.readouterr().err
    assert f"{new}/{new}" in said and "prompts read: 100%" in said
