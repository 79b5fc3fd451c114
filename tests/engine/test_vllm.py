"""vLLM against the reference, for real: hidden states, drafts position by position, acceptance three ways, text."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from mtp_train.checkpoint import save_head
from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import GenerateRequest, PrefillSettings, Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.conformance import TOLERANCES, Conformance, compare_drafts, compare_samples
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.vllm import VllmEngine
from mtp_train.engine.vllm_repair import expand_batch_to_tokens
from mtp_train.exporter.served import Served, write_served
from mtp_train.exporter.vllm import VllmExporter
from mtp_train.head.mtp import Mtp
from mtp_train.records import Response
from mtp_train.target.spec import fingerprint
from mtp_train.target.weights import read_shared
from mtp_train.trainer.probe import write_probe

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install mtp-train[vllm])"),
]
V, D = 256, 64


def norms(*on: str) -> dict[str, bool]:
    return {name: name in on for name in ("embed", "hidden", "input", "output", "feedback")}


ALL = norms("embed", "hidden", "input", "output", "feedback")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama whose next token mostly follows from the last one, so that a head can be right.

    Row t of the lm_head is the embedding of the token before t in a random cycle; the layers disturb that. Its heads
    are of size 32, the smallest that vLLM's CPU attention has.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=[7, 30],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        embedding = torch.randn(V, D)
        model.model.embed_tokens.weight.data.copy_(embedding)
        cycle = torch.randperm(V)
        model.lm_head.weight.data[cycle] = 0.3 * embedding[cycle.roll(1)]
    path = tmp_path_factory.mktemp("target") / "llama"
    model.save_pretrained(path)
    return path


def make_head(target: Path, *, switches: dict[str, bool], zero: bool, order: str, seed: int = 1) -> Mtp:
    """A random head that mostly passes the token's embedding on, as the target does."""
    head = Mtp(
        target_path=target,
        shared=read_shared(target),
        norms=switches,
        column_order=order,
        zero_first_embedding=zero,
        init="random",
        seed=seed,
        trust_remote_code=False,
    )
    columns = slice(D, 2 * D) if order == "hidden_embed" else slice(0, D)
    head.projection.weight.data[:, columns] += torch.eye(D)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in head.named_parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)  # norms of all ones would not be noticed if swapped
            elif name.startswith("decoder."):
                parameter.data *= 0.7  # without norms, larger weights would amplify rounding to the size of the values
    return head.eval()


@pytest.fixture(scope="module")
def hf(target: Path) -> HfEngine:
    return HfEngine(
        target_path=target,
        trust_remote_code=False,
        load_head=None,
        dtype="float32",
        device="cpu",
        batch_size=4,
        max_prefill_tokens=256,
        max_cache_tokens=8192,
    )


def vllm(target: Path, **changes) -> VllmEngine:
    settings = {
        "target_path": target,
        "trust_remote_code": False,
        "load_head": None,
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "batch_size": 4,
        "max_prefill_tokens": 96,
        "max_length_tokens": None,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.5,
        "cpu_kv_cache_gib": 1,
        "cpu_threads": 1,
        "scratch": None,
    }
    return VllmEngine(**{**settings, **changes})


def random_ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(32, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def response(name: str, token_ids: tuple[int, ...], num_prompt_tokens: int) -> Response:
    mask = tuple(i >= num_prompt_tokens for i in range(len(token_ids)))
    return Response(prompt_id=name, token_ids=token_ids, loss_mask=mask, messages=(), finish_reason="given", category="c", source="s")


def settings(**changes) -> SpeculateSettings:
    plain = SpeculateSettings(
        decoding=Chain(num_speculative_tokens=3, refresh=True),
        draft_sampling="greedy",
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=24, seed=0),
        batch_size=4,
        ignore_eos=False,
    )
    return dataclasses.replace(plain, **changes)


def requests(count: int) -> list[SpeculateRequest]:
    """Prompts of 1 to some 60 tokens: position 0 is drafted from in the first, several chunks' worth come together."""
    return [SpeculateRequest(prompt_id=f"p{i}", category="c", token_ids=random_ids(1 + (7 * i) % 60, seed=i)) for i in range(count)]


