"""A draft model: its depths are drafting, it is distilled and accepted more often, vocabularies and tokenizers, and the way to disk."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_train.batch.packing import pack
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
from mtp_train.head.draft_model import DraftModel
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.records import Batch, RowShare, Sample
from mtp_train.target.spec import fingerprint
from mtp_train.target.weights import read_shared
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.probe import write_probe
from mtp_train.trainer.rows import align

V, DEPTHS = 320, 3
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
}
MakeHead = Callable[..., DraftModel]


def make(target: Path, *, config: dict[str, Any] | None = None, **changes: Any) -> DraftModel:
    settings = {"config": config, "checkpoint": None, "revision": None, "seed": 0, **changes}
    return DraftModel(target_path=target, shared=read_shared(target), trust_remote_code=False, **settings).eval()


@pytest.fixture
def make_head(tiny_llama: Path) -> MakeHead:
    def moved(**changes: Any) -> DraftModel:
        head = make(tiny_llama, config={**SMALL, **changes})
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 1:  # norms start at 1, which would hide one that is skipped
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
        return head

    return moved


def draft_from_every_base(head: DraftModel, sample: Sample) -> list[torch.Tensor]:
    """As an engine drafts, its own KV cache over all tokens, the first one too: one (n, D) tensor per depth."""
    cache, ids_T = RaggedCache(num_slots=1), sample.token_ids_T
    drafted = [torch.full((sample.num_tokens, head.config.hidden_size), float("nan")) for _ in range(DEPTHS)]
    for base in range(sample.num_tokens - 1):
        for depth in range(min(DEPTHS, sample.num_tokens - 1 - base)):
            first = cache.lengths[0]
            read_T = ids_T[first : base + 2 + depth]
            context = RaggedAttention(cache=cache, slots=[0], counts=[len(read_T)])
            unread_TD = torch.full((len(read_T), sample.hidden_TD.shape[1]), float("nan"))
            position_T = torch.arange(first, first + len(read_T))
            out = head.draft(token_ids_T=read_T, hidden_TD=unread_TD, position_T=position_T, context=context)
            context.commit()
            drafted[depth][base] = out.hidden_TD[-1]
        cache.truncate(0, base + 2)
    return drafted


def unrolled(head: DraftModel, batch: Batch) -> list[torch.Tensor]:
    return [step.hidden_TD for step in itertools.islice(head.unroll(batch), DEPTHS)]


@pytest.mark.parametrize("form", FORMS)
def test_unroll_is_drafting_with_a_cache_from_every_base(make_head: MakeHead, samples: list[Sample], form: str) -> None:
    """Packed beside others, which changes nothing; logits are transformers' own of the same tokens."""
    head, batch = make_head(**FORMS[form]), pack(samples)
    with torch.no_grad():
        depths = unrolled(head, batch)
        assert [step.ahead for step in itertools.islice(head.unroll(batch), DEPTHS)] == [2, 3, 4]
        for number, sample in enumerate(samples):
            for depth, drafted in enumerate(draft_from_every_base(head, sample)):
                inside = max(0, sample.num_tokens - 1 - depth)
                rows = slice(batch.bounds[number], batch.bounds[number] + inside)
                torch.testing.assert_close(depths[depth][rows], drafted[:inside], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_the_head_and_nothing_else(make_head: MakeHead, batch: Batch, form: str) -> None:
    head = make_head(**FORMS[form])
    (step,) = itertools.islice(head.unroll(batch), 1)
    step.project(step.hidden_TD).sin().sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.abs().sum() > 0) for parameter in head.parameters())
    for tensor in (head.shared.embedding_VD, head.shared.lm_head_VD, head.shared.final_norm_weight_D, batch.hidden_TD):
        assert not tensor.requires_grad and tensor.grad is None
    assert ("lm_head.weight" in head.state_dict()) is (form != "tied")


# The objective.


def objective(**changes: Any) -> Objective:
    plain: dict[str, Any] = {"terms": {"forward_kl": Term(1.0, ForwardKl())}, "draft_steps": 1, "decay": 1.0, "chunk_rows": 512}
    return Objective(**{**plain, **changes})


