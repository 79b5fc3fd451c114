"""What the comparison of three measurements says: agreement, a difference by more than chance, and the stage at fault."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mtp_train.engine.conformance import TOLERANCES, Conformance
from mtp_train.engine.parity import Parity, parity_report
from mtp_train.records import Acceptance, PromptAcceptance


def acceptance(measured_by: str, accepted: int) -> Acceptance:
    """Eight prompts of ten drafts, of which so many are taken at the first position."""
    prompts = [
        PromptAcceptance(
            prompt_id=f"p{i}",
            category="c",
            num_prompt_tokens=4,
            token_ids=tuple(range(11 + accepted)),
            accepted=(False,) + (True, False) * accepted + (False,) * (10 - accepted),
            num_drafts=10,
            num_drafted_per_position=(10, 10),
            num_accepted_per_position=(accepted, 0),
        )
        for i in range(8)
    ]
    return Acceptance(
        prompts=tuple(prompts),
        scheme="chain",
        decoding="chain",
        num_speculative_tokens=2,
        temperature=1.0,
        draft_sampling="greedy",
        measured_by=measured_by,
        engine_version="9.9",
        dtype="float32",
        wall_s=None,
        notes={"class": "MiMoMTP", "attention": ["CPU_ATTN"], "serve": "vllm serve target"},
    )


def conformance(*stages: tuple[str, float]) -> Conformance:
    """Two rows per stage, the second one further apart by the share that is given."""
    found = Conformance(tolerance=TOLERANCES["float32"])
    for stage, error in stages:
        expected = torch.ones(2, 4)
        found.at(stage).add(expected, expected * torch.tensor([[1.0], [1.0 + error]]), where=["r position 0", "r position 1"])
    return found


@pytest.fixture
def parity() -> Parity:
    names = ("estimate", "hf", "vllm")
    estimate, reference, vllm = (acceptance(name, 4) for name in names)
    return Parity(
        estimate=estimate,
        reference=reference,
        vllm=vllm,
        text=None,
        target=conformance(("hidden", 1e-6), ("logits", 1e-6)),
        drafts=conformance(("target hidden", 1e-6), ("depth 0 hidden", 2e-6)),
        num_traced=2,
    )


def test_agreement_is_said_with_every_stage_and_the_command(parity: Parity) -> None:
    said = parity_report(parity)
    assert "agree within their intervals. Every stage of target and head is within its tolerance (rms 1e-05" in said
    assert said.count("0.4000 [0.4000, 0.4000]") == 3 and "estimate - vLLM 0.0000" in said
    for part in ("## The target row by row (2 prompts", "| logits | 2 |", "| depth 0 hidden | 2 |", "```\nvllm serve target\n```"):
        assert part in said, part


def test_the_first_stage_beyond_its_tolerance_is_at_fault(parity: Parity) -> None:
    apart = dataclasses.replace(parity, vllm=acceptance("vllm", 6), drafts=conformance(("target hidden", 1e-6), ("depth 0 hidden", 0.01)))
    said = parity_report(apart)
    assert "part by more than chance: estimate - vLLM, reference - vLLM. At fault: **depth 0 hidden**" in said
    assert "largest 1.0e-02 of 0.0001, at r position 1" in said
    both = dataclasses.replace(apart, target=conformance(("hidden", 1e-6), ("logits", 1e-3)))
    assert "At fault: **logits**" in parity_report(both), "the head rests on the target"
