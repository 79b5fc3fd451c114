"""Speculation writes what plain decoding writes, counts what it accepts, and keeps both caches as if it never guessed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from mtp_train.acceptance.identity import compare
from mtp_train.acceptance.verify import expected_distance
from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.head.base import Drafted, Head
from mtp_train.head.eagle import Eagle
from mtp_train.head.mtp import Mtp

ON = {"embed": True, "hidden": True, "input": True, "output": True, "feedback": True}
OFF = dict.fromkeys(ON, False)


def _settings(**changes) -> SpeculateSettings:
    plain = SpeculateSettings(
        decoding=Chain(num_speculative_tokens=3, refresh=True),
        draft_sampling="greedy",
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=40, seed=0),
        batch_size=1,
        ignore_eos=False,
    )
    return dataclasses.replace(plain, **changes)


def _requests(prompts) -> list[SpeculateRequest]:
    return [SpeculateRequest(prompt_id=f"r{index}", category="c", token_ids=prompt) for index, prompt in enumerate(prompts)]


def _random_head(target: Path, word: str, seed: int = 1):
    def load(path, shared):
        classes = {"mtp": (Mtp, ON, "hidden_embed", True), "eagle": (Eagle, OFF, "embed_hidden", False)}
        cls, norms, order, zero = classes[word]
        return cls(
            target_path=target,
            shared=shared,
            norms=norms,
            column_order=order,
            zero_first_embedding=zero,
            init="target_last_layer",
            seed=seed,
            trust_remote_code=False,
        )

    return load


class Mixed(Head):
    """Right about half the time: drafts what a table of the plain answers says where a hash of base and depth is even.

    Rows are told apart by token and rotary position, so that it needs no state of its own."""

    word = method = "mixed"

    def __init__(self, *, shared, answers, prompts, share):
        super().__init__(shared=shared)
        self.table = {}
        for name, prompt in prompts.items():
            text = [*prompt, *answers[name]]
            for position in range(len(text) - 2):
                self.table[(position, text[position + 1])] = text[position + 2]
        self.share = share

    def unroll(self, batch):
        raise AssertionError("not used here")

    def settings(self):
        return {}

    def project(self, hidden_MD):
        return hidden_MD

    def draft(self, *, token_ids_T, hidden_TD, position_T, context):
        vocabulary = self.shared.lm_head_VD.shape[0]
        guesses = []
        for position, token in zip(position_T.tolist(), token_ids_T.tolist(), strict=True):
            right = (position * 7919 + token * 104729) % 100 < self.share
            guesses.append(self.table.get((position, token), 0) if right else (token + 1) % vocabulary)
        one_hot = torch.nn.functional.one_hot(torch.tensor(guesses), vocabulary).float()
        return Drafted(one_hot, hidden_TD[:, :1].expand(-1, hidden_TD.shape[1]))


@pytest.fixture(scope="module")
def plain_answers(tiny_target, make_engine, prompts):
    return make_engine(tiny_target).baseline(_requests(prompts), _settings()).token_ids


@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize(("k", "word"), [(1, "mtp"), (2, "eagle"), (3, "mtp"), (5, "eagle"), (4, "mixed"), (1, "mixed"), (5, "mixed")])
def test_greedy_speculation_equals_greedy_decoding(tiny_target, make_engine, prompts, plain_answers, k, word, batch_size, refresh):
    requests = _requests(prompts)
    by_id = {request.prompt_id: request.token_ids for request in requests}
    load = _random_head(tiny_target, word) if word != "mixed" else None
    engine = make_engine(
        tiny_target,
        load_head=load or (lambda path, shared: Mixed(shared=shared, answers=plain_answers, prompts=by_id, share=70)),
    )
    found = engine.speculate(
        requests, Path("unused"), _settings(decoding=Chain(num_speculative_tokens=k, refresh=refresh), batch_size=batch_size)
    )
    assert [prompt.prompt_id for prompt in found.prompts] == [request.prompt_id for request in requests]
    identity = compare(
        prompts=by_id,
        plain=plain_answers,
        speculated={prompt.prompt_id: prompt.token_ids for prompt in found.prompts},
        logit_gap=engine.logit_gap,
    )
    assert identity.differences == ()
    for prompt in found.prompts:
        assert sum(prompt.accepted) == prompt.num_accepted
        assert len(prompt.accepted) == len(prompt.token_ids)
        # Every verification gives one token of the target's own, but a last one cut short; the prefill gives one more.
        assert prompt.accepted.count(False) in (prompt.num_drafts + 1, prompt.num_drafts)
        assert list(prompt.num_accepted_per_position) == sorted(prompt.num_accepted_per_position, reverse=True)
    if word == "mixed":
        assert found.acceptance_length() > 1.3


class Jump(Head):
    """Drafts "the token read plus a constant": over the permutation target always right, or always wrong."""

    word = method = "jump"

    def __init__(self, *, shared, jump):
        super().__init__(shared=shared)
        self.jump = jump

    def unroll(self, batch):
        raise AssertionError("not used here")

    def settings(self):
        return {}

    def project(self, hidden_MD):
        return hidden_MD

    def draft(self, *, token_ids_T, hidden_TD, position_T, context):
        one_hot = torch.nn.functional.one_hot((token_ids_T + self.jump) % 64, 64).float()
        return Drafted(one_hot, torch.zeros(len(token_ids_T), 64))


@pytest.fixture(scope="module")
def permutation_target(tmp_path_factory) -> Path:
    """A target that says "the last token plus 7, modulo 64" whatever came before: its layers add nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, eos_token_id=63)
    )
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.lm_head.weight.copy_(torch.eye(64).roll(7, dims=0))
    path = tmp_path_factory.mktemp("permutation")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("jump", "rate"), [(7, 1.0), (14, 0.0)])
