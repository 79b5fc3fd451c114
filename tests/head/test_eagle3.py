"""EAGLE-3: unroll is drafting, what it reads and what it can say, its lm_head's gradient, and the way through every stage."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_train.batch.packing import pack
from mtp_train.batch.shift import loss_rows
from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
from mtp_train.cache.plan import PlannedSample
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.writer import CacheWriter
from mtp_train.checkpoint import check_states, read_head_config, read_head_tensors, save_head
from mtp_train.decoding.base import Decoding
from mtp_train.decoding.chain import Chain
from mtp_train.decoding.dynamic_tree import DynamicTree
from mtp_train.decoding.eagle_tree import EagleTree
from mtp_train.engine.base import PrefillSettings, Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.engine.hf import HfEngine
from mtp_train.exporter.hf import HfExporter, load_exported
from mtp_train.exporter.proof import perturbed, prove, read_probe
from mtp_train.exporter.vllm import VllmExporter
from mtp_train.head.eagle3 import Eagle3
from mtp_train.loss.cross_entropy import CrossEntropy
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.loss.hidden_l1 import HiddenL1
from mtp_train.loss.topk_kl import TopkKl
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.records import Batch, Response, Sample
from mtp_train.target.draft_vocabulary import count_answer_tokens, from_offsets, most_frequent
from mtp_train.target.spec import default_tap_ids, fingerprint
from mtp_train.target.weights import read_layer, read_shared
from mtp_train.trainer.data import split
from mtp_train.trainer.objective import Objective, Result, Term
from mtp_train.trainer.probe import write_probe
from mtp_train.trainer.rows import align

V, D, U, DEPTHS = 320, 64, 40, 3
LAYERS = (0, 1)
MakeHead = Callable[..., Eagle3]
FORMS: dict[str, dict[str, Any]] = {
    "3.1": {},
    "3": {"norms": {"taps": False, "feedback": False}},
    "one tap, all tokens": {"target_layer_ids": (1,), "draft_vocab_size": None, "norms": {"taps": True, "feedback": False}},
    "no taps": {"target_layer_ids": (), "norms": {"taps": False, "feedback": True}},
}


def draft_ids(size: int = U, *, vocab_size: int = V) -> torch.Tensor:
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(2))[:size].sort().values


@pytest.fixture
def make_head(tiny_llama: Path) -> MakeHead:
    """A random head whose norms are not all ones and whose lm_head is not the target's."""

    def make(**changes: Any) -> Eagle3:
        settings: dict[str, Any] = {
            "target_layer_ids": LAYERS,
            "draft_vocab_size": U,
            "norms": {"taps": True, "feedback": True},
            "init": "random",
            "seed": 0,
            **changes,
        }
        head = Eagle3(target_path=tiny_llama, shared=read_shared(tiny_llama), trust_remote_code=False, **settings)
        if head.draft_vocab_size is not None:
            head.use_draft_ids(draft_ids(head.draft_vocab_size))
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if parameter.ndim == 1:
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
                elif settings["init"] != "target_last_layer":
                    parameter.mul_(0.5)
                    if name == "lm_head.weight":
                        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
        return head

    return make


def _sample(number: int, length: int) -> Sample:
    draw = torch.Generator().manual_seed(100 + number)
    return Sample(
        sample_id=f"s{number}",
        token_ids_T=torch.randint(0, V, (length,), generator=draw),
        loss_mask_T=torch.arange(length) >= length // 3,
        hidden_TD=torch.randn(length, D, generator=draw),
        taps_TLD=3 * torch.randn(length, 2, D, generator=draw),
    )


def samples_for(head: Eagle3) -> list[Sample]:
    """Samples with as many tapped layers as the head reads."""
    count = len(head.target_layer_ids)
    made = [_sample(number, length) for number, length in enumerate((7, 1, 12, 3, 2))]
    return [replace(sample, taps_TLD=sample.taps_TLD[:, :count] if count else None) for sample in made]  # type: ignore[index]


def draft_from_every_base(head: Eagle3, sample: Sample) -> list[torch.Tensor]:
    """As an engine drafts: one (n, D) tensor per depth (see ``test_pair.py``)."""
    cache = RaggedCache(num_slots=1)
    read_TD = head.read_target(sample.hidden_TD, sample.taps_TLD)
    drafted = [torch.full((sample.num_tokens, D), float("nan")) for _ in range(DEPTHS)]
    for base in range(sample.num_tokens - 1):
        hidden = read_TD[base : base + 1]
        for depth in range(min(DEPTHS, sample.num_tokens - 1 - base)):
            context = RaggedAttention(cache=cache, slots=[0], counts=[1])
            out = head.draft(
                token_ids_T=sample.token_ids_T[base + 1 + depth][None],
                hidden_TD=hidden,
                position_T=torch.tensor([base + depth]),
                context=context,
            )
            context.commit()
            drafted[depth][base] = out.hidden_TD[0]
            hidden = out.feedback_TD
        cache.truncate(0, base + 1)
    return drafted


