"""Medusa: what each head says, where it begins, its own lm_heads' gradients, chains and its tree, and the way to disk and back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from mtp_train.batch.packing import pack
from mtp_train.batch.shift import loss_rows
from mtp_train.checkpoint import check_states, read_head_config, read_head_tensors, save_head
from mtp_train.decoding.base import Decoding
from mtp_train.decoding.chain import Chain
from mtp_train.decoding.dynamic_tree import DynamicTree
from mtp_train.decoding.eagle_tree import EagleTree
from mtp_train.decoding.medusa_tree import MedusaTree
from mtp_train.engine.base import Sampling
from mtp_train.exporter.hf import HfExporter, load_exported
from mtp_train.exporter.proof import prove, read_probe
from mtp_train.exporter.vllm import VllmExporter
from mtp_train.head.medusa import Medusa
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.nn.least_squares import before_silu
from mtp_train.records import Batch, Sample
from mtp_train.target.spec import fingerprint
from mtp_train.target.weights import read_shared
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.optim import build_optimizer
from mtp_train.trainer.probe import write_probe
from mtp_train.trainer.rows import align
from mtp_train.trainer.settings import OptimizerSettings

K = 3
FORMS: dict[str, dict[str, Any]] = {
    "shared": {},
    "two layers": {"num_layers": 2},
    "own lm_heads": {"own_lm_heads": True},
}
MakeHead = Callable[..., Medusa]


def make(target: Path, **changes: Any) -> Medusa:
    settings = {"num_heads": K, "num_layers": 1, "own_lm_heads": False, "init": "zeros", **changes}
    return Medusa(target_path=target, shared=read_shared(target), trust_remote_code=False, **settings)


@pytest.fixture
def make_head(tiny_llama: Path) -> MakeHead:
    """A head whose weights are all moved away from where they begin."""

    def moved(**changes: Any) -> Medusa:
        head = make(tiny_llama, **changes)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
        return head.eval()

    return moved


@pytest.mark.parametrize("form", FORMS)
def test_unroll_is_what_it_drafts_from_every_base(make_head: MakeHead, batch: Batch, form: str) -> None:
    """All depths at once, at each base from its own hidden state alone, whatever is packed around it: x + SiLU(W x), then an lm_head."""
    head = make_head(**FORMS[form])
    steps = list(head.unroll(batch))
    assert [step.ahead for step in steps] == [2, 3, 4] and head.num_ahead == head.num_depths == K
    with torch.no_grad():
        for base in range(batch.num_tokens):
            said_K1V = head.ahead(batch.hidden_TD[base : base + 1])
            for depth, step in enumerate(steps):
                torch.testing.assert_close(step.project(step.hidden_TD)[base], said_K1V[depth, 0], rtol=1e-4, atol=1e-4)
        x_TD = batch.hidden_TD
        for layer in head.blocks[1].layers:
            x_TD = x_TD + functional.silu(functional.linear(x_TD, layer.weight))
        torch.testing.assert_close(steps[1].hidden_TD, x_TD)
        lm_head_VD = head.shared.lm_head_VD if head.lm_heads is None else head.lm_heads[1].weight
        torch.testing.assert_close(steps[1].project(x_TD), x_TD @ lm_head_VD.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_the_head_and_nothing_else(make_head: MakeHead, batch: Batch, form: str) -> None:
    head = make_head(**FORMS[form])
    torch.stack([step.project(step.hidden_TD).sin().sum() for step in head.unroll(batch)]).sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.abs().sum() > 0) for parameter in head.parameters())
    for tensor in (head.shared.embedding_VD, head.shared.lm_head_VD, head.shared.final_norm_weight_D, batch.hidden_TD):
        assert not tensor.requires_grad and tensor.grad is None
    held = sum(name.startswith("lm_heads.") for name in head.state_dict())
    assert held == (K if head.lm_heads is not None else 0), "the target's lm_head is not saved"


@pytest.mark.parametrize("own", [False, True])
def test_at_first_every_head_repeats_the_target(tiny_llama: Path, batch: Batch, own: bool) -> None:
    head = make(tiny_llama, own_lm_heads=own)
    target_TV = batch.hidden_TD @ head.shared.lm_head_VD.T
    for step in head.unroll(batch):
        torch.testing.assert_close(step.project(step.hidden_TD), target_TV, rtol=1e-4, atol=1e-4)
        step.hidden_TD.square().sum().backward()
    assert all(bool(block.layers[0].weight.grad.abs().sum() > 0) for block in head.blocks), "zeros, and not dead"
    if head.lm_heads is not None:
        assert head.lm_heads[0].weight.data_ptr() != head.shared.lm_head_VD.data_ptr()


def test_least_squares_finds_a_linear_target_before_any_step(tiny_llama: Path) -> None:
    """Hidden states of which each is a linear map of the one before: fitted on some samples, every head speaks those of others."""
    head = make(tiny_llama, own_lm_heads=True, init="least_squares")
    size = head.shared.lm_head_VD.shape[1]
    turn_DD = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(2))).Q

    def sample(number: int) -> Sample:
        states = [torch.randn(size, generator=torch.Generator().manual_seed(number))]
        while len(states) < 12:
            states.append(turn_DD @ states[-1])
        everywhere = torch.ones(12, dtype=torch.bool)
        return Sample(sample_id=str(number), token_ids_T=torch.arange(12), loss_mask_T=everywhere, hidden_TD=torch.stack(states))

    assert head.starts_from_data and not make(tiny_llama).starts_from_data
    with torch.no_grad():
        head.start([pack([sample(number)]) for number in range(40)])
    unseen = sample(99)
    for depth, step in enumerate(head.unroll(pack([unseen]))):
        expected = unseen.hidden_TD[1 + depth :] @ head.shared.lm_head_VD.T
        torch.testing.assert_close(step.project(step.hidden_TD)[: len(expected)], expected, rtol=0.02, atol=0.02)


def test_least_squares_starts_the_blocks_where_the_lm_head_is_the_targets(tiny_llama: Path) -> None:
    """States of which each is what a block makes of the one before: the first head is that block. Further layers begin silent."""
    head = make(tiny_llama, num_layers=2, init="least_squares")
    size = head.shared.lm_head_VD.shape[1]
    truth_DD = 0.15 * torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(2))).Q

    def sample(number: int) -> Sample:
        states = [torch.randn(size, generator=torch.Generator().manual_seed(number))]
        while len(states) < 8:
            states.append(states[-1] + functional.silu(truth_DD @ states[-1]))
        everywhere = torch.ones(8, dtype=torch.bool)
        return Sample(sample_id=str(number), token_ids_T=torch.arange(8), loss_mask_T=everywhere, hidden_TD=torch.stack(states))

    with torch.no_grad():
        head.start([pack([sample(number)]) for number in range(60)])
    torch.testing.assert_close(head.blocks[0].layers[0].weight, truth_DD, rtol=0, atol=0.005)
    assert not any(block.layers[1].weight.any() for block in head.blocks)
    unseen = sample(99)
    for depth, step in enumerate(head.unroll(pack([unseen]))):
        found, expected = step.hidden_TD[: 7 - depth].detach(), unseen.hidden_TD[1 + depth :]
        assert float((found - expected).norm() / expected.norm()) < 0.1 * (1 + depth)


def test_before_silu_is_its_inverse_down_to_where_it_turns() -> None:
    wanted = torch.cat([torch.linspace(-0.268, 0.5, 500), torch.linspace(0.5, 80, 500)])
    torch.testing.assert_close(functional.silu(before_silu(wanted)), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(before_silu(torch.tensor([-0.4, -50.0])), torch.tensor([-1.0, -1.0]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "head.num_heads: expected at least 1, found 0"),
        ({"num_layers": 0}, "head.num_layers: expected at least 1, found 0"),
        ({"init": "random"}, "zeros.*least_squares.*found 'random'"),
    ],
)
def test_impossible_settings_are_refused(tiny_llama: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tiny_llama, **change)


# The objective: an lm_head for each depth, no parameters but matrices.


def objective(**changes: Any) -> Objective:
    plain: dict[str, Any] = {"terms": {"forward_kl": Term(1.0, ForwardKl())}, "draft_steps": K, "decay": 0.8, "chunk_rows": 5}
    return Objective(**{**plain, **changes})


@pytest.mark.parametrize("chunk_rows", [2, 10_000])
def test_chunked_gradients_are_the_plain_ones_the_lm_heads_too(make_head: MakeHead, batch: Batch, chunk_rows: int) -> None:
    head, chosen = make_head(own_lm_heads=True), objective(chunk_rows=chunk_rows)
    packed = align(batch, draft_steps=K, need_top=False)
    expected = torch.zeros(())
    for depth, step in enumerate(head.unroll(batch)):
        rows = loss_rows(batch, ahead=depth + 2)
        log_q = step.project(step.hidden_TD[rows.base_M]).log_softmax(-1)
        log_p = (batch.hidden_TD[rows.teacher_M] @ head.shared.lm_head_VD.T).log_softmax(-1)
        expected = expected + 0.8**depth * (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    result = chosen(head, packed, 1.0 / packed.counts_K.float(), measure=False)
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-5)
    names, parameters = zip(*head.named_parameters(), strict=True)
    plain, chunked = (torch.autograd.grad(loss, parameters) for loss in (expected, result.loss))
    for name, one, other in zip(names, plain, chunked, strict=True):
        assert bool(one.abs().sum() > 0), name
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


def test_activations_computed_again_give_the_same_gradients(make_head: MakeHead, batch: Batch) -> None:
    packed, found = align(batch, draft_steps=K, need_top=False), []
    for again in (False, True):
        head = make_head(num_layers=2)
        if again:
            head.recompute_activations(depths=True)
        objective()(head, packed, 1.0 / packed.counts_K.float(), measure=False).loss.backward()
        found.append({name: parameter.grad for name, parameter in head.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_as_many_depths_as_heads_and_no_others(make_head: MakeHead) -> None:
    objective(terms={"hidden_l1": Term(1.0, HiddenL1())}).check(make_head())
    with pytest.raises(
        ValueError, match="draft_steps: expected 3, one for each token that head=medusa speaks about, found 2; set draft_steps=3"
    ):
        objective(draft_steps=2).check(make_head())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_training_makes_every_head_better(bench: Any, bench_samples: list[Sample], own: bool, rule: Any) -> None:
    """Muon where there are only matrices, and where lm_heads stand beside them."""
    head, chosen = make(bench.path, own_lm_heads=own), objective(chunk_rows=512)
    packed = align(pack(bench_samples), draft_steps=K, need_top=False)
    optimizer = build_optimizer(
        head,
        OptimizerSettings(rule=rule, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, clip_norm=None),
        dtype=torch.float32,
    )

    def agreement() -> torch.Tensor:
        with torch.no_grad():
            sums_KX = chosen(head, packed, 1.0 / packed.counts_K.float(), measure=True).sums_KX
        return sums_KX[:, chosen.columns.index("agree")] / packed.counts_K

    before = agreement()
    for _ in range(15):
        optimizer.zero_grad()
        chosen(head, packed, 1.0 / packed.counts_K.float(), measure=False).loss.backward()
        optimizer.step()
    assert bool((agreement() > before + 0.1).all()), (before, agreement())


# Decoding: chains of one token each, and the tree.


@pytest.fixture(scope="module")
def fitted(bench: Any, bench_samples: list[Sample]) -> Medusa:
    """Fitted in closed form to the target's own answers: right often, not always."""
    head = make(bench.path, own_lm_heads=True, init="least_squares")
    with torch.no_grad():
        head.start([pack([sample]) for sample in bench_samples])
    return head.eval()


