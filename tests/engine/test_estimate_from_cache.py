"""The estimate from the cache counts what real decoding counts: exactly for greedy drafts, within its interval for drawn ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import GenerateRequest, PrefillSettings, Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.head.medusa import Medusa
from mtp_train.records import Response


def _samples(engine, prompts, answers):
    responses = [
        Response(
            prompt_id=f"r{index}",
            token_ids=(*prompt, *answers[f"r{index}"]),
            loss_mask=(*(False,) * len(prompt), *(True,) * len(answers[f"r{index}"])),
            messages=({"role": "user", "content": "x"},),
            finish_reason="stop",
            category="c",
            source="s",
        )
        for index, prompt in enumerate(prompts)
    ]
    return list(engine.prefill(responses, PrefillSettings(target_layer_ids=(), top_k=None)))


def _many(num: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(8, 150, (int(n),), generator=generator).tolist()) for n in torch.randint(2, 30, (num,), generator=generator)
    ]


@pytest.mark.parametrize(
    ("word", "num_blocks", "k"), [*((word, 1, k) for word in ("mtp", "eagle") for k in (1, 3, 5)), ("mtp", 2, 5), ("mtp", 3, 3)]
)
def test_greedy_counts_are_those_of_real_decoding(easy_target, make_engine, leaning_head, word, num_blocks, k):
    head = leaning_head(easy_target, word, num_blocks=num_blocks)
    engine = make_engine(easy_target, load_head=head, batch_size=16, max_prefill_tokens=512)
    prompts = _many(24, seed=0)
    sampling = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=50, seed=0)
    settings = SpeculateSettings(
        decoding=Chain(num_speculative_tokens=k, refresh=True), draft_sampling="greedy", sampling=sampling, batch_size=8, ignore_eos=False
    )
    requests = [SpeculateRequest(prompt_id=f"r{index}", category="c", token_ids=prompt) for index, prompt in enumerate(prompts)]
    measured = engine.speculate(requests, Path("unused"), settings)
    answers = {prompt.prompt_id: prompt.token_ids for prompt in measured.prompts}
    estimated = estimate(
        engine.load_head(None, engine.target.shared_weights()),
        _samples(engine, prompts, answers),
        num_speculative_tokens=k,
        draft_sampling="greedy",
        sampling=sampling,
        max_batch_tokens=200,
        device=torch.device("cpu"),
    )
    assert estimated.prompts == measured.prompts
    assert estimated.rate_per_position()[0] > 0.1, "a head that never hits proves nothing"
    assert estimated.measured_by == "estimate" and estimated.dtype == "float32"


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampled_rates_agree_within_their_interval(easy_target, make_engine, leaning_head, draft_sampling, top_p):
    engine = make_engine(easy_target, load_head=leaning_head(easy_target, "mtp"), batch_size=64, max_prefill_tokens=4096)
    prompts = _many(150, seed=1)
    sampling = Sampling(temperature=1.3, top_p=top_p, max_new_tokens=24, seed=0)
    requests = [SpeculateRequest(prompt_id=f"r{index}", category="c", token_ids=prompt) for index, prompt in enumerate(prompts)]
    settings = SpeculateSettings(
        decoding=Chain(num_speculative_tokens=3, refresh=True),
        draft_sampling=draft_sampling,
        sampling=sampling,
        batch_size=64,
        ignore_eos=False,
    )
    measured = engine.speculate(requests, Path("unused"), settings)
    # Answers drawn by plain decoding, with other seeds: independent of the run they are compared with.
    other = Sampling(temperature=1.3, top_p=top_p, max_new_tokens=24, seed=99)
    plain = [GenerateRequest(request_id=f"r{index}", token_ids=prompt, max_new_tokens=24) for index, prompt in enumerate(prompts)]
    answers = {answer.request_id: answer.token_ids for answer in engine.generate(plain, other)}
    estimated = estimate(
        engine.load_head(None, engine.target.shared_weights()),
        _samples(engine, prompts, answers),
        num_speculative_tokens=3,
        draft_sampling=draft_sampling,
        sampling=other,
        max_batch_tokens=4096,
        device=torch.device("cpu"),
    )
    assert min(measured.num_drafts, estimated.num_drafts) > 800
    for position in range(2):
        one, two = measured.rate_per_position()[position], estimated.rate_per_position()[position]
        pooled = (one + two) / 2
        spread = math.sqrt(pooled * (1 - pooled) * (1 / measured.num_drafts + 1 / estimated.num_drafts))
        # Drafts of one answer are not independent; 4 standard errors of independent ones leave room for it.
        assert abs(one - two) < 4 * spread + 1e-3, (position, one, two, spread)
    assert 0.02 < measured.rate_per_position()[0] < 0.98


@pytest.mark.parametrize("word", ["mtp", "eagle"])
@pytest.mark.parametrize("target", ["easy_target", "windowed_target"])
def test_rows_left_out_change_nothing(request, monkeypatch, make_engine, leaning_head, target, word):
    """Whoever computes every row at every depth counts the same."""
    path = request.getfixturevalue(target)
    engine = make_engine(path, load_head=leaning_head(path, word), batch_size=16, max_prefill_tokens=512)
    prompts, sampling = _many(12, seed=2), Sampling(temperature=0.0, top_p=1.0, max_new_tokens=40, seed=0)
    asked = [GenerateRequest(request_id=f"r{index}", token_ids=prompt, max_new_tokens=40) for index, prompt in enumerate(prompts)]
    samples = _samples(engine, prompts, {answer.request_id: answer.token_ids for answer in engine.generate(asked, sampling)})
    head = engine.load_head(None, engine.target.shared_weights())

    def estimated():
        return estimate(
            head,
            samples,
            num_speculative_tokens=4,
            draft_sampling="greedy",
            sampling=sampling,
            max_batch_tokens=200,
            device=torch.device("cpu"),
        )

    found, unroll, asked_for = estimated(), type(head).unroll, []
    monkeypatch.setattr(type(head), "unroll", lambda self, batch, *, wanted: asked_for.append(wanted) or unroll(self, batch))
    assert estimated().prompts == found.prompts
    assert any(wanted is not None and wanted.still is not None for wanted in asked_for)
    if target == "easy_target":
        assert found.rate_per_position()[1] > 0.05, "drafts that never get to a second token prove little"


def test_each_answer_of_a_conversation_is_walked_apart(easy_target, make_engine, leaning_head):
    engine = make_engine(easy_target, load_head=leaning_head(easy_target, "mtp"))
    tokens = _many(1, seed=3)[0] * 3
    response = Response(
        prompt_id="talk",
        token_ids=tokens,
        loss_mask=tuple(index % 10 >= 4 for index in range(len(tokens))),
        messages=({"role": "user", "content": "x"},),
        finish_reason="stop",
        category="c",
        source="s",
    )
    sampling = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=6, seed=0)
    found = estimate(
        engine.load_head(None, engine.target.shared_weights()),
        engine.prefill([response], PrefillSettings(target_layer_ids=(), top_k=None)),
        num_speculative_tokens=2,
        draft_sampling="greedy",
        sampling=sampling,
        max_batch_tokens=4096,
        device=torch.device("cpu"),
    )
    assert [prompt.prompt_id for prompt in found.prompts] == [f"talk:{number}" for number in range(len(found.prompts))]
    assert [prompt.num_prompt_tokens for prompt in found.prompts] == list(range(4, len(tokens), 10))
    assert all(prompt.token_ids == tokens[prompt.num_prompt_tokens : prompt.num_prompt_tokens + 6] for prompt in found.prompts)


def test_more_tokens_than_parallel_heads_are_refused(easy_target, make_engine):
    """The positions behind them would be counted as drafted and never taken."""
    shared = make_engine(easy_target).target.shared_weights()
    head = Medusa(
        target_path=easy_target, shared=shared, num_heads=2, num_layers=1, own_lm_heads=False, init="zeros", trust_remote_code=False
    )
    sampling = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=6, seed=0)
    common = {"draft_sampling": "greedy", "sampling": sampling, "max_batch_tokens": 64, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match="expected at most 2, which head medusa speaks about at once, found 3"):
        estimate(head, [], num_speculative_tokens=3, **common)
    assert estimate(head, [], num_speculative_tokens=2, **common).prompts == ()
