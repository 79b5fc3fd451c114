"""vLLM against the reference, for real: hidden states, taps, teachers, answers; what it refuses, and how it dies."""

from __future__ import annotations

import dataclasses
import resource
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
import vllm_for_tests as own

from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import GenerateRequest, PrefillSettings
from mtp_train.engine.conformance import TOLERANCES, compare_samples
from mtp_train.engine.hf import HfEngine
from mtp_train.engine.vllm_prefill import prefill_groups
from mtp_train.records import Sample
from mtp_train.target.weights import read_shared

pytestmark = own.NEEDS_VLLM
LENGTHS = (5, 300, 1, 64, 129, 700, 2, 1024)
KEPT = PrefillSettings(target_layer_ids=(1, 0), top_k=8)


def same(one: Sample, other: Sample) -> bool:
    """Equal to the last bit."""
    assert one.teacher is not None and other.teacher is not None and one.taps_TLD is not None and other.taps_TLD is not None
    pairs = [(one.hidden_TD, other.hidden_TD), (one.taps_TLD, other.taps_TLD)]
    pairs += [(getattr(one.teacher, name), getattr(other.teacher, name)) for name in ("ids_MC", "log_probs_MC", "log_sum_exp_M")]
    return one.sample_id == other.sample_id and all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_prefill_equals_the_reference_group_by_group(vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    """All layers, teacher and all, for responses of 1 to 700 tokens read in pieces of 96, up to the target's longest.

    Two processes read the groups, and one reads the last of them again alone: what came before makes no difference.
    """
    responses = [own.response(f"r{i}", own.random_ids(length, seed=i), length // 2) for i, length in enumerate(LENGTHS)]
    groups = [responses[:3], [], responses[3:6], responses[6:], []]
    engine = own.make_vllm(vllm_target, scratch=tmp_path, data_parallel_size=2)
    found = [list(samples) for samples in engine.prefill_groups(iter(groups), KEPT)]
    assert [[sample.sample_id for sample in samples] for samples in found] == [[r.prompt_id for r in group] for group in groups]
    flat = [sample for samples in found for sample in samples]
    lm_head_VD = read_shared(vllm_target).lm_head_VD
    result = compare_samples(vllm_hf.prefill(responses, KEPT), flat, lm_head_VD=lm_head_VD, tolerance=TOLERANCES["float32"])
    assert set(result.gaps) == {"tap 0", "tap 1", "hidden", "logits", "log_sum_exp", "top_k log_probs"}
    assert result.fault is None, result.fault
    assert result.at("hidden").num_rows == sum(LENGTHS)
    assert result.at("logits").argmax_agreement > 0.999
    assert engine.describe()["attention"] == ["CPU_ATTN"] or torch.cuda.is_available()
    alone = own.make_vllm(vllm_target, scratch=tmp_path)
    many = [own.response(f"m{i}", own.random_ids(96, seed=i), 48) for i in range(24)]  # four to a batch
    with closing(alone.prefill_groups(iter([groups[3], many]), KEPT)) as reading:
        again = list(next(reading))
        assert len(again) == 2 and all(same(ours, theirs) for ours, theirs in zip(again, found[3], strict=True))
        samples = next(reading)
        next(samples)
        time.sleep(1.0)  # long enough for a process that would not wait for us to read all of it
        assert 0 < len(list(tmp_path.rglob("*.safetensors"))) < 8, "two batches at the most, the one less that was read"
        assert len(list(samples)) == 23 and list(tmp_path.rglob("*.safetensors")) == []
    assert list(tmp_path.iterdir()) == [], "scratch files stay behind"


def test_bfloat16_is_within_its_tolerance(demo_target: Path) -> None:
    """The tolerances are of a real model: SmolLM2, both engines in bfloat16, against the reference in float32 too."""
    ids = torch.randint(500, 40000, (192,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = [own.response("a", tuple(ids[:128]), 40), own.response("b", tuple(ids[128:]), 10)]
    kept = PrefillSettings(target_layer_ids=(), top_k=8)
    found = list(own.make_vllm(demo_target, dtype="bfloat16", max_length_tokens=512).prefill(asked, kept))
    lm_head_VD = read_shared(demo_target).lm_head_VD
    for dtype in ("bfloat16", "float32"):
        expected = own.make_hf(demo_target, dtype=dtype).prefill(asked, kept)
        result = compare_samples(expected, found, lm_head_VD=lm_head_VD, tolerance=TOLERANCES["bfloat16"])
        assert result.fault is None, (dtype, result.fault)
        assert result.at("logits").argmax_agreement > 0.9 and result.at("logits").mean_kl_nats < 5e-3, (dtype, result.at("logits"))
        assert result.at("hidden").rms_error > 1e-4, "bfloat16 is what was run"


def test_generate_equals_the_reference(vllm_target: Path, vllm_hf: HfEngine) -> None:
    asked = [GenerateRequest(request_id=f"g{i}", token_ids=own.random_ids(1 + 13 * i, seed=i), max_new_tokens=20 + i) for i in range(10)]
    found = {answer.request_id: answer for answer in own.make_vllm(vllm_target, data_parallel_size=2).generate(asked, own.greedy(26))}
    expected = {answer.request_id: answer for answer in vllm_hf.generate(asked, own.greedy(26))}
    assert found == expected
    assert {answer.finish_reason for answer in expected.values()} == {"stop", "length"}


def test_logit_gaps_are_the_reference_s(vllm_target: Path, vllm_hf: HfEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from what ``prefill`` gives, here the reference's, which is vLLM's (the test above)."""
    prefixes, engine = [own.random_ids(length, seed=length) for length in (3, 40, 111)], own.make_vllm(vllm_target)
    assert engine.logit_gaps([]) == [], "nothing is started for nothing"
    monkeypatch.setattr(engine, "prefill", vllm_hf.prefill)
    assert engine.logit_gaps(prefixes) == pytest.approx(vllm_hf.logit_gaps(prefixes), abs=1e-4)


def test_what_vllm_cannot_do_is_refused(vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    checkpoint = own.save_checkpoint(tmp_path / "head", own.normed_head(vllm_target), vllm_target, vllm_hf)
    engine = own.make_vllm(vllm_target)
    with pytest.raises(NotImplementedError, match="engine=hf"):
        engine.speculate(own.requests(1), checkpoint, own.settings(decoding=Chain(num_speculative_tokens=3, refresh=False)))
    with pytest.raises(ValueError, match="exporter=vllm"):
        engine.speculate(own.requests(1), checkpoint, own.settings())
    with pytest.raises(ValueError, match="longest sequence"):
        list(engine.generate([GenerateRequest(request_id="x", token_ids=(1,) * 1024, max_new_tokens=1)], own.greedy(1)))


def test_a_response_that_is_too_long_is_refused(vllm_target: Path, tmp_path: Path) -> None:
    engine = own.make_vllm(vllm_target, max_length_tokens=64, scratch=tmp_path)
    asked = [own.response("fits", own.random_ids(64, seed=0), 3), own.response("long", own.random_ids(65, seed=1), 3)]
    with pytest.raises(ValueError, match="response long: expected 1 to 64 tokens"):
        list(engine.prefill(asked, KEPT))
    assert list(tmp_path.iterdir()) == []


def test_a_dead_process_says_why(vllm_target: Path, vllm_hf: HfEngine, tmp_path: Path) -> None:
    """A served folder whose weights are damaged: the error carries what vLLM said, and nothing stays behind."""
    served = own.export(tmp_path, own.normed_head(vllm_target), vllm_target, vllm_hf)
    (served / "model.safetensors").write_bytes(b"no weights")
    scratch = tmp_path / "scratch"
    with pytest.raises(ValueError, match=r"(?s)ended with status 1.*safetensors"):
        own.make_vllm(vllm_target, scratch=scratch).speculate(own.requests(1), served, own.settings())
    assert list(scratch.iterdir()) == []


def test_no_room_below_vllm_is_said(vllm_target: Path, tmp_path: Path) -> None:
    """vLLM's process may write no file longer than some bytes, its log among them: the disk is full for it."""
    engine = own.make_vllm(vllm_target, scratch=tmp_path)
    asked = [own.response("a", own.random_ids(300, seed=0), 3)]
    with engine.prefill_pool(KEPT) as pool:
        resource.prlimit(pool.pids[0], resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(ValueError, match=r"File too large.* then run the same command again: it continues"):
            next(prefill_groups(pool, [asked], KEPT, batch_tokens=engine.batch_tokens))
    assert list(tmp_path.iterdir()) == []


def test_two_devices_for_one_copy_compute_what_one_does(vllm_target: Path, vllm_hf: HfEngine) -> None:
    """Tensor parallel: each of two processes holds half of every layer; hidden states and teacher are whole."""
    asked = [own.response(f"r{i}", own.random_ids(length, seed=i), 2) for i, length in enumerate((40, 130))]
    found = list(own.make_vllm(vllm_target, tensor_parallel_size=2).prefill(asked, KEPT))
    lm_head_VD = read_shared(vllm_target).lm_head_VD
    result = compare_samples(vllm_hf.prefill(asked, KEPT), found, lm_head_VD=lm_head_VD, tolerance=TOLERANCES["float32"])
    assert result.fault is None, result.fault
    assert result.at("top_k log_probs").num_rows == sum(r.loss_mask.count(True) for r in asked)
    assert dataclasses.asdict(result.at("logits"))["num_rows"] == 170