def save_checkpoint(folder: Path, head: Mtp, target: Path, hf: HfEngine) -> Path:
    save_head(
        folder,
        head.state_dict(),
        config=head.draft_config(),
        target={"target_name": "tiny", "target_fingerprint": fingerprint(target)},
        made_by={},
    )
    samples = list(
        hf.prefill(
            [response("a", random_ids(20, 90), 4), response("b", random_ids(9, 91), 2)], PrefillSettings(target_layer_ids=(), top_k=None)
        )
    )
    write_probe(folder, head, samples)
    return folder


def export(tmp_path: Path, head: Mtp, target: Path, hf: HfEngine) -> Path:
    checkpoint = save_checkpoint(tmp_path / "head", head, target, hf)
    exporter = VllmExporter(dtype="float32", allow_plugin=True, trust_remote_code=False, overwrite=False)
    return exporter.export(checkpoint, target, tmp_path / "served").path


def replay(head: Mtp, hf: HfEngine, asked: list[SpeculateRequest], measured, rows) -> Conformance:
    """Hold vLLM's draft rows against our own head over our own target's hidden states."""
    full = {r.prompt_id: r.token_ids + p.token_ids for r, p in zip(asked, measured.prompts, strict=True)}
    samples = hf.prefill([response(name, ids, 1) for name, ids in full.items()], PrefillSettings(target_layer_ids=(), top_k=None))
    hidden = {sample.sample_id: sample.hidden_TD for sample in samples}
    return compare_drafts(rows, head=head, target_hidden=hidden, answers=full, tolerance=TOLERANCES["float32"])