def unrolled(head: Eagle3, batch: Batch) -> list[torch.Tensor]:
    return [step.hidden_TD for step in itertools.islice(head.unroll(batch), DEPTHS)]


def rows_of(batch: Batch, number: int, num_tokens: int, depth: int) -> tuple[slice, int]:
    """A sample's rows that read a token of it at this depth."""
    inside = max(0, num_tokens - 1 - depth)
    return slice(batch.bounds[number], batch.bounds[number] + inside), inside


@pytest.mark.parametrize("form", FORMS)
def test_unroll_is_drafting_with_a_cache_from_every_base(make_head: MakeHead, form: str) -> None:
    head = make_head(**FORMS[form])
    samples = samples_for(head)
    batch = pack(samples)
    with torch.no_grad():
        depths = unrolled(head, batch)
        for number, sample in enumerate(samples):
            for depth, drafted in enumerate(draft_from_every_base(head, sample)):
                rows, inside = rows_of(batch, number, sample.num_tokens, depth)
                torch.testing.assert_close(depths[depth][rows], drafted[:inside], rtol=1e-4, atol=1e-5)


def test_packed_samples_are_those_alone(make_head: MakeHead) -> None:
    head = make_head()
    samples = samples_for(head)
    batch = pack(samples)
    with torch.no_grad():
        together = unrolled(head, batch)
        for number, sample in enumerate(samples):
            for depth, alone in enumerate(unrolled(head, pack([sample]))):
                rows, inside = rows_of(batch, number, sample.num_tokens, depth)
                torch.testing.assert_close(together[depth][rows], alone[:inside], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_the_head_and_nothing_else(make_head: MakeHead, form: str) -> None:
    head = make_head(**FORMS[form])
    batch = pack(samples_for(head))
    steps = list(itertools.islice(head.unroll(batch), DEPTHS))
    torch.stack([step.project(step.hidden_TD).sin().sum() for step in steps]).sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.abs().sum() > 0) for parameter in head.parameters())
    for tensor in (head.shared.embedding_VD, head.shared.lm_head_VD, head.shared.final_norm_weight_D, batch.hidden_TD):
        assert not tensor.requires_grad and tensor.grad is None
    if head.draft_vocab_size is not None:  # nor is anything of the target's saved
        assert not any(V in tensor.shape for tensor in head.state_dict().values())


def test_each_switch_and_each_tap_changes_the_outcome(make_head: MakeHead) -> None:
    def second_depth(batch: Batch, **changes: Any) -> torch.Tensor:
        with torch.no_grad():
            return unrolled(make_head(**changes), batch)[1][:5]

    batch = pack(samples_for(make_head()))
    plain = second_depth(batch)
    for name in ("taps", "feedback"):
        off = {"taps": True, "feedback": True, name: False}
        assert not torch.allclose(plain, second_depth(batch, norms=off), atol=1e-3)
    assert batch.taps_TLD is not None
    for index in range(2):
        moved = batch.taps_TLD.clone()
        moved[:, index] += torch.linspace(-3, 3, D)
        assert not torch.allclose(plain, second_depth(replace(batch, taps_TLD=moved)), atol=1e-3)
    assert torch.equal(plain, second_depth(replace(batch, hidden_TD=batch.hidden_TD + 1))), "the last hidden state is not read"
    assert not torch.allclose(plain, second_depth(replace(batch, taps_TLD=batch.taps_TLD.flip(1))), atol=1e-3)


