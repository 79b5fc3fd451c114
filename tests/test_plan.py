"""The verb: a plan on the terminal and as JSON, and what would not fit is refused with both figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_train.planning.plan import DEFAULT_RULE
from tests.shell import ROOT, Done, Shell

pytestmark = pytest.mark.timeout(900)  # on a machine that may be busy


Plan = Callable[..., Done]


@pytest.fixture
def plan(shell: Shell) -> Plan:
    """The verb as a process of its own."""
    return lambda *words: shell.wait(shell.start("mtp_train.plan", words))


@pytest.mark.slow
def test_seventy_billion_on_one_node(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "plan.json"
    words = ["target=llama3_70b", "head=mtp", "prompt.num_tokens=500M", "parallel=zero1", "hardware=8xh100"]
    done = plan(*words, "hardware.usd_per_hour=50", f"out={out}")
    assert done.code == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["target"]["num_parameters"] == 70_553_706_496 and found["head"]["num_parameters"] == 989_896_704
    assert found["work"]["num_tokens"] == 500_000_000
    # 16384 bytes of hidden state, 4 of token id, 1 of mask, and 64 candidates of 6 bytes with 8 more on 40% of the tokens.
    (bf16,) = [row for row in found["caches"] if row["codec"] == "bf16"]
    assert bf16["bytes_per_token"] == pytest.approx(16384 + 5 + 0.4 * (64 * 6 + 8)) and bf16["fits"]
    assert {row["mode"] for row in found["memory"]} == {"single", "ddp", "zero1", "zero2", "fsdp2", "zero3"}
    assert [stage["stage"] for stage in found["stages"]] == ["regenerate", "precompute", "train", "evaluate"]
    assert found["seconds"] == pytest.approx(sum(stage["seconds"] for stage in found["stages"]))
    assert found["usd"] == pytest.approx(found["seconds"] / 3600 * 50)
    assert found["cheapest"]["codec"] == "bf16" and found["cheapest_seconds"] <= found["seconds"]
    assert f"rule: {DEFAULT_RULE} " in (ROOT / "conf" / "train.yaml").read_text(encoding="utf-8")
    shown = done.stdout
    for text in (
        "70,553,706,496",
        "8.27 TB",
        "zero1 *",
        "*: what the settings ask for",
        "Cheapest that fits",
        "regenerate",
        "parallel=zero1 needs optimizer.rule=adamw: add it to train's command (muon if nothing is said)",
        "Would not fit: engine.tensor_parallel_size=1 (141 GB of weights on a device of 80.0 GB, 0 B left for the KV cache)",
        "An empty cell of the memory: at that moment nothing",
        "Its training: torchrun --nproc-per-node 8 -m mtp_train.train target=llama3_70b head=mtp parallel=zero1 optimizer.rule=adamw "
        "packs_per_step=8 run=...",
    ):
        assert text in shown, text


@pytest.mark.slow
def test_the_training_that_is_reckoned_with_is_one_that_train_takes(plan: Plan, shell: Shell) -> None:
    """What was typed of its own settings, and what differs from train's defaults, as a command that composes there."""
    import yaml

    words = ["prompt.num_tokens=1M", "parallel=ddp", "hardware=2cpu", "tokens_per_pack=8k", "packs_per_step=4", "losses.topk_kl=0.5"]
    done = plan(*words, "checkpoint_activations=true", "evaluate.batch_size=8", "optimizer.rule=muon")
    assert done.code == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Its training: ")]
    told = line.removesuffix(" run=...").partition("mtp_train.train ")[2].split()
    assert not {"evaluate.batch_size=8", "tokens_per_pack=8k"} & set(told)
    shown = shell.wait(shell.start("mtp_train.train", ["--cfg", "job", *told]))
    found = yaml.safe_load(shown.stdout)
    assert (found["tokens_per_pack"], found["packs_per_step"], found["checkpoint_activations"]) == (8000, 4, True)
    assert found["losses"] == {"hidden_l1": 1.0, "topk_kl": 0.5} and found["optimizer"]["rule"] == "muon"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "precision", "told", "command"),
    [
        ([], "bf16", "precision: auto, bf16. flops_per_s of 2cpu is of bfloat16 (hardware.flops_dtype); train itself asks its device.", ""),
        (["hardware.flops_dtype=float32"], "fp32", "precision: auto, fp32. flops_per_s of 2cpu is of float32", ""),
        (["precision=bf16"], "bf16", "precision: bf16. flops_per_s of 2cpu is of bfloat16 (hardware.flops_dtype).", "precision=bf16 "),
        (["precision=fp32"], "fp32", "training in float32 takes longer, and its memory alone is reckoned", "precision=fp32 "),
    ],
)
def test_the_plan_says_what_precision_comes_to(
    tmp_path: Path, words: list[str], precision: str, told: str, command: str, plan: Plan
) -> None:
    """``auto`` stays auto in the command, where the device that trains tells; a word that was given goes with it."""
    done = plan("prompt.num_tokens=1M", "hardware=2cpu", f"out={tmp_path}/plan.json", *words)
    assert done.code == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert found["precision"] == precision and told in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Its training: ")]
    assert f"-m mtp_train.train {command}parallel=" in line, line


