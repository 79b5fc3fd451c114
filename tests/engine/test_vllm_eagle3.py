"""EAGLE-3 in vLLM itself: every draft row of its own class is ours, and it accepts what the reference and the estimate count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_for_tests as own

from mtp_train.batch.packing import pack
from mtp_train.checkpoint import save_head
from mtp_train.engine.base import GenerateRequest, PrefillSettings, SpeculateRequest
from mtp_train.engine.conformance import TOLERANCES, compare_drafts
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.engine.hf import HfEngine
from mtp_train.exporter.vllm import VllmExporter
from mtp_train.head.eagle3 import Eagle3
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.records import Response, Sample
from mtp_train.target.draft_vocabulary import count_answer_tokens, most_frequent
from mtp_train.target.spec import fingerprint
from mtp_train.target.weights import read_shared
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.probe import write_probe
from mtp_train.trainer.rows import align

pytestmark = own.NEEDS_VLLM
V, D, LAYERS, K = 128, 64, 4, 3
SAMPLING = own.greedy(24)
SETTINGS = own.settings(sampling=SAMPLING)
# Family of the target, class in vLLM, the head's settings.
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "3.1, the last layer tapped": (
        "llama",
        "Eagle3LlamaForCausalLM",
        {"target_layer_ids": (0, 1, LAYERS - 1), "draft_vocab_size": 96, "norms": {"taps": True, "feedback": True}},
    ),
    "3, two taps, all tokens": (
        "llama",
        "Eagle3LlamaForCausalLM",
        {"target_layer_ids": (0, 2), "draft_vocab_size": None, "norms": {"taps": False, "feedback": False}},
    ),
    "no taps": (
        "llama",
        "Eagle3LlamaForCausalLM",
        {"target_layer_ids": (), "draft_vocab_size": 96, "norms": {"taps": False, "feedback": True}},
    ),
    "norms of queries and keys": (
        "qwen3",
        "Eagle3Qwen3ForCausalLM",
        {"target_layer_ids": (1, 2), "draft_vocab_size": 96, "norms": {"taps": True, "feedback": False}},
    ),
}


@pytest.fixture(scope="module")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random target whose next token mostly follows from the last one, so that a head can be right; heads of size 32, the
    smallest that vLLM's CPU attention has."""

    def make(family: str) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            family,
            vocab_size=V,
            hidden_size=D,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=[7, 30],
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).eval()
            embedding, cycle = torch.randn(V, D), torch.randperm(V)
            with torch.no_grad():
                model.model.embed_tokens.weight.copy_(embedding)
                model.lm_head.weight[cycle] = 0.3 * embedding[cycle.roll(1)]
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
        path: Path = tmp_path_factory.mktemp(family) / "target"
        model.save_pretrained(path)
        return path

    return make


def random_prompts(count: int, *, seed: int) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(32, V, (1 + (7 * i) % 40,), generator=draw).tolist()) for i in range(count)]


def answered(name: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Response:
    mask = (False,) * len(prompt) + (True,) * len(answer)
    return Response(prompt_id=name, token_ids=prompt + answer, loss_mask=mask, messages=(), finish_reason="given", category="c", source="s")


def train(head: Eagle3, hf: HfEngine) -> list[Sample]:
    """Some steps on the target's own answers; returns what they were trained on."""
    prompts = random_prompts(48, seed=1)
    asked = [GenerateRequest(request_id=f"{n}", token_ids=prompt, max_new_tokens=24) for n, prompt in enumerate(prompts)]
    answers = {answer.request_id: answer.token_ids for answer in hf.generate(asked, SAMPLING)}
    responses = [answered(request.request_id, request.token_ids, answers[request.request_id]) for request in asked]
    samples = list(hf.prefill(responses, PrefillSettings(target_layer_ids=head.target_layer_ids, top_k=16)))
    if head.draft_vocab_size is not None:
        head.use_draft_ids(most_frequent(count_answer_tokens(samples, vocab_size=V), size=head.draft_vocab_size))
    objective = Objective(terms={"topk_kl": Term(1.0, TopkKl())}, draft_steps=K, decay=1.0, chunk_rows=512)
    packed = align(pack(samples), draft_steps=K, need_top=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(40):
        result = objective(head, packed, 1.0 / packed.counts_K.float(), measure=False)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
    head.eval().requires_grad_(False)
    return samples


def export(folder: Path, head: Eagle3, target: Path, samples: list[Sample]) -> Path:
    stated = {"target_name": "tiny", "target_fingerprint": fingerprint(target)}
    save_head(folder / "head", head.state_dict(), config=head.draft_config(), target=stated, made_by={})
    taps = bool(head.target_layer_ids)
    write_probe(folder / "head", head, [replace(sample, taps_TLD=sample.taps_TLD if taps else None) for sample in samples[:6]])
    exporter = VllmExporter(dtype="float32", allow_plugin=False, trust_remote_code=False, overwrite=False)
    return exporter.export(folder / "head", target, folder / "served").path


@pytest.mark.parametrize("form", FORMS)
def test_drafts_and_acceptance_agree_three_ways(form: str, make_target: Callable[[str], Path], tmp_path: Path) -> None:
    family, served_by, settings = FORMS[form]
    target = make_target(family)
    head = Eagle3(target_path=target, shared=read_shared(target), init="random", seed=1, trust_remote_code=False, **settings)
    hf, vllm = own.make_hf(target, load_head=lambda path, shared: head), own.make_vllm(target)
    served = export(tmp_path, head, target, train(head, hf))

    asked = [SpeculateRequest(prompt_id=f"p{n}", category="c", token_ids=prompt) for n, prompt in enumerate(random_prompts(12, seed=2))]
    measured, rows = vllm.trace(asked, served, SETTINGS)
    assert measured.notes["class"] == measured.notes["draft_class"] == served_by and measured.notes["plugin"] is None

    responses = [answered(p.prompt_id, r.token_ids, p.token_ids) for r, p in zip(asked, measured.prompts, strict=True)]
    samples = list(hf.prefill(responses, PrefillSettings(target_layer_ids=head.target_layer_ids, top_k=None)))
    result = compare_drafts(
        rows,
        head=head,
        target_hidden={sample.sample_id: head.read_target(sample.hidden_TD, sample.taps_TLD) for sample in samples},
        answers={response.prompt_id: response.token_ids for response in responses},
        tolerance=TOLERANCES["float32"],
    )
    assert result.fault is None, result.fault
    assert {f"depth {k} {what}" for k in range(K) for what in ("hidden", "logits")} <= set(result.gaps)
    assert result.at("depth 2 logits").num_rows >= measured.num_drafts

    assert hf.speculate(asked, tmp_path / "head", SETTINGS).prompts == measured.prompts
    estimated = estimate(
        head,
        samples,
        num_speculative_tokens=K,
        draft_sampling="greedy",
        sampling=SAMPLING,
        max_batch_tokens=512,
        device=torch.device("cpu"),
    )
    for ours, theirs in zip(estimated.prompts, measured.prompts, strict=True):
        assert (ours.num_drafts, ours.num_accepted_per_position) == (theirs.num_drafts, theirs.num_accepted_per_position)
    rates = measured.rate_per_position()
    assert rates[0] > 0.2 and rates[1] > 0 and rates[2] < 1, f"drafts of both fates: {rates}"
