"""What vLLM's classes draft against what the head drafts, forward by forward; and that the comparison can fail."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import vllm_for_tests as own

from mtp_train.engine.base import PrefillSettings, SpeculateRequest
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.vllm_trace import DraftRows
from mtp_train.head.mtp import Mtp
from mtp_train.records import Acceptance

pytestmark = own.NEEDS_VLLM


class Traced(NamedTuple):
    """One run of vLLM, with every forward of the head."""

    head: Mtp
    checkpoint: Path
    asked: list[SpeculateRequest]
    measured: Acceptance
    rows: list[DraftRows]


@pytest.fixture(scope="module")
def traced(vllm_target: Path, vllm_hf: HfEngine, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """The head with all norms, in the stock MiMo class, on 16 prompts."""
    folder, head, asked = tmp_path_factory.mktemp("traced"), own.normed_head(vllm_target), own.requests(16)
    served = own.export(folder, head, vllm_target, vllm_hf)
    return Traced(head, folder / "head", asked, *own.make_vllm(vllm_target).trace(asked, served, own.settings()))


def test_mtp_drafts_and_acceptance_agree_three_ways(traced: Traced, vllm_hf: HfEngine) -> None:
    """Every draft row; estimate, reference decoder and vLLM's counters."""
    head, checkpoint, asked, measured, rows = traced
    assert measured.notes["class"] == measured.notes["draft_class"] == "MiMoMTP" and measured.notes["plugin"] is None

    result = own.replay(head, vllm_hf, asked, measured, rows)
    assert result.fault is None, result.fault
    assert {f"depth {k} {what}" for k in range(3) for what in ("hidden", "logits")} <= set(result.gaps)
    assert result.at("depth 2 logits").num_rows >= measured.num_drafts
    assert any(0 in r.position_R for r in rows if r.depth == 0) and any(sum(p.num_accepted_per_position) > 0 for p in measured.prompts)

    reference = vllm_hf.speculate(asked, checkpoint, own.settings())
    for ours, theirs in zip(reference.prompts, measured.prompts, strict=True):
        assert ours == theirs
    answers = [own.response(p.prompt_id, r.token_ids + p.token_ids, len(r.token_ids)) for r, p in zip(asked, measured.prompts, strict=True)]
    estimated = estimate(
        head,
        vllm_hf.prefill(answers, PrefillSettings(target_layer_ids=(), top_k=None)),
        num_speculative_tokens=3,
        draft_sampling="greedy",
        sampling=own.settings().sampling,
        max_batch_tokens=512,
        device=torch.device("cpu"),
    )
    for ours, theirs in zip(estimated.prompts, measured.prompts, strict=True):
        assert (ours.num_drafts, ours.num_accepted_per_position) == (theirs.num_drafts, theirs.num_accepted_per_position)
    rates = measured.rate_per_position()
    assert 0.3 < rates[0] < 0.95 and rates[0] > rates[1] > rates[2] > 0, rates


@pytest.mark.parametrize(
    ("served_by", "switches", "zero", "order", "tied"),
    [
        ("ErnieMTP", own.norms("embed", "hidden", "input"), True, "hidden_embed", True),
        ("EagleMiniCPMForCausalLM", own.norms("embed", "hidden", "input"), False, "embed_hidden", False),
        ("EagleMistralForCausalLM", own.norms("input", "output", "feedback"), False, "hidden_embed", False),
        ("EagleLlamaForCausalLM", own.norms(), False, "embed_hidden", True),
        ("EagleMtpTrainForCausalLM", own.norms("hidden", "output"), True, "hidden_embed", False),
    ],
)
def test_each_class_drafts_what_the_head_drafts(
    served_by: str, switches, zero: bool, order: str, tied: bool, vllm_target: Path, vllm_target_tied: Path, tmp_path: Path
) -> None:
    """The table of exporter/vllm_classes.py against vLLM itself, with both column orders, over tied and untied targets."""
    target = vllm_target_tied if tied else vllm_target
    head, hf = own.make_head(target, switches=switches, zero=zero, order=order), own.make_hf(target)
    served, asked = own.export(tmp_path, head, target, hf), own.requests(6)
    measured, rows = own.make_vllm(target).trace(asked, served, own.settings(sampling=own.greedy(16)))
    assert measured.notes["class"] == measured.notes["draft_class"] == served_by
    result = own.replay(head, hf, asked, measured, rows)
    assert result.fault is None, result.fault
    assert result.at("depth 2 logits").argmax_agreement > 0.98


def test_a_changed_tensor_is_found_and_its_stage_named(traced: Traced, vllm_hf: HfEngine) -> None:
    """The comparison can fail: of a head that differs in one norm, the first stage that shows it is named."""
    head, _, asked, measured, rows = traced
    head = copy.deepcopy(head)
    with torch.no_grad():
        head.output_norm.weight *= 1.01
    result = own.replay(head, vllm_hf, asked, measured, rows)
    assert result.fault is not None and result.fault.stage == "depth 0 hidden"
    other = [r if r.depth else dataclasses.replace(r, read_RD=r.read_RD * 1.01) for r in rows]
    result = own.replay(head, vllm_hf, asked, measured, other)
    assert result.fault is not None and result.fault.stage == "target hidden"