def test_over_the_target_what_cannot_be_drafted_has_probability_zero(make_head: MakeHead) -> None:
    head = make_head()
    logits_MU = head.project(torch.randn(6, D, generator=torch.Generator().manual_seed(0)))
    logits_MV = head.over_target(logits_MU)
    assert logits_MU.shape == (6, U) and logits_MV.shape == (6, V)
    assert torch.equal(logits_MV[:, draft_ids()], logits_MU)
    q_MV = logits_MV.softmax(-1)
    outside = torch.ones(V, dtype=torch.bool)
    outside[draft_ids()] = False
    assert bool((q_MV[:, outside] == 0).all())
    torch.testing.assert_close(q_MV[:, draft_ids()], logits_MU.softmax(-1))
    assert torch.equal(logits_MV.argmax(-1), draft_ids()[logits_MU.argmax(-1)])
    whole = make_head(draft_vocab_size=None)
    assert whole.over_target(logits_MV) is logits_MV and whole.draft_ids_U is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norms": {"taps": True}}, "expected exactly the switches"),
        ({"target_layer_ids": (), "norms": {"taps": True, "feedback": True}}, "expected taps=false where no layer is tapped"),
        ({"target_layer_ids": (0, 2)}, "ascending ids from 0 to 1"),
        ({"target_layer_ids": (1, 1)}, "ascending ids from 0 to 1"),
        ({"target_layer_ids": (1, 0)}, "ascending ids from 0 to 1"),
        ({"target_layer_ids": None}, "needs 7 at least; name them"),
        ({"draft_vocab_size": V}, "expected 2 to 319"),
        ({"init": "zeros"}, "random.*target_last_layer.*least_squares"),
        ({"init": "least_squares", "target_layer_ids": (), "norms": {"taps": False, "feedback": True}}, "where no layer is tapped"),
    ],
)
def test_impossible_settings_are_refused(make_head: MakeHead, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**change)


def test_the_default_taps_are_those_of_the_engines() -> None:
    assert default_tap_ids(32) == (1, 15, 28)  # the engines' 2, 16 and 29
    assert default_tap_ids(7) == (1, 2, 3)


def test_a_head_can_start_from_the_targets_last_layer(make_head: MakeHead, tiny_llama: Path) -> None:
    head, layer = make_head(init="target_last_layer"), read_layer(tiny_llama, 1)
    found = head.decoder.layer.state_dict()
    for name in ("q_proj", "k_proj", "v_proj"):
        wide, narrow = found[f"self_attn.{name}.weight"], layer[f"self_attn.{name}.weight"]
        assert torch.equal(wide[:, D:], narrow) and not wide[:, :D].any()
    assert torch.equal(found["self_attn.o_proj.weight"], layer["self_attn.o_proj.weight"])
    assert torch.equal(found["mlp.down_proj.weight"], layer["mlp.down_proj.weight"])
    assert head.fusion is not None and torch.equal(head.fusion.weight[:, D:], torch.eye(D)) and not head.fusion.weight[:, :D].any()


def test_least_squares_finds_a_linear_target_before_any_step(make_head: MakeHead) -> None:
    """Next hidden states that are a linear map of the taps, up to the output norm: fitted on some samples, the head speaks those of
    others. Its branches are silent and not dead."""
    head = make_head(init="least_squares")
    draw = torch.Generator().manual_seed(5)
    truth = torch.randn(D, 2 * D, generator=draw) / D**0.5

    def sample(number: int) -> Sample:
        made = _sample(number, 40)
        assert made.taps_TLD is not None
        with torch.no_grad():
            next_TD = head.output_norm(head._joined(made.taps_TLD) @ truth.T)
        return replace(made, hidden_TD=next_TD.roll(1, 0), loss_mask_T=torch.ones(40, dtype=torch.bool))

    assert head.starts_from_data and not make_head().starts_from_data
    with torch.no_grad():
        head.start([pack([sample(number)]) for number in range(60)])
    unseen = pack([sample(99)])
    (step,) = itertools.islice(head.unroll(unseen), 1)
    assert torch.nn.functional.cosine_similarity(step.hidden_TD[:38], unseen.hidden_TD[1:39]).min() > 0.98
    step.hidden_TD.square().sum().backward()
    silent = head.decoder.layer.get_parameter("self_attn.o_proj.weight")
    assert silent.abs().max() == 0 and silent.grad is not None and silent.grad.abs().max() > 0


def test_the_lm_head_starts_as_the_targets_rows(tiny_llama: Path) -> None:
    shared = read_shared(tiny_llama)
    settings: dict[str, Any] = {"target_layer_ids": (0,), "norms": {"taps": True, "feedback": True}, "init": "random", "seed": 0}
    head = Eagle3(target_path=tiny_llama, shared=shared, draft_vocab_size=U, trust_remote_code=False, **settings)
    head.use_draft_ids(draft_ids())
    assert torch.equal(head.lm_head.weight, shared.lm_head_VD[draft_ids()])
    whole = Eagle3(target_path=tiny_llama, shared=shared, draft_vocab_size=None, trust_remote_code=False, **settings)
    assert torch.equal(whole.lm_head.weight, shared.lm_head_VD)
    assert whole.lm_head.weight.data_ptr() != shared.lm_head_VD.data_ptr()


