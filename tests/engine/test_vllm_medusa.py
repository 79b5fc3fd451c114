"""Medusa in vLLM: text, counters and acceptance are the reference's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import vllm_for_tests as own

from mtp_train.batch.packing import pack
from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import PrefillSettings
from mtp_train.engine.hf import HfEngine
from mtp_train.head.medusa import Medusa
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.target.weights import read_shared
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.rows import align

pytestmark = own.NEEDS_VLLM
HEADS = 4


def trained(target: Path, hf: HfEngine) -> Medusa:
    """Right often, through the target's own lm_head: a few steps on what the target wrote."""
    head = Medusa(
        target_path=target,
        shared=read_shared(target),
        num_heads=HEADS,
        num_layers=1,
        own_lm_heads=False,
        init="zeros",
        trust_remote_code=False,
    )
    asked = own.requests(40)
    plain = hf.baseline(asked, own.settings(sampling=own.greedy(40), ignore_eos=True)).token_ids
    answers = [own.response(r.prompt_id, r.token_ids + plain[r.prompt_id], len(r.token_ids)) for r in asked]
    samples = list(hf.prefill(answers, PrefillSettings(target_layer_ids=(), top_k=None)))
    packed = align(pack(samples), draft_steps=HEADS, need_top=False)
    objective = Objective(terms={"forward_kl": Term(1.0, ForwardKl())}, draft_steps=HEADS, decay=0.8, chunk_rows=512)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(40):
        optimizer.zero_grad()
        objective(head, packed, 1.0 / packed.counts_K.float(), measure=False).loss.backward()
        optimizer.step()
    return head.eval()


def test_text_and_counts_are_the_references(vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    """Three of the four heads draft, through the target's lm_head, which comes with them; what vLLM cannot do is said."""
    head = trained(vllm_target, vllm_hf)
    served, asked, engine = own.export(tmp_path, head, vllm_target, vllm_hf), own.requests(12), own.make_vllm(vllm_target)
    kept = own.settings(ignore_eos=True)
    measured = engine.speculate(asked, served, kept)
    assert measured.notes["class"] == measured.notes["draft_class"] == "Medusa" and measured.notes["plugin"] is None
    reference = own.make_hf(vllm_target, load_head=lambda path, shared: head)
    assert {p.prompt_id: p.token_ids for p in measured.prompts} == reference.baseline(asked, kept).token_ids
    ours = reference.speculate(asked, tmp_path / "head", kept)
    for one, other in zip(ours.prompts, measured.prompts, strict=True):
        assert one == other
    assert measured.notes["counters"]["accepted_per_position"] == ours.notes["num_accepted_per_position_beyond_end"]
    rates = measured.rate_per_position()
    assert 0.2 < rates[0] < 1 and rates[0] > rates[1] > rates[2] > 0, rates

    five = own.settings(decoding=Chain(num_speculative_tokens=5, refresh=True))
    with pytest.raises(ValueError, match=r"num_speculative_tokens: expected at most 4, for which .* has heads, found 5"):
        engine.speculate(asked, served, five)
    assert not engine.draws_drafts_of("medusa") and engine.draws_drafts_of("mtp")
    with pytest.raises(ValueError, match="expected greedy with vLLM's method medusa, found probabilistic; engine=hf draws its drafts"):
        engine.speculate(asked, served, dataclasses.replace(kept, draft_sampling="probabilistic"))
    with pytest.raises(ValueError, match=r"expected a head that reads its own states .*found one of method medusa"):
        engine.trace(asked, served, kept)
