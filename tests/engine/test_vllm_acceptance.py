"""Acceptance as vLLM counts it: text, greedy and drawn drafts against the reference, schemes without a head of ours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import vllm_for_tests as own

from mtp_train.acceptance.report_data import Measurement
from mtp_train.decoding.prompt_lookup import PromptLookup
from mtp_train.engine.base import Sampling, SpeculateRequest
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.measure import decode
from mtp_train.engine.vllm_repair import expand_batch_to_tokens
from mtp_train.exporter.served import Served, write_served

pytestmark = own.NEEDS_VLLM


def test_speculation_writes_what_plain_decoding_writes(vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    served, asked, engine = (
        own.export(tmp_path, own.normed_head(vllm_target), vllm_target, vllm_hf),
        own.requests(8),
        own.make_vllm(vllm_target),
    )
    kept = own.settings(ignore_eos=True)
    plain = engine.baseline(asked, kept)
    measured = engine.speculate(asked, served, kept)
    assert {p.prompt_id: p.token_ids for p in measured.prompts} == plain.token_ids
    assert all(len(ids) == 24 for ids in plain.token_ids.values()), "ignore_eos"
    assert measured.num_drafts < sum(len(ids) - 1 for ids in plain.token_ids.values())
    for prompt in measured.prompts:
        assert len(prompt.accepted) == len(prompt.token_ids) and sum(prompt.accepted) == prompt.num_accepted


def test_bfloat16_texts_are_compared_and_where_they_part_is_said(vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    """Each difference is the first one, with the tokens of both and the gap between the two best logits at that place."""
    served, asked = own.export(tmp_path, own.normed_head(vllm_target), vllm_target, vllm_hf), own.requests(24)
    engine = own.make_vllm(vllm_target, dtype="bfloat16")
    found = decode(
        head="h", prompt_set="p", engine=engine, requests=asked, draft=served, settings=own.settings(ignore_eos=True), plain=True
    )
    assert isinstance(found, Measurement) and found.identity is not None and found.identity.num_prompts == 24
    texts = {prompt.prompt_id: prompt.token_ids for prompt in found.acceptance.prompts}
    for difference in found.identity.differences:
        assert texts[difference.prompt_id][difference.index] == difference.speculated_token != difference.plain_token
        assert 0 <= difference.logit_gap < 0.2, "only near tokens change places by rounding"


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_sampled_acceptance_is_the_reference_s(draft_sampling: str, vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    """At temperature 1 the draws differ; the acceptance rate at position 1 must not, beyond its standard error."""
    served, asked = own.export(tmp_path, own.normed_head(vllm_target), vllm_target, vllm_hf), own.requests(32)
    kept = own.settings(
        draft_sampling=draft_sampling,
        ignore_eos=True,
        batch_size=16,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=32, seed=3),
    )
    theirs, ours = own.make_vllm(vllm_target).speculate(asked, served, kept), vllm_hf.speculate(asked, tmp_path / "head", kept)
    first, second = theirs.rate_per_position()[0], ours.rate_per_position()[0]
    error = (first * (1 - first) / theirs.num_drafts + second * (1 - second) / ours.num_drafts) ** 0.5
    assert abs(first - second) < 4 * error, (first, second, error)
    assert 0.05 < second < 0.95


def repeating(count: int) -> list[SpeculateRequest]:
    """Prompts that say everything three times, so that looking up what followed finds something."""
    return [dataclasses.replace(request, token_ids=request.token_ids * 3) for request in own.requests(count)]


def test_prompt_lookup_is_the_reference_s(vllm_target: Path, vllm_hf: HfEngine) -> None:
    """vLLM's ngram and our own lookup count the same, prompt by prompt, steps without a match among them."""
    kept = own.settings(decoding=PromptLookup(num_speculative_tokens=3, max_ngram=4, min_ngram=2), ignore_eos=True, sampling=own.greedy(30))
    measured = own.make_vllm(vllm_target, max_length_tokens=512).speculate(repeating(6), None, kept)
    reference = vllm_hf.speculate(repeating(6), None, kept)
    assert (measured.scheme, measured.decoding) == (reference.scheme, reference.decoding) == ("chain", "prompt_lookup")
    for ours, theirs in zip(reference.prompts, measured.prompts, strict=True):
        assert ours == theirs
    assert 0 < measured.num_drafts < sum(len(prompt.token_ids) - 1 for prompt in measured.prompts), "some steps draft nothing"
    assert "ngram" in measured.notes["serve"]


def test_a_draft_model_that_is_the_target_has_every_draft_accepted(vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    config = {"method": "draft_model", "model": str(vllm_target)}
    served = Served(class_name="draft_model", speculative_config=config, hf_overrides=None, plugin=None, target_path=str(vllm_target))
    write_served(tmp_path, served)
    kept = own.settings(ignore_eos=True, sampling=own.greedy(30))
    measured = own.make_vllm(vllm_target, max_length_tokens=512).speculate(repeating(6), tmp_path, kept)
    plain = vllm_hf.baseline(repeating(6), kept).token_ids
    for prompt in measured.prompts:
        assert prompt.token_ids == plain[prompt.prompt_id]
        assert sum(prompt.accepted) == prompt.num_accepted and prompt.num_drafts <= prompt.num_drafted_per_position[0] <= 29
    assert measured.rate_per_position()[0] == 1.0 and measured.acceptance_length() > 3.5


def test_repaired_expansion_is_per_row() -> None:
    """Each request's temperature once per drafted row, greedy ones (0) replaced, in floats and in ints."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(torch.tensor([0.5, 9.0, 0.0]), ends, 5, 0, 1).tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert expand_batch_to_tokens(torch.tensor([4, 5, 6]), ends, 5).tolist() == [4, 4, 6, 6, 6]