@pytest.mark.parametrize("tied", [False, True])
def test_chunked_gradients_are_the_plain_ones(make_head: MakeHead, batch: Batch, tied: bool) -> None:
    """Where embedding and lm_head are one, the gradients of both add up."""
    head, chosen = make_head(tie_word_embeddings=tied), objective(chunk_rows=5)
    packed = align(batch, draft_steps=1, need_top=False)
    (rows,), (step,) = packed.rows, itertools.islice(head.unroll(batch), 1)
    log_q = step.project(step.hidden_TD[rows.base_M]).log_softmax(-1)
    log_p = (batch.hidden_TD[rows.teacher_M] @ head.shared.lm_head_VD.T).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    result = chosen(head, packed, 1.0 / packed.counts_K.float(), measure=False)
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-5)
    names, parameters = zip(*head.named_parameters(), strict=True)
    plain, chunked = (torch.autograd.grad(loss, parameters) for loss in (expected, result.loss))
    for name, one, other in zip(names, plain, chunked, strict=True):
        assert bool(one.abs().sum() > 0), name
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_in_bfloat16_the_gradients_are_those_of_float32_to_rounding(make_head: MakeHead, batch: Batch, form: str) -> None:
    """The residual stream stays in float32, as the embedding is; products and attention are narrowed."""
    packed, found = align(batch, draft_steps=1, need_top=False), []
    for enabled in (False, True):
        head = make_head(**FORMS[form])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = objective()(head, packed, 1.0 / packed.counts_K.float(), measure=False).loss
        loss.backward()
        found.append({name: parameter.grad for name, parameter in head.named_parameters()})
    for name, exact in found[0].items():
        assert found[1][name].dtype == torch.float32
        assert float((found[1][name] - exact).norm() / exact.norm()) < 0.1, name