@pytest.mark.slow
def test_an_optimizer_that_the_mode_cannot_take_is_told_apart_from_a_lack_of_memory(tmp_path: Path, plan: Plan) -> None:
    """ZeRO is reckoned with the one that it takes, which is said; the exit status is not that of what does not fit."""
    out = tmp_path / "plan.json"
    words = ["target=smollm2_135m", "prompt.num_tokens=1M", "parallel=zero1", "optimizer.rule=muon", f"out={out}"]
    done = plan(*words)
    assert done.code == 3 and "Traceback" not in done.stderr
    assert "these settings do not go together" in done.stderr and "set optimizer.rule=adamw" in done.stderr
    assert "Would fit with optimizer.rule=adamw: parallel=zero1, parallel=zero2, parallel=zero3" in done.stdout
    assert "needs adamw" in done.stdout and "Would not fit" not in done.stdout
    found = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["mode"]: (row["optimizer_rule"], row["possible"], row["fits"]) for row in found["memory"]}
    assert rows["zero1"] == rows["zero3"] == ("adamw", False, True) and rows["fsdp2"] == ("muon", True, True)
    assert [stage["stage"] for stage in found["stages"]] == ["regenerate", "precompute", "train", "evaluate"]
    assert found["problems"] == [] and len(found["conflicts"]) == 1 and found["cheapest"]["optimizer.rule"] == "muon"
    done = plan(*words, "hardware.memory_bytes=30MB")
    assert done.code == 2 and "per process, found" in done.stderr and "set optimizer.rule=adamw" in done.stderr


@pytest.mark.slow
def test_what_does_not_fit_is_named_with_both_figures_after_the_tables(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "plan.json"
    words = ["target=smollm2_135m", "prompt.num_tokens=1.5B", "parallel=single", "hardware=8xh100", f"out={out}"]
    done = plan(*words, "hardware.disk_bytes=1TB", "hardware.memory_bytes=30MB", "packs_per_step=1")
    assert done.code == 2 and "Traceback" not in done.stderr
    assert "cache: expected at most 1.00 TB (the disk), found 1." in done.stderr and "codec=bf16" in done.stderr
    assert "parallel=single: expected at most 28.2 MB per process, found" in done.stderr
    assert "engine: expected room for smollm2_135m on 8 devices of 30.0 MB" in done.stderr
    assert "No setting fits this machine." in done.stdout
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["problems"]) == 3 and found["cheapest"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "prompt.num_tokens: expected a value, found none"),
        (["run=runs/mine"], "run: expected a setting of plan, found none of that name; it works on no run: leave it out"),
        (["prompt.num_tokens=many"], "prompt.num_tokens: expected a number such as 500M or 1.5B, found 'many'"),
        (["prompt.num_tokens=1M", "losses.topk_kl={}"], "losses.topk_kl: expected a weight, found {}"),
        (["prompt.num_tokens=1M", "evaluate.batch_size=0"], "evaluate.batch_size: expected at least 1, found 0"),
        (["prompt.num_tokens=1M", "precision=bff16"], "precision: expected auto, bf16 or fp32, found 'bff16'"),
        (["prompt.num_tokens=1M", "hardware.flops_dtype=bf16"], "hardware.flops_dtype: expected bfloat16 or float32, found 'bf16'"),
    ],
)
def test_what_is_missing_or_no_number_is_refused(words: list[str], message: str, plan: Plan) -> None:
    done = plan(*words)
    assert done.code == 2 and message in done.stderr and "Traceback" not in done.stderr