def test_prefill_equals_the_reference(target: Path, hf: HfEngine, tmp_path: Path) -> None:
    """All layers, teacher and all, for responses of 1 to 700 tokens read in pieces of 96, up to the target's longest."""
    responses = [response(f"r{i}", random_ids(length, seed=i), length // 2) for i, length in enumerate((5, 300, 1, 64, 129, 700, 2, 1024))]
    kept = PrefillSettings(target_layer_ids=(1, 0), top_k=8)
    engine = vllm(target, scratch=tmp_path)
    found = list(engine.prefill(iter(responses), kept))
    assert [sample.sample_id for sample in found] == [r.prompt_id for r in responses]
    result = compare_samples(hf.prefill(responses, kept), found, lm_head_VD=read_shared(target).lm_head_VD, tolerance=TOLERANCES["float32"])
    assert set(result.gaps) == {"tap 0", "tap 1", "hidden", "logits", "log_sum_exp", "top_k log_probs"}
    assert result.fault is None, result.fault
    assert result.at("hidden").num_rows == sum(len(r.token_ids) for r in responses)
    assert result.at("logits").argmax_agreement > 0.999
    assert list(tmp_path.iterdir()) == [], "scratch files stay behind"
    assert engine.describe()["attention"] == ["CPU_ATTN"] or torch.cuda.is_available()


def test_generate_equals_the_reference(target: Path, hf: HfEngine) -> None:
    asked = [GenerateRequest(request_id=f"g{i}", token_ids=random_ids(1 + 13 * i, seed=i), max_new_tokens=20 + i) for i in range(10)]
    sampling = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=26, seed=0)
    found = {answer.request_id: answer for answer in vllm(target, data_parallel_size=2).generate(asked, sampling)}
    expected = {answer.request_id: answer for answer in hf.generate(asked, sampling)}
    assert found == expected
    assert {answer.finish_reason for answer in expected.values()} == {"stop", "length"}


def test_mtp_drafts_and_acceptance_agree_three_ways(target: Path, hf: HfEngine, tmp_path: Path) -> None:
    """Issue 3's first test: stock MiMo class; every draft row; estimate, reference and vLLM's counters on 16 prompts."""
    head = make_head(target, switches=ALL, zero=True, order="hidden_embed")
    served, asked = export(tmp_path, head, target, hf), requests(16)
    measured, rows = vllm(target).trace(asked, served, settings())
    assert measured.notes["class"] == measured.notes["draft_class"] == "MiMoMTP" and measured.notes["plugin"] is None

    result = replay(head, hf, asked, measured, rows)
    assert result.fault is None, result.fault
    assert {f"depth {k} {what}" for k in range(3) for what in ("hidden", "logits")} <= set(result.gaps)
    assert result.at("depth 2 logits").num_rows >= measured.num_drafts
    assert any(0 in r.position_R for r in rows if r.depth == 0) and any(sum(p.num_accepted_per_position) > 0 for p in measured.prompts)

    hf.load_head = lambda path, shared: make_head(target, switches=ALL, zero=True, order="hidden_embed")
    reference = hf.speculate(asked, tmp_path / "head", settings())
    for ours, theirs in zip(reference.prompts, measured.prompts, strict=True):
        assert ours == theirs
    answers = [response(p.prompt_id, r.token_ids + p.token_ids, len(r.token_ids)) for r, p in zip(asked, measured.prompts, strict=True)]
    estimated = estimate(
        head,
        hf.prefill(answers, PrefillSettings(target_layer_ids=(), top_k=None)),
        num_speculative_tokens=3,
        draft_sampling="greedy",
        sampling=settings().sampling,
        max_batch_tokens=512,
        device=torch.device("cpu"),
    )
    for ours, theirs in zip(estimated.prompts, measured.prompts, strict=True):
        assert (ours.num_drafts, ours.num_accepted_per_position) == (theirs.num_drafts, theirs.num_accepted_per_position)
    rates = measured.rate_per_position()
    assert 0.3 < rates[0] < 0.95 and rates[0] > rates[1] > rates[2] > 0, rates


@pytest.mark.parametrize(
    ("served_by", "switches", "zero", "order"),
    [
        ("ErnieMTP", norms("embed", "hidden", "input"), True, "hidden_embed"),
        ("EagleMiniCPMForCausalLM", norms("embed", "hidden", "input"), False, "embed_hidden"),
        ("EagleMistralForCausalLM", norms("input", "output", "feedback"), False, "hidden_embed"),
        ("EagleLlamaForCausalLM", norms(), False, "embed_hidden"),
        ("EagleMtpTrainForCausalLM", norms("hidden", "output"), True, "hidden_embed"),
    ],
)
def test_each_class_drafts_what_the_head_drafts(
    served_by: str, switches, zero: bool, order: str, target: Path, hf: HfEngine, tmp_path: Path
) -> None:
    """The table of exporter/vllm_classes.py against vLLM itself, with both column orders."""
    head = make_head(target, switches=switches, zero=zero, order=order)
    served, asked = export(tmp_path, head, target, hf), requests(6)
    measured, rows = vllm(target).trace(asked, served, settings(sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=16, seed=0)))
    assert measured.notes["class"] == measured.notes["draft_class"] == served_by
    result = replay(head, hf, asked, measured, rows)
    assert result.fault is None, result.fault
    assert result.at("depth 2 logits").argmax_agreement > 0.98


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_methods_without_a_head(method: str, target: Path, hf: HfEngine, tmp_path: Path) -> None:
    """ngram drafts at some steps only; a draft model that is the target itself has every draft accepted."""
    config = (
        {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        if method == "ngram"
        else {"method": method, "model": str(target)}
    )
    write_served(tmp_path, Served(class_name=method, speculative_config=config, hf_overrides=None, plugin=None, target_path=str(target)))
    asked = [dataclasses.replace(r, token_ids=r.token_ids * 3) for r in requests(6)]
    kept = settings(ignore_eos=True, sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=30, seed=0))
    measured = vllm(target, max_length_tokens=512).speculate(asked, tmp_path, kept)
    plain = hf.baseline(asked, kept).token_ids
    for prompt in measured.prompts:
        assert prompt.token_ids == plain[prompt.prompt_id]
        assert sum(prompt.accepted) == prompt.num_accepted and prompt.num_drafts <= prompt.num_drafted_per_position[0] <= 29
    if method == "draft_model":
        assert measured.rate_per_position()[0] == 1.0 and measured.acceptance_length() > 3.5
    else:
        assert 0 < measured.num_drafts < sum(len(ids) - 1 for ids in plain.values()), "some steps draft nothing"