def test_a_head_that_is_always_right_and_one_that_is_always_wrong(permutation_target, make_engine, jump, rate, batch_size):
    engine = make_engine(permutation_target, load_head=lambda path, shared: Jump(shared=shared, jump=jump))
    requests = _requests([(first, first + 7) for first in range(6)])
    sampling = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=17, seed=0)
    found = engine.speculate(requests, Path("unused"), _settings(batch_size=batch_size, sampling=sampling, ignore_eos=True))
    assert found.rate_per_position() == [rate] * 3
    assert found.acceptance_length() == 1 + 3 * rate
    for request, prompt in zip(requests, found.prompts, strict=True):
        assert prompt.token_ids == tuple((request.token_ids[-1] + 7 * (step + 1)) % 64 for step in range(17))
        assert prompt.num_drafts == (4 if rate else 16)
    stopping = engine.speculate(_requests([(63 - 5 * 7,)]), Path("unused"), _settings(batch_size=batch_size, sampling=sampling))
    assert stopping.prompts[0].token_ids == (35, 42, 49, 56, 63)
    # 35 from the prefill; 42 49 56 drafted, 63 the target's own: or each the target's own.
    assert stopping.prompts[0].num_accepted_per_position == ((1, 1, 1) if rate else (0, 0, 0))