DECODINGS = [
    Chain(num_speculative_tokens=K, refresh=True),
    Chain(num_speculative_tokens=2, refresh=True),
    MedusaTree(max_depth=K, top_k=3, max_nodes=9),
]


@pytest.mark.parametrize("decoding", DECODINGS)
def test_greedy_speculation_equals_greedy_decoding(bench: Any, fitted: Medusa, decoding: Decoding) -> None:
    measured, plain = bench.measure(fitted, decoding)
    assert {prompt.prompt_id: prompt.token_ids for prompt in measured.prompts} == plain
    rates = measured.rate_per_position()
    assert len(rates) == decoding.depth and 0 < rates[-1] <= rates[0] < 1, rates


def test_the_estimate_is_the_measured_count(bench: Any, fitted: Medusa) -> None:
    measured, _ = bench.measure(fitted, DECODINGS[0])
    estimated = bench.estimate(fitted, measured)
    counts = [[(p.num_drafts, p.num_accepted_per_position) for p in found.prompts] for found in (estimated, measured)]
    assert counts[0] == counts[1]


def test_the_tree_takes_more_than_the_chain(bench: Any, fitted: Medusa) -> None:
    chain, tree = (bench.measure(fitted, decoding)[0].acceptance_length() for decoding in (DECODINGS[0], DECODINGS[2]))
    assert tree > chain + 0.05