def test_a_changed_tensor_is_found_and_its_stage_named(target: Path, hf: HfEngine, tmp_path: Path) -> None:
    """The comparison can fail: of a head that differs in one norm, the first stage that shows it is named."""
    head = make_head(target, switches=ALL, zero=True, order="hidden_embed")
    served, asked = export(tmp_path, head, target, hf), requests(3)
    measured, rows = vllm(target).trace(asked, served, settings(sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=8, seed=0)))
    with torch.no_grad():
        head.output_norm.weight *= 1.01
    result = replay(head, hf, asked, measured, rows)
    assert result.fault is not None and result.fault.stage == "depth 0 hidden"
    other = [r if r.depth else dataclasses.replace(r, read_RD=r.read_RD * 1.01) for r in rows]
    result = replay(head, hf, asked, measured, other)
    assert result.fault is not None and result.fault.stage == "target hidden"


def test_speculation_writes_what_plain_decoding_writes(target: Path, hf: HfEngine, tmp_path: Path) -> None:
    head = make_head(target, switches=ALL, zero=True, order="hidden_embed")
    served, asked, engine = export(tmp_path, head, target, hf), requests(8), vllm(target)
    kept = settings(ignore_eos=True)
    plain = engine.baseline(asked, kept)
    measured = engine.speculate(asked, served, kept)
    assert {p.prompt_id: p.token_ids for p in measured.prompts} == plain.token_ids
    assert all(len(ids) == 24 for ids in plain.token_ids.values()), "ignore_eos"
    assert measured.num_drafts < sum(len(ids) - 1 for ids in plain.token_ids.values())
    for prompt in measured.prompts:
        assert len(prompt.accepted) == len(prompt.token_ids) and sum(prompt.accepted) == prompt.num_accepted


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_sampled_acceptance_is_the_reference_s(draft_sampling: str, target: Path, hf: HfEngine, tmp_path: Path) -> None:
    """At temperature 1 the draws differ; the acceptance rate at position 1 must not, beyond its standard error."""
    head = make_head(target, switches=ALL, zero=True, order="hidden_embed")
    served, asked = export(tmp_path, head, target, hf), requests(32)
    kept = settings(
        draft_sampling=draft_sampling,
        ignore_eos=True,
        batch_size=16,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=32, seed=3),
    )
    hf.load_head = lambda path, shared: make_head(target, switches=ALL, zero=True, order="hidden_embed")
    theirs, ours = vllm(target).speculate(asked, served, kept), hf.speculate(asked, tmp_path / "head", kept)
    first, second = theirs.rate_per_position()[0], ours.rate_per_position()[0]
    error = (first * (1 - first) / theirs.num_drafts + second * (1 - second) / ours.num_drafts) ** 0.5
    assert abs(first - second) < 4 * error, (first, second, error)
    assert 0.05 < second < 0.95


def test_repaired_expansion_is_per_row() -> None:
    """Each request's temperature once per drafted row, greedy ones (0) replaced, in floats and in ints."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(torch.tensor([0.5, 9.0, 0.0]), ends, 5, 0, 1).tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert expand_batch_to_tokens(torch.tensor([4, 5, 6]), ends, 5).tolist() == [4, 4, 6, 6, 6]


def test_what_vllm_cannot_do_is_refused(target: Path, hf: HfEngine, tmp_path: Path) -> None:
    head = make_head(target, switches=ALL, zero=True, order="hidden_embed")
    checkpoint = save_checkpoint(tmp_path / "head", head, target, hf)
    engine = vllm(target)
    with pytest.raises(NotImplementedError, match="engine=hf"):
        engine.speculate(requests(1), checkpoint, settings(decoding=Chain(num_speculative_tokens=3, refresh=False)))
    with pytest.raises(ValueError, match="exporter=vllm"):
        engine.speculate(requests(1), checkpoint, settings())
    with pytest.raises(ValueError, match="longest sequence"):
        list(engine.generate([GenerateRequest(request_id="x", token_ids=(1,) * 1024, max_new_tokens=1)], settings().sampling))


def test_a_dead_process_says_why(target: Path, hf: HfEngine, tmp_path: Path) -> None:
    """A served folder whose weights are damaged: the error carries what vLLM said, and nothing stays behind."""
    head = make_head(target, switches=ALL, zero=True, order="hidden_embed")
    served = export(tmp_path, head, target, hf)
    (served / "model.safetensors").write_bytes(b"no weights")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(ValueError, match=r"(?s)ended with status 1.*safetensors"):
        vllm(target, scratch=scratch).speculate(requests(1), served, settings())
    assert list(scratch.iterdir()) == []