# The objective: a head with an lm_head of its own.


def objective(*, chunk_rows: int, words: tuple[str, ...] = ("forward_kl", "cross_entropy", "hidden_l1")) -> Objective:
    losses = {"forward_kl": ForwardKl(), "cross_entropy": CrossEntropy(), "hidden_l1": HiddenL1(), "topk_kl": TopkKl()}
    terms = {word: Term(1.0, losses[word]) for word in words}
    return Objective(terms=terms, draft_steps=DEPTHS, decay=1.0, chunk_rows=chunk_rows, depth_weights=(1.0, 0.5, 0.3))


def run(head: Eagle3, batch: Batch, chosen: Objective, *, measure: bool = False) -> Result:
    packed = align(batch, draft_steps=DEPTHS, need_top=chosen.needs("topk_teacher"))
    return chosen(head, packed, 1.0 / packed.counts_K.float().clamp_min(1), measure=measure)


def plainly(head: Eagle3, batch: Batch) -> tuple[torch.Tensor, list[tuple[int, int, float]]]:
    """The definition with every logit kept; and per depth the rows, those that agree, and the sum of min(p, q)."""
    ids_U = head.draft_ids_U
    assert ids_U is not None
    total, counted = torch.zeros(()), []
    for depth, step in enumerate(itertools.islice(head.unroll(batch), DEPTHS)):
        rows = loss_rows(batch, ahead=depth + 2)
        hidden, teacher = step.hidden_TD[rows.base_M], batch.hidden_TD[rows.teacher_M]
        log_q = torch.nn.functional.linear(hidden, head.lm_head.weight).log_softmax(-1)
        p_V = (teacher @ head.shared.lm_head_VD.T).softmax(-1)
        p, inside = p_V[:, ids_U], p_V[:, ids_U].sum(-1)
        label = batch.token_ids_T[rows.label_M]
        can = torch.isin(label, ids_U)
        column = torch.searchsorted(ids_U, label).clamp_max(U - 1)
        kl = (p * (p.log() - log_q)).sum(-1) - inside * inside.log()
        entropy = torch.where(can, -log_q.gather(1, column[:, None])[:, 0], 0.0)
        total = total + (1.0, 0.5, 0.3)[depth] * (kl.mean() + entropy.mean() + torch.nn.functional.smooth_l1_loss(hidden, teacher))
        agree = int((ids_U[log_q.argmax(-1)] == p_V.argmax(-1)).sum())
        counted.append((len(label), agree, float(torch.minimum(p, log_q.exp()).sum().detach())))
    return total, counted


def gradients(loss: torch.Tensor, head: Eagle3) -> dict[str, torch.Tensor]:
    names, parameters = zip(*head.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("chunk_rows", [2, 5, 10_000])
def test_chunked_gradients_are_the_plain_ones_the_lm_heads_too(make_head: MakeHead, chunk_rows: int) -> None:
    head = make_head()
    batch = pack(samples_for(head))
    expected, _ = plainly(head, batch)
    result = run(head, batch, objective(chunk_rows=chunk_rows))
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-5)
    expected_grads, grads = gradients(expected, head), gradients(result.loss, head)
    assert bool(expected_grads["lm_head.weight"].abs().sum() > 0)
    for name, expected_grad in expected_grads.items():
        torch.testing.assert_close(grads[name], expected_grad, rtol=1e-4, atol=1e-5 * float(expected_grad.abs().max()) + 1e-7)


def test_what_cannot_be_drafted_agrees_and_is_accepted_nowhere(make_head: MakeHead) -> None:
    head, chosen = make_head(), objective(chunk_rows=5)
    batch = pack(samples_for(head))
    with torch.no_grad():
        sums_KX = run(head, batch, chosen, measure=True).sums_KX
        for found, expected in zip(sums_KX.tolist(), plainly(head, batch)[1], strict=True):
            named = dict(zip(chosen.columns, found, strict=True))
            assert (named["rows"], named["agree"]) == expected[:2]
            assert named["overlap"] == pytest.approx(expected[2], rel=1e-5)