def test_drawn_chains_repeat_and_are_accepted(bench: Any, fitted: Medusa) -> None:
    sampling = Sampling(temperature=0.7, top_p=1.0, max_new_tokens=16, seed=0)
    first, second = (bench.measure(fitted, DECODINGS[0], draft_sampling="probabilistic", sampling=sampling)[0] for _ in range(2))
    assert first.prompts == second.prompts and sum(prompt.num_accepted for prompt in first.prompts) > 5


@pytest.mark.parametrize(
    "decoding",
    [EagleTree(nodes_per_depth=(2, 2), refresh=True), DynamicTree(max_depth=2, width=2, max_nodes=4, min_confidence=0.0, refresh=True)],
)
def test_schemes_that_draft_behind_drafts_are_refused(bench: Any, fitted: Medusa, decoding: Decoding) -> None:
    with pytest.raises(
        ValueError, match="found medusa, which speaks about all tokens at once; it drafts with decoding=medusa_tree or chain"
    ):
        bench.measure(fitted, decoding)


def test_more_tokens_than_heads_are_refused(bench: Any, fitted: Medusa) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens: expected at most 3, which this head speaks about at once, found 4"):
        bench.measure(fitted, Chain(num_speculative_tokens=4, refresh=True))


# On disk: save, load, export, load.


