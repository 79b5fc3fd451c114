"""A draft model in vLLM: text, counters and acceptance are the reference's, greedy and drawn."""

from __future__ import annotations

from pathlib import Path

import torch
import vllm_for_tests as own

from mtp_train.batch.packing import pack
from mtp_train.engine.base import PrefillSettings, Sampling
from mtp_train.engine.hf import HfEngine
from mtp_train.head.draft_model import DraftModel
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.target.weights import read_shared
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.rows import align

pytestmark = own.NEEDS_VLLM


def distilled(target: Path, hf: HfEngine) -> DraftModel:
    """One narrow layer, right often: a few steps on what the target wrote. Its heads are of the smallest size that vLLM has."""
    head = DraftModel(
        target_path=target,
        shared=read_shared(target),
        config={
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
        },
        checkpoint=None,
        revision=None,
        seed=0,
        trust_remote_code=False,
    )
    asked = own.requests(40)
    plain = hf.baseline(asked, own.settings(sampling=own.greedy(40), ignore_eos=True)).token_ids
    answers = [own.response(r.prompt_id, r.token_ids + plain[r.prompt_id], len(r.token_ids)) for r in asked]
    samples = list(hf.prefill(answers, PrefillSettings(target_layer_ids=(), top_k=None)))
    packed = align(pack(samples), draft_steps=1, need_top=False)
    objective = Objective(terms={"forward_kl": Term(1.0, ForwardKl())}, draft_steps=1, decay=1.0, chunk_rows=512)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        objective(head, packed, 1.0 / packed.counts_K.float(), measure=False).loss.backward()
        optimizer.step()
    return head.eval()


def test_text_and_counts_are_the_references(vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    """Also drawn: at temperature 1 the draws differ, and the rate at position 1 must not, beyond its standard error."""
    head = distilled(vllm_target, vllm_hf)
    served, asked = own.export(tmp_path, head, vllm_target, vllm_hf), own.requests(12)
    engine, reference = own.make_vllm(vllm_target, max_length_tokens=512), own.make_hf(vllm_target, load_head=lambda path, shared: head)
    kept = own.settings(ignore_eos=True)
    measured = engine.speculate(asked, served, kept)
    assert measured.notes["class"] == measured.notes["draft_class"] == "LlamaForCausalLM" and "draft_model" in measured.notes["serve"]
    assert {p.prompt_id: p.token_ids for p in measured.prompts} == reference.baseline(asked, kept).token_ids
    ours = reference.speculate(asked, tmp_path / "head", kept)
    for one, other in zip(ours.prompts, measured.prompts, strict=True):
        assert one == other
    assert measured.notes["counters"]["accepted_per_position"] == ours.notes["num_accepted_per_position_beyond_end"]
    rates = measured.rate_per_position()
    assert 0.3 < rates[0] < 1 and rates[0] > rates[1] > rates[2] > 0, rates

    drawn = own.settings(
        draft_sampling="probabilistic",
        ignore_eos=True,
        batch_size=16,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=24, seed=3),
    )
    theirs, ours = engine.speculate(asked, served, drawn), reference.speculate(asked, tmp_path / "head", drawn)
    first, second = theirs.rate_per_position()[0], ours.rate_per_position()[0]
    error = (first * (1 - first) / theirs.num_drafts + second * (1 - second) / ours.num_drafts) ** 0.5
    assert abs(first - second) < 4 * error, (first, second, error)
    assert 0.05 < second < 0.98