def test_in_bfloat16_every_chunk_counts_for_the_lm_head(make_head: MakeHead) -> None:
    """autocast keeps one narrowed copy of the weight for all chunks: each must lead back to the weight."""
    head = make_head()
    batch = pack(samples_for(head))
    exact = gradients(run(head, batch, objective(chunk_rows=3, words=("forward_kl",))).loss, head)["lm_head.weight"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = run(head, batch, objective(chunk_rows=3, words=("forward_kl",)))
    found = gradients(result.loss, head)["lm_head.weight"]
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 0.05


def test_a_pack_without_rows_and_a_loss_without_logits_reach_every_parameter(make_head: MakeHead) -> None:
    head = make_head()
    batch = pack(samples_for(head))
    empty = replace(batch, loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    result = run(head, empty, objective(chunk_rows=5))
    assert result.loss.item() == 0.0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in gradients(result.loss, head).values())
    assert not gradients(run(head, batch, objective(chunk_rows=5, words=("hidden_l1",))).loss, head)["lm_head.weight"].any()


# On disk: save, load, export, load.


def write_checkpoint(path: Path, target: Path, head: Eagle3, samples: list[Sample]) -> Path:
    identity = {"target_name": "tiny", "target_fingerprint": fingerprint(target)}
    save_head(path, head.state_dict(), config=head.draft_config(), target=identity, made_by={})
    write_probe(path, head, samples)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_save_load_export_load_is_the_same_head(make_head: MakeHead, tiny_llama: Path, tmp_path: Path, form: str) -> None:
    head = make_head(**FORMS[form]).eval()
    samples = samples_for(head)
    checkpoint = write_checkpoint(tmp_path / "head", tiny_llama, head, samples)
    config = read_head_config(checkpoint)
    again = make_head(**config["settings"])
    again.load_state_dict(read_head_tensors(checkpoint))
    check_states(checkpoint, stated=config, found=again.draft_config())
    batch = pack(samples)
    with torch.no_grad():
        for ours, theirs in zip(unrolled(head, batch), unrolled(again, batch), strict=True):
            assert torch.equal(ours, theirs)
    served = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "hf")
    graph, probe = load_exported(served.path, target_path=tiny_llama), read_probe(checkpoint)
    tensors = load_file(served.path / "model.safetensors")
    assert prove(graph, tensors, probe, dtype="float32")["largest_difference"]["logits"] < 1e-5
    assert sum(sample.expected_logits[0].shape[0] for sample in probe) == (12 - 1) + (7 - 1)
    exporter = VllmExporter(dtype="float32", allow_plugin=False, trust_remote_code=False, overwrite=False)
    vllm = exporter.export(checkpoint, tiny_llama, tmp_path / "vllm")
    assert vllm.proof["largest_difference"]["logits"] < 1e-5
    assert_same_tensors(tensors, load_file(vllm.path / "model.safetensors"))
    assert_served_config(json.loads((vllm.path / "config.json").read_text()), head)
    assert json.loads((vllm.path / "serve.json").read_text())["speculative_config"]["method"] == "eagle3"


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def assert_served_config(config: dict[str, Any], head: Eagle3) -> None:
    layer_ids = [i + 1 for i in head.target_layer_ids]
    assert (config["fc_norm"], config["norm_output"]) == (head.norms["taps"], head.norms["feedback"])
    assert config["draft_vocab_size"] == (head.draft_vocab_size or V)
    assert config["eagle_config"] == {"use_aux_hidden_state": bool(layer_ids), "eagle_aux_hidden_state_layer_ids": layer_ids}
    assert config["num_hidden_layers"] == 1 and config["vocab_size"] == V