def write_checkpoint(path: Path, target: Path, head: Medusa, samples: list[Sample]) -> Path:
    identity = {"target_name": "tiny", "target_fingerprint": fingerprint(target)}
    save_head(path, head.state_dict(), config=head.draft_config(), target=identity, made_by={})
    write_probe(path, head, samples)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_save_load_export_load_is_the_same_head(
    make_head: MakeHead, tiny_llama: Path, samples: list[Sample], tmp_path: Path, form: str
) -> None:
    head = make_head(**FORMS[form])
    checkpoint = write_checkpoint(tmp_path / "head", tiny_llama, head, samples)
    config = read_head_config(checkpoint)
    again = make(tiny_llama, **config["settings"])
    again.load_state_dict(read_head_tensors(checkpoint))
    check_states(checkpoint, stated=config, found=again.draft_config())
    batch = pack(samples)
    for ours, theirs in zip(head.unroll(batch), again.unroll(batch), strict=True):
        assert torch.equal(ours.project(ours.hidden_TD), theirs.project(theirs.hidden_TD))
    served = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "hf")
    graph, probe, tensors = (
        load_exported(served.path, target_path=tiny_llama),
        read_probe(checkpoint),
        load_file(served.path / "model.safetensors"),
    )
    assert len(probe[0].expected_logits) == K and tensors.keys() == head.state_dict().keys()
    assert prove(graph, tensors, probe, dtype="float32")["largest_difference"]["logits"] < 1e-5
    changed = {**tensors, "blocks.2.layers.0.weight": tensors["blocks.2.layers.0.weight"] * 1.1}
    with pytest.raises(ValueError, match="not the trained one"):
        prove(graph, changed, probe, dtype="float32")


@pytest.mark.parametrize("form", FORMS)
def test_vllms_class_gets_all_that_it_needs(
    make_head: MakeHead, tiny_llama: Path, samples: list[Sample], tmp_path: Path, form: str
) -> None:
    """It shares nothing with the target: the lm_head, or the heads' own, come with it, and none that it would add by itself."""
    head = make_head(**FORMS[form])
    checkpoint = write_checkpoint(tmp_path / "head", tiny_llama, head, samples)
    exporter = VllmExporter(dtype="float32", allow_plugin=False, trust_remote_code=False, overwrite=False)
    result = exporter.export(checkpoint, tiny_llama, tmp_path / "vllm")
    assert result.proof["largest_difference"]["logits"] < 1e-5 and result.proof["num_depths"] == K
    tensors, config = load_file(result.path / "model.safetensors"), json.loads((result.path / "config.json").read_text())
    lm_heads = {name for name in tensors if name.startswith("lm_head")}
    assert lm_heads == ({f"lm_heads.{k}.weight" for k in range(K)} if head.lm_heads is not None else {"lm_head.weight"})
    assert config["original_lm_head"] is (head.lm_heads is None) and (config["num_heads"], config["vocab_size"]) == (K, 320)
    if head.lm_heads is None:
        assert torch.equal(tensors["lm_head.weight"], head.shared.lm_head_VD)
    served = json.loads((result.path / "serve.json").read_text())
    assert served["max_speculative_tokens"] == K and served["speculative_config"] == {"method": "medusa", "model": "."}
    assert "It drafts up to 3 tokens" in (result.path / "README.md").read_text()


def test_a_probe_covers_every_head(make_head: MakeHead, tiny_llama: Path, samples: list[Sample], tmp_path: Path) -> None:
    """Five heads, five depths: a head that the proof left out could be exported wrong."""
    head = make_head(num_heads=5)
    checkpoint = write_checkpoint(tmp_path / "head", tiny_llama, head, [replace(sample, teacher=None) for sample in samples])
    assert max(len(sample.expected_logits) for sample in read_probe(checkpoint)) == 5
    result = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "hf")
    assert result.proof["num_depths"] == 5
    card = (result.path / "README.md").read_text()
    assert "head k of 5 speaks about x_(i+2+k)" in card and "num_depths=5" in card
    graph = load_exported(result.path, target_path=tiny_llama)
    steps = graph.unroll(token_ids_T=samples[0].token_ids_T, hidden_TD=samples[0].hidden_TD, num_depths=9)
    assert len(list(itertools.islice(steps, 9))) == 5