def test_activations_computed_again_give_the_same_gradients(make_head: MakeHead, batch: Batch) -> None:
    packed, found = align(batch, draft_steps=1, need_top=False), []
    for again in (False, True):
        head = make_head()
        if again:
            head.recompute_activations(depths=False)
        objective()(head, packed, 1.0 / packed.counts_K.float(), measure=False).loss.backward()
        found.append({name: parameter.grad for name, parameter in head.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_what_it_cannot_be_trained_with_is_refused(make_head: MakeHead, batch: Batch) -> None:
    head = make_head()
    objective().check(head)
    with pytest.raises(ValueError, match=r"losses\.hidden_l1: expected 0 for head=draft_model.*\+losses\.forward_kl=1\.0"):
        objective(terms={"hidden_l1": Term(1.0, HiddenL1())}).check(head)
    with pytest.raises(ValueError, match=r"draft_steps: expected 1 for head=draft_model.*found 2"):
        objective(draft_steps=2).check(head)

    class Half:
        def own(self, column_T: torch.Tensor) -> torch.Tensor:
            return column_T[: len(column_T) // 2]

    share: RowShare = Half()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"set parallel\.context=1"):
        next(head.unroll(replace(batch, share=share)))


# The lesson's exercise: a smaller model is distilled from a larger one, and acceptance rises.


@pytest.fixture(scope="module")
def untrained(bench: Any) -> DraftModel:
    return make(bench.path, config={**SMALL, "num_hidden_layers": 1, "initializer_range": 0.1})


@pytest.fixture(scope="module")
def distilled(bench: Any, bench_samples: list[Sample]) -> DraftModel:
    """The same after 60 steps of forward KL against the target's distributions on its own answers."""
    head = make(bench.path, config={**SMALL, "num_hidden_layers": 1, "initializer_range": 0.1})
    packed, chosen = align(pack(bench_samples), draft_steps=1, need_top=False), objective()
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        chosen(head, packed, 1.0 / packed.counts_K.float(), measure=False).loss.backward()
        optimizer.step()
    return head.eval()


def test_a_smaller_model_is_distilled_and_acceptance_rises(bench: Any, untrained: DraftModel, distilled: DraftModel) -> None:
    target = sum(tensor.numel() for tensor in load_file(bench.path / "model.safetensors").values())
    assert sum(parameter.numel() for parameter in distilled.parameters()) < target / 2
    chain = Chain(num_speculative_tokens=3, refresh=True)
    before, after = (bench.measure(head, chain)[0].rate_per_position() for head in (untrained, distilled))
    assert before[0] < 0.1 and after[0] > 0.6 and after[0] > after[1] > after[2] > 0.2, (before, after)


DECODINGS: list[Decoding] = [
    Chain(num_speculative_tokens=3, refresh=True),
    EagleTree(nodes_per_depth=(3, 4, 2), refresh=True),
    DynamicTree(max_depth=3, width=3, max_nodes=7, min_confidence=0.0, refresh=True),
]


@pytest.mark.parametrize("decoding", DECODINGS, ids=lambda decoding: decoding.word)
def test_greedy_speculation_equals_greedy_decoding(bench: Any, distilled: DraftModel, decoding: Decoding) -> None:
    measured, plain = bench.measure(distilled, decoding)
    assert {prompt.prompt_id: prompt.token_ids for prompt in measured.prompts} == plain
    assert 0.3 < measured.rate_per_position()[0] <= 1


def test_the_estimate_is_the_measured_count(bench: Any, distilled: DraftModel) -> None:
    measured, _ = bench.measure(distilled, DECODINGS[0])
    estimated = bench.estimate(distilled, measured)
    counts = [[(p.num_drafts, p.num_accepted_per_position) for p in found.prompts] for found in (estimated, measured)]
    assert counts[0] == counts[1] and measured.rate_per_position()[0] < 1


def test_drawn_drafts_repeat_and_are_accepted(bench: Any, distilled: DraftModel) -> None:
    sampling = Sampling(temperature=0.8, top_p=1.0, max_new_tokens=16, seed=0)
    first, second = (bench.measure(distilled, DECODINGS[0], draft_sampling="probabilistic", sampling=sampling)[0] for _ in range(2))
    assert first.prompts == second.prompts and sum(prompt.num_accepted for prompt in first.prompts) > 20


def test_medusas_tree_is_not_its(bench: Any, distilled: DraftModel) -> None:
    with pytest.raises(ValueError, match=r"expected a head that speaks about several tokens at once .*found draft_model"):
        bench.measure(distilled, MedusaTree(max_depth=2, top_k=2, max_nodes=4))


# A given checkpoint, its vocabulary and its tokenizer.


def write_model(path: Path, target: Path, *, vocab_size: int, tokenizer: bool = True) -> Path:
    """A small causal LM beside the target, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = {**SMALL, "vocab_size": vocab_size, "max_position_embeddings": 128}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(entries.pop("model_type"), **entries)).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(target / file, path / file)
    return path


@pytest.mark.parametrize("rows", [V, V + 12, V - 20])
def test_a_checkpoint_drafts_with_the_vocabulary_that_both_have(tiny_llama: Path, samples: list[Sample], tmp_path: Path, rows: int) -> None:
    """Rows too many are dropped, those missing never drafted: probabilities are transformers' own over what is left."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "small", tiny_llama, vocab_size=rows), dtype=torch.float32).eval()
    head = make(tiny_llama, checkpoint=str(tmp_path / "small"))
    assert head.starts_from_data
    head.start([])
    held = min(rows, V)
    assert head.settings()["config"]["vocab_size"] == held
    ids_T = samples[2].token_ids_T.remainder(259)
    sample = replace(samples[2], token_ids_T=ids_T)
    with torch.no_grad():
        (step,) = itertools.islice(head.unroll(pack([sample])), 1)
        found_TV = head.over_target(step.project(step.hidden_TD)).softmax(-1)
        expected_TU = model(ids_T[None]).logits[0, :, :held].softmax(-1)
    assert found_TV.shape == (12, V)
    torch.testing.assert_close(found_TV[:10, :held], expected_TU[1:11], rtol=1e-4, atol=1e-6)
    assert not found_TV[:, held:].any()
    padding = torch.tensor([V - 1, 5])  # an id that may be padding is read all the same
    cache = RaggedCache(num_slots=1)
    context = RaggedAttention(cache=cache, slots=[0], counts=[2])
    out = head.draft(token_ids_T=padding, hidden_TD=torch.zeros(2, 64), position_T=torch.arange(2), context=context)
    assert bool(out.hidden_TD.isfinite().all())


def test_another_tokenizer_is_refused_with_the_tokens_that_differ(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "small", tiny_llama, vocab_size=V)
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=r"expected the token ids of the target at .*found 2 tokens that differ \('A': 32 there, 33 here; 'B'"
    ):
        make(tiny_llama, checkpoint=str(folder)).start([])


def test_rows_that_are_no_padding_may_not_be_missing(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "small", tiny_llama, vocab_size=250)
    with pytest.raises(ValueError, match="expected rows for all of the tokenizer's ids, up to 258, found 250"):
        make(tiny_llama, checkpoint=str(folder)).start([])


def test_tensors_that_its_config_does_not_call_for_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "small", tiny_llama, vocab_size=V)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"expected the tensors that its config.json calls for, found others .*model\.layers\.2"):
        make(tiny_llama, checkpoint=str(folder)).start([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors["model.norm.weight"].fill_(float("nan")),
            r"expected finite numbers, found others in \['model.norm.weight'\]",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "not quantized"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(
    tiny_llama: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    folder = write_model(tmp_path / "small", tiny_llama, vocab_size=V)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        make(tiny_llama, checkpoint=str(folder)).start([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "head.config: expected the draft model's sizes .*found neither"),
        ({"config": {**SMALL, "model_type": "lama"}}, "head.config.model_type: expected one that transformers knows, found 'lama'"),
        ({"config": {**SMALL, "model_type": "gpt2", "vocab_size": V}}, "head.config: expected entries of a gpt2 config.json"),
        ({"config": {**SMALL, "hiden_size": 3}}, r"head.config: expected entries of a llama config.json, found \['hiden_size'\]"),
        ({"config": {**SMALL, "vocab_size": 300}}, "head.config.vocab_size: expected the target's, 320, found 300"),
        ({"config": {**SMALL, "model_type": "gemma2"}}, "without scaled or capped logits, found final_logit_softcapping = 30.0 of gemma2"),
        ({"config": {**SMALL, "model_type": "gemma2", "final_logit_softcapping": None}}, "found attn_logit_softcapping = 50.0 of gemma2"),
        ({"config": {**SMALL, "num_attention_heads": 3}}, "transformers makes a llama of, found .*not a multiple"),
        ({"config": {**SMALL, "num_hidden_layers": "two"}}, "transformers makes a llama of, found .*expected int, got str"),
        ({"config": {**SMALL, "hidden_act": "none"}}, "transformers makes a llama of, found .*KeyError: 'none'"),
        ({"config": {**SMALL, "num_hidden_layers": 0}}, "head.config.num_hidden_layers: expected at least 1, found 0"),
        ({"config": {**SMALL, "num_key_value_heads": 3}}, "head.config.num_key_value_heads: expected a divisor of num_attention_heads=2"),
        ({"checkpoint": "nowhere"}, "head.checkpoint: expected a model folder, or a hub id beside its revision"),
        ({"checkpoint": "a/b", "revision": "main"}, "head.checkpoint revision: expected a commit"),
    ],
)
def test_impossible_settings_are_refused(tiny_llama: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tiny_llama, **change)


def test_sizes_left_out_are_the_targets(tiny_llama: Path) -> None:
    config = make(tiny_llama, config={**SMALL, "rope_theta": 5000.0}).config
    assert (config.vocab_size, config.max_position_embeddings) == (V, 2048)
    assert config.rope_parameters["rope_theta"] == 5000.0


# On disk: save, load, export, load.


def write_checkpoint(path: Path, target: Path, head: DraftModel, samples: list[Sample]) -> Path:
    identity = {"target_name": "tiny", "target_fingerprint": fingerprint(target)}
    save_head(path, head.state_dict(), config=head.draft_config(), target=identity, made_by={})
    write_probe(path, head, samples)
    return path


@pytest.mark.parametrize("form", [*FORMS, "padded"])
def test_save_load_export_load_is_the_same_head(
    make_head: MakeHead, tiny_llama: Path, samples: list[Sample], tmp_path: Path, form: str
) -> None:
    """Rebuilt without the checkpoint that it began with, and as plain transformers load it; for vLLM with rows for all tokens."""
    from transformers import AutoModelForCausalLM

    if form == "padded":
        head = make(tiny_llama, checkpoint=str(write_model(tmp_path / "small", tiny_llama, vocab_size=V - 20)))
        head.start([])
        shutil.rmtree(tmp_path / "small")
    else:
        head = make_head(**FORMS[form])
    batch = pack(samples)
    checkpoint = write_checkpoint(tmp_path / "head", tiny_llama, head, samples)
    config = read_head_config(checkpoint)
    again = make(tiny_llama, **config["settings"])
    again.load_state_dict(read_head_tensors(checkpoint))
    check_states(checkpoint, stated=config, found=again.draft_config())
    for ours, theirs in zip(unrolled(head, batch), unrolled(again, batch), strict=True):
        assert torch.equal(ours, theirs)

    served = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "hf")
    graph, probe, tensors = (
        load_exported(served.path, target_path=tiny_llama),
        read_probe(checkpoint),
        load_file(served.path / "model.safetensors"),
    )
    assert prove(graph, tensors, probe, dtype="float32")["largest_difference"]["logits"] < 1e-5
    vllm = VllmExporter(dtype="float32", allow_plugin=False, trust_remote_code=False, overwrite=False).export(
        checkpoint, tiny_llama, tmp_path / "vllm"
    )
    assert vllm.proof["largest_difference"]["logits"] < 1e-5
    drafted = head.config.vocab_size
    ids_T = samples[2].token_ids_T.clamp(max=drafted - 1)
    with torch.no_grad():
        (step,) = itertools.islice(head.unroll(pack([replace(samples[2], token_ids_T=ids_T)])), 1)
        ours = step.project(step.hidden_TD)[:11]
        for folder, rows in ((served.path, drafted), (vllm.path, V)):
            logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids_T[None]).logits[0]
            assert logits.shape[1] == rows
            torch.testing.assert_close(logits[1:, :drafted], ours, rtol=1e-4, atol=1e-4)
            assert bool((logits.argmax(-1) < drafted).all()), "padding is never the most probable"
    served_as = json.loads((vllm.path / "serve.json").read_text())
    assert served_as["speculative_config"] == {"method": "draft_model", "model": "."}
    assert served_as["class"] == ("Qwen3ForCausalLM" if form == "qwen3" else "LlamaForCausalLM")
    card = (served.path / "README.md").read_text()
    assert "AutoModelForCausalLM" in card and ("is never drafted" in card) is (form == "padded")