def test_d2t_is_written_as_offsets_and_nothing_shared_is_shipped(make_head: MakeHead, tiny_llama: Path, tmp_path: Path) -> None:
    head = make_head().eval()
    checkpoint = write_checkpoint(tmp_path / "head", tiny_llama, head, samples_for(head))
    stored = load_file(checkpoint / "head.safetensors")["draft_ids"]
    assert stored.dtype == torch.int64 and torch.equal(stored, draft_ids())
    result = HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "hf")
    tensors = load_file(result.path / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(from_offsets(tensors["d2t"], vocab_size=V), draft_ids())
    assert tensors["fc.weight"].shape == (D, 2 * D) and tensors["layers.0.self_attn.q_proj.weight"].shape == (D, 2 * D)
    assert not any("embed_tokens" in name for name in tensors)
    card = (result.path / "README.md").read_text()
    assert "layers [0, 1]" in card and "over 40 tokens" in card
    graph, probe = load_exported(result.path, target_path=tiny_llama), read_probe(checkpoint)
    with pytest.raises(ValueError, match="not the trained one"):
        prove(graph, {**tensors, "d2t": perturbed(tensors["d2t"], seed=0)}, probe, dtype="float32")


def test_a_vocabulary_that_head_json_does_not_state_is_refused(make_head: MakeHead, tiny_llama: Path, tmp_path: Path) -> None:
    head = make_head().eval()
    checkpoint = write_checkpoint(tmp_path / "head", tiny_llama, head, samples_for(head))
    config = read_head_config(checkpoint)
    other = make_head()
    with torch.no_grad():
        assert other.draft_ids is not None
        other.draft_ids.copy_(torch.arange(U))
    with pytest.raises(ValueError, match=f"agree on draft_vocabulary_sha256, found {config['draft_vocabulary_sha256']} and"):
        check_states(checkpoint, stated=config, found=other.draft_config())
    stated = {key: config[key] for key in ("head", "method", "hidden_state", "settings", "draft_vocabulary_sha256")}
    save_head(checkpoint, other.state_dict(), config=stated, target=config["target"], made_by={})
    with pytest.raises(ValueError, match="expected the draft vocabulary of sha256"):
        HfExporter(overwrite=False, trust_remote_code=False).export(checkpoint, tiny_llama, tmp_path / "out")


def test_a_damaged_probe_stops_the_export(make_head: MakeHead, tiny_llama: Path, tmp_path: Path) -> None:
    head = make_head().eval()
    checkpoint = write_checkpoint(tmp_path / "head", tiny_llama, head, samples_for(head))
    probe = load_file(checkpoint / "probe.safetensors")
    probe["taps_TLD"] = probe["taps_TLD"].flip(1).contiguous()
    save_file(probe, checkpoint / "probe.safetensors")
    with pytest.raises(ValueError, match="of probe sample 0 at depth 0"):
        VllmExporter(dtype="float32", allow_plugin=False, trust_remote_code=False, overwrite=False).export(
            checkpoint, tiny_llama, tmp_path / "out"
        )


# With the target: taps from the engine, through the cache, into training, and back into decoding.

COPY, CYCLE = 48, 20


@pytest.fixture(scope="module")
def copy_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A three-layer Llama that says pi(x) after x: pi takes the first CYCLE tokens round, and the others round among themselves.

    Its layers hardly add to the residual stream, so that each tap tells the token and no two are the same.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=COPY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    draw = torch.Generator().manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        rows = torch.linalg.qr(torch.randn(64, 64, generator=draw)).Q[:COPY] * 8
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight[follows()] = rows / 4
    path = tmp_path_factory.mktemp("copy") / "target"
    model.save_pretrained(path)
    return path


def follows() -> torch.Tensor:
    after = torch.arange(COPY) + 1
    after[CYCLE - 1], after[COPY - 1] = 0, CYCLE
    return after


def make_engine(target: Path, load: Any = None, **changes: Any) -> HfEngine:
    settings = {"dtype": "float32", "device": "cpu", "batch_size": 4, "max_prefill_tokens": 32, "max_cache_tokens": 8192, **changes}
    return HfEngine(target_path=target, trust_remote_code=False, load_head=load, **settings)


def texts(*, num_texts: int, length: int, first: int = 0, last: int = CYCLE) -> list[tuple[int, ...]]:
    draw, found = torch.Generator().manual_seed(1), []
    for _ in range(num_texts):
        text = [int(torch.randint(first, last, (1,), generator=draw))]
        while len(text) < length:
            text.append(int(follows()[text[-1]]))
        found.append(tuple(text))
    return found


def responses(found: list[tuple[int, ...]]) -> Iterator[Response]:
    for number, tokens in enumerate(found):
        mask = (False,) + (True,) * (len(tokens) - 1)
        yield Response(
            prompt_id=f"p{number}", token_ids=tokens, loss_mask=mask, messages=(), finish_reason="given", category="copy", source="s"
        )


def write_cache(path: Path, target: Path, found: list[tuple[int, ...]], *, layer_ids: tuple[int, ...]) -> Path:
    """What precompute does, in float32."""
    identity = CacheIdentity(
        format_version=FORMAT_VERSION,
        target_name="tiny",
        target_fingerprint=fingerprint(target),
        tokenizer_hash="b",
        template_hash="c",
        hidden_state="post_norm",
        target_layer_ids=layer_ids,
        dtype="float32",
        codec="float32",
        top_k=8,
        engine="hf",
        engine_version="transformers 5",
        quantization=None,
        hidden_size=64,
        vocab_size=COPY,
        git_commit=None,
    )
    by_id = {response.prompt_id: response for response in responses(found)}
    writer = CacheWriter(path=path, identity=identity, samples=[PlannedSample.of(one) for one in by_id.values()], shard_tokens=200)
    engine = make_engine(target)
    for index, ids in writer.missing_shards():
        writer.write_shard(index, engine.prefill([by_id[i] for i in ids], PrefillSettings(target_layer_ids=layer_ids, top_k=8)))
    writer.finish()
    return path


@pytest.fixture(scope="module")
def copy_cache(tmp_path_factory: pytest.TempPathFactory, copy_target: Path) -> Path:
    return write_cache(tmp_path_factory.mktemp("copy") / "cache", copy_target, texts(num_texts=30, length=30), layer_ids=(0, 1, 2))


def test_the_cache_hands_on_the_layers_that_were_tapped(copy_target: Path, copy_cache: Path) -> None:
    """Written, read, selected and packed: what arrives is transformers' own residual stream after those layers."""
    from transformers import AutoModelForCausalLM

    train, _ = split(CacheReader(copy_cache, verify="first_read"), fraction=0.0, seed=0)
    assert train[0].taps_TLD is None, "not read unless asked for"
    asked = train.with_taps((2, 0))
    batch = pack([asked[0], asked[1]])
    assert batch.taps_TLD is not None and batch.taps_TLD.shape == (60, 2, 64)
    model, seen = AutoModelForCausalLM.from_pretrained(copy_target, dtype=torch.float32).eval(), {}
    for index in (0, 2):
        model.model.layers[index].register_forward_hook(lambda _m, _a, out, i=index: seen.__setitem__(i, out))
    for number, rows in ((0, slice(0, 30)), (1, slice(30, 60))):
        with torch.no_grad():
            model(asked[number].token_ids_T[None])
        for column, index in enumerate((2, 0)):
            torch.testing.assert_close(batch.taps_TLD[rows, column], seen[index].reshape(30, 64), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(batch.taps_TLD[:, 0], batch.taps_TLD[:, 1], atol=1e-2)
    with pytest.raises(ValueError, match=r"found \[0, 1, 2\]; precompute into another folder .*target_layer_ids=\[1,3\]"):
        train.with_taps((1, 3))


def copy_head(target: Path, *, size: int | None = CYCLE) -> Eagle3:
    return Eagle3(
        target_path=target,
        shared=read_shared(target),
        target_layer_ids=(0, 2),
        draft_vocab_size=size,
        norms={"taps": True, "feedback": True},
        init="random",
        seed=0,
        trust_remote_code=False,
    )


@pytest.fixture(scope="module")
def copy_trained(copy_target: Path, copy_cache: Path) -> Eagle3:
    """Trained three deep on its own states, its vocabulary counted in the cache's answers."""
    train, _ = split(CacheReader(copy_cache, verify="first_read"), fraction=0.0, seed=0)
    head = copy_head(copy_target)
    head.use_draft_ids(most_frequent(count_answer_tokens((train[i] for i in range(len(train))), vocab_size=COPY), size=CYCLE))
    train = train.with_taps(head.target_layer_ids)
    chosen = Objective(terms={"topk_kl": Term(1.0, TopkKl())}, draft_steps=3, decay=0.8, chunk_rows=64)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
    packed = align(pack([train[i] for i in range(len(train))]), draft_steps=3, need_top=True)
    for _ in range(80):
        result = chosen(head, packed, 1.0 / packed.counts_K.float(), measure=False)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        schedule.step()
    return head.eval()


def decode(target: Path, head: Eagle3, prompts: list[tuple[int, ...]], **changes: Any) -> tuple[Any, dict[str, tuple[int, ...]], Any]:
    """Speculation with a head, and plain greedy decoding of the same."""
    settings = SpeculateSettings(
        decoding=Chain(num_speculative_tokens=3, refresh=True),
        draft_sampling="greedy",
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=25, seed=0),
        batch_size=3,
        ignore_eos=True,
    )
    settings = replace(settings, **changes)
    requests = [SpeculateRequest(prompt_id=f"p{n}", category="c", token_ids=tokens) for n, tokens in enumerate(prompts)]
    engine = make_engine(target, lambda path, shared: head)
    return engine.speculate(requests, Path("unused"), settings), engine.baseline(requests, settings).token_ids, engine


def test_the_copy_task_is_learned_to_the_end(copy_target: Path, copy_trained: Eagle3) -> None:
    assert copy_trained.draft_ids_U is not None and copy_trained.draft_ids_U.tolist() == list(range(CYCLE))
    measured, plain, _ = decode(copy_target, copy_trained, [*texts(num_texts=4, length=7), (3,)])
    assert measured.rate_per_position() == [1.0, 1.0, 1.0]
    assert {prompt.prompt_id: prompt.token_ids for prompt in measured.prompts} == plain


def test_tokens_outside_the_vocabulary_are_rejected_and_still_written(copy_target: Path, copy_trained: Eagle3) -> None:
    prompts = texts(num_texts=3, length=4, first=CYCLE, last=COPY)
    measured, plain, _ = decode(copy_target, copy_trained, prompts)
    assert measured.rate_per_position() == [0.0, 0.0, 0.0] and measured.num_drafts > 30
    assert {prompt.prompt_id: prompt.token_ids for prompt in measured.prompts} == plain
    assert all(token >= CYCLE for prompt in measured.prompts for token in prompt.token_ids)


@pytest.mark.parametrize("drawn", [False, True])
def test_the_estimate_is_the_measured_count(copy_target: Path, copy_trained: Eagle3, drawn: bool) -> None:
    """On prompts of both cycles; at temperature 0 drafts drawn from q are its argmax, as are greedy ones."""
    prompts = texts(num_texts=4, length=5) + texts(num_texts=4, length=5, first=CYCLE, last=COPY)
    sampling = "probabilistic" if drawn else "greedy"
    measured, _, engine = decode(copy_target, copy_trained, prompts, draft_sampling=sampling)
    answers = [
        Response(
            prompt_id=prompt.prompt_id,
            token_ids=tokens + prompt.token_ids,
            loss_mask=(False,) * len(tokens) + (True,) * len(prompt.token_ids),
            messages=(),
            finish_reason="given",
            category="c",
            source="s",
        )
        for prompt, tokens in zip(measured.prompts, prompts, strict=True)
    ]
    estimated = estimate(
        copy_trained,
        engine.prefill(answers, PrefillSettings(target_layer_ids=copy_trained.target_layer_ids, top_k=None)),
        num_speculative_tokens=3,
        draft_sampling=sampling,
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=25, seed=0),
        max_batch_tokens=100,
        device=torch.device("cpu"),
    )
    assert [(p.num_drafts, p.num_accepted_per_position) for p in estimated.prompts] == [
        (p.num_drafts, p.num_accepted_per_position) for p in measured.prompts
    ]
    assert 0 < measured.rate_per_position()[0] < 1