def test_tokens_and_rounds_are_counted(tiny_target, make_engine, prompts, plain_answers):
    """Beyond the ends of answers the engines count on: num_drafts x K drafted, and at least what is counted within."""
    engine = make_engine(tiny_target, load_head=_random_head(tiny_target, "mtp"))
    found = engine.speculate(_requests(prompts), Path("unused"), _settings(batch_size=3))
    assert found.notes["num_drafted_per_position_beyond_end"] == [found.num_drafts] * 3
    within = [sum(prompt.num_accepted_per_position[i] for prompt in found.prompts) for i in range(3)]
    assert all(beyond >= inside for beyond, inside in zip(found.notes["num_accepted_per_position_beyond_end"], within, strict=True))
    assert found.wall_s > 0 and found.measured_by == "hf" and found.scheme == "chain" and found.dtype == "float32"


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_sampled_speculation_repeats_and_does_not_depend_on_the_batch(tiny_target, make_engine, prompts, draft_sampling):
    sampling = Sampling(temperature=0.9, top_p=0.95, max_new_tokens=20, seed=3)
    engine = make_engine(tiny_target, load_head=_random_head(tiny_target, "mtp"))
    runs = [
        engine.speculate(requests, Path("unused"), _settings(sampling=sampling, draft_sampling=draft_sampling, batch_size=batch_size))
        for batch_size, requests in ((1, _requests(prompts)), (5, _requests(prompts)[::-1]))
    ]
    assert sorted(runs[0].prompts, key=lambda p: p.prompt_id) == sorted(runs[1].prompts, key=lambda p: p.prompt_id)


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_sampled_speculation_keeps_the_targets_distribution(tmp_path, make_engine, draft_sampling):
    """The second and third token of 6000 answers over a vocabulary of 8, end to end, against the target's own joint law."""
    target = _small_vocabulary(tmp_path)
    engine = make_engine(target, load_head=_random_head(target, "mtp", seed=7))
    num, temperature = 6000, 0.7
    requests = [SpeculateRequest(prompt_id=f"r{index}", category="c", token_ids=(1, 2, 3)) for index in range(num)]
    settings = _settings(
        sampling=Sampling(temperature=temperature, top_p=1.0, max_new_tokens=3, seed=0),
        draft_sampling=draft_sampling,
        batch_size=500,
        ignore_eos=True,
        decoding=Chain(num_speculative_tokens=2, refresh=True),
    )
    found = engine.speculate(requests, Path("unused"), settings)
    texts = torch.tensor([prompt.token_ids for prompt in found.prompts])
    joint = _joint(engine, (1, 2, 3), temperature)
    codes = (texts * torch.tensor([64, 8, 1])).sum(-1)
    frequencies = torch.bincount(codes, minlength=512).double() / num
    distance = float((frequencies - joint).abs().sum() / 2)
    assert distance < expected_distance(joint.tolist(), num) + 2 / num**0.5
    assert 0.05 < found.rate_per_position()[0] < 0.95


def _small_vocabulary(path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def _joint(engine, prompt, temperature) -> torch.Tensor:
    """p(a) p(b | a) p(c | a, b) for all three-token texts, from plain forwards of the model."""
    from mtp_train.nn.attention import PackedAttention

    def law(prefix):
        tokens = torch.tensor([*prompt, *prefix])
        with torch.inference_mode():
            hidden = engine.target.forward(tokens, torch.arange(len(tokens)), PackedAttention(bounds=(0, len(tokens))))
            return (engine.target.logits(hidden[-1]).double() / temperature).softmax(-1)

    first = law(())
    rows = []
    for a in range(8):
        second = law((a,))
        rows += [first[a] * second[b] * law((a, b)) for b in range(8)]
    return torch.cat(rows)


def test_a_missing_load_head_is_refused(tiny_target, make_engine, prompts):
    with pytest.raises(ValueError, match="load_head"):
        make_engine(tiny_target).speculate(_requests(prompts), Path("unused"), _settings())


def test_the_same_prompt_id_twice_is_refused(tiny_target, make_engine, prompts):
    with pytest.raises(ValueError, match="r0"):
        make_engine(tiny_target).baseline(_requests(prompts)[:1] * 2, _settings())


def test_the_logit_gap_is_that_of_the_plain_model(tiny_target, make_engine, plain_model, prompts):
    with torch.inference_mode():
        best = plain_model(tiny_target)(torch.tensor([prompts[3]])).logits[0, -1].topk(2).values
    assert make_engine(tiny_target).logit_gap(prompts[3]) == pytest.approx(float(best[0] - best[1]), abs=1e-4)