SCHEMES = [
    (Chain(num_speculative_tokens=3, refresh=True), 9),
    (Chain(num_speculative_tokens=3, refresh=False), 9),
    (Chain(num_speculative_tokens=3, refresh=True), None),
    (EagleTree(nodes_per_depth=(3, 4), refresh=True), 9),
    (DynamicTree(max_depth=3, width=4, max_nodes=9, min_confidence=0.0, refresh=True), 3),  # wider than what can be drafted
]


@pytest.mark.parametrize(("decoding", "size"), SCHEMES)
def test_greedy_speculation_equals_greedy_decoding(tiny_llama: Path, make_head: MakeHead, decoding: Decoding, size: int | None) -> None:
    """A random head over a random target, prompts read in pieces, sequences of different lengths; chains and trees."""
    head = make_head(draft_vocab_size=size).eval()
    draw = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(0, 250, (length,), generator=draw).tolist()) for length in (5, 70, 1, 12)]
    measured, plain, _ = decode(tiny_llama, head, prompts, decoding=decoding)
    assert {prompt.prompt_id: prompt.token_ids for prompt in measured.prompts} == plain
    assert measured.num_drafts > 20


def test_drawn_drafts_of_a_small_vocabulary_keep_the_targets_text_possible(copy_target: Path, copy_trained: Eagle3) -> None:
    """q is 0 outside: where the target is certain of each token, drawing writes them, of either cycle."""
    prompts = texts(num_texts=3, length=5) + texts(num_texts=3, length=5, first=CYCLE, last=COPY)
    sampling = Sampling(temperature=0.2, top_p=1.0, max_new_tokens=25, seed=0)
    measured, plain, _ = decode(copy_target, copy_trained, prompts, draft_sampling="probabilistic", sampling=sampling)
    assert [prompt.num_accepted for prompt in measured.prompts] == [18, 18, 18, 0, 0, 0]
    assert {prompt.prompt_id: prompt.token_ids for prompt in measured.prompts} == plain
