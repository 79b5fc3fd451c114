"""Runs of the trainer against one another: interrupted, cut differently, with something wrong in them."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.checkpoint import read_head_config, read_head_tensors
from mtp_train.loss.base import Loss, LossChunk, Need
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.loss.total_variation import TotalVariation
from mtp_train.trainer.metrics import read_metrics
from mtp_train.trainer.state import StateReader, complete_steps


def lines_without_time(out: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in read_metrics(out / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("number", "status", "rule"), [(signal.SIGTERM, 143, "adamw"), (signal.SIGUSR1, 75, "muon"), (signal.SIGINT, 130, "adamw")]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    recipe: Any, recipes: Any, tmp_path: Path, number: int, status: int, rule: str
) -> None:
    recipe = replace(recipe, rule=rule)
    recipe.trainer(tmp_path / "whole").run()
    recipe = replace(recipe, num_steps=10)
    with pytest.raises(SystemExit) as ended:  # the signal comes in the validation after step 5: step 6 is done, then saved
        recipe.trainer(tmp_path / "parts", on_validate=recipes.stop_after(5, number)).run()
    assert ended.value.code == status
    said = json.loads((tmp_path / "parts" / "interrupted.json").read_text())
    assert said == {"signal": signal.Signals(number).name, "step": 6, "exit_status": status}
    assert complete_steps(tmp_path / "parts") == [5, 6]
    torch.manual_seed(123)  # whatever the new process's generators hold
    recipe.trainer(tmp_path / "parts").run()
    assert not (tmp_path / "parts" / "interrupted.json").exists()
    for name in ("head.safetensors", "step-000010/shard-00000-of-00001.safetensors"):
        whole, parts = load_file(tmp_path / "whole" / name), load_file(tmp_path / "parts" / name)
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole if not key.startswith("random/"))
    assert lines_without_time(tmp_path / "whole") == lines_without_time(tmp_path / "parts")


@pytest.mark.parametrize("damage", ["missing", "half", "other bytes", "no json"])
def test_a_finished_training_makes_a_damaged_head_anew(recipe: Any, tmp_path: Path, damage: str) -> None:
    """The state is all there: "train again" must not need the training again."""
    recipe.trainer(tmp_path).run()
    names = ("head.safetensors", "head.json", "metrics.jsonl")
    whole = {name: (tmp_path / name).read_bytes() for name in names}
    assert not recipe.trainer(tmp_path).run(), "nothing is left to do"
    weights = tmp_path / "head.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "no json":
        (tmp_path / "head.json").write_text("[1]")
    else:
        weights.write_bytes(whole[weights.name][:1000] if damage == "half" else b"\x80\x04pickle" + whole[weights.name][8:])
    recipe.trainer(tmp_path).run()
    assert {name: (tmp_path / name).read_bytes() for name in names} == whole


def test_a_killed_run_drops_what_it_logged_after_its_last_state(recipe: Any, tmp_path: Path) -> None:
    recipe.trainer(tmp_path / "whole").run()

    class Killed(Exception):
        pass

    def kill(done: int, folder: Path) -> None:
        raise Killed

    short = replace(recipe, validate_every=9, save_every=4)
    with pytest.raises(Killed):
        short.trainer(tmp_path / "parts", on_validate=kill).run()
    # Killed while step 9 is measured, its state is not there; a folder half written is no state either.
    (tmp_path / "parts" / "step-000009").mkdir()
    assert complete_steps(tmp_path / "parts") == [4, 8]
    recipe.trainer(tmp_path / "parts").run()
    whole, parts = read_head_tensors(tmp_path / "whole"), read_head_tensors(tmp_path / "parts")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    steps = [line["step"] for line in read_metrics(tmp_path / "parts" / "metrics.jsonl") if line["split"] == "train"]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no json"])
def test_a_damaged_state_is_named_and_the_one_before_leads_to_the_same_end(recipe: Any, tmp_path: Path, damage: str) -> None:
    recipe.trainer(tmp_path / "whole").run()
    recipe.trainer(tmp_path / "parts").run()
    (tmp_path / "parts" / "head.json").unlink()
    state = tmp_path / "parts" / "step-000010"
    shard = state / "shard-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    elif damage == "no json":
        (state / "state.json").write_text("{")
    else:
        content[-1] ^= 1
        shard.write_bytes(content if damage == "flipped" else content[:-1])
    with pytest.raises(ValueError, match=f"delete {state} to continue from the state before"):
        recipe.trainer(tmp_path / "parts")
    shutil.rmtree(state)
    recipe.trainer(tmp_path / "parts").run()
    for name in ("head.safetensors", "step-000010/state.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert lines_without_time(tmp_path / "whole") == lines_without_time(tmp_path / "parts")


def test_a_finished_run_does_nothing_twice(recipe: Any, tmp_path: Path) -> None:
    recipe.trainer(tmp_path).run()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    recipe.trainer(tmp_path).run()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_other_settings_are_refused_with_both_values(recipe: Any, tmp_path: Path) -> None:
    replace(recipe, num_steps=2).trainer(tmp_path).run()
    with pytest.raises(ValueError, match=r"optimizer\.lr: begun with 0\.01, now 0\.5(.|\n)*another name="):
        replace(recipe, lr=0.5).trainer(tmp_path).run()


def weights_after(recipe: Any, out: Path) -> dict[str, torch.Tensor]:
    recipe.trainer(out).run()
    return read_head_tensors(out)


def test_how_a_step_is_cut_into_packs_and_chunks_changes_nothing(recipe: Any, tmp_path: Path) -> None:
    """The whole epoch is one step: in many small packs and chunks, or in one pack and one chunk.

    The gradients agree to 1e-6 (test_objective.py); Adam divides each by its own size, so that where one is near 0 its
    rounding shows: 2e-4 is a fiftieth of one step of lr 1e-2.
    """
    few = replace(recipe, num_steps=3, validation_fraction=0.0, validate_every=None, noise_scale=0.0)
    num_packs = len(few.trainer(tmp_path / "unused")._plan.epoch_packs(0))
    assert num_packs > 4
    many = weights_after(replace(few, packs_per_step=num_packs, chunk_rows=5), tmp_path / "many")
    one = weights_after(replace(few, packs_per_step=1, tokens_per_pack=10_000, chunk_rows=10_000), tmp_path / "one")
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-4, atol=2e-4)


def test_draft_steps_and_losses_reach_the_metrics(recipe: Any, tmp_path: Path) -> None:
    losses = (("forward_kl", 1.0, ForwardKl()), ("total_variation", 0.2, TotalVariation(teacher="exact")))
    replace(recipe, losses=losses, draft_steps=3, num_steps=5, log_every=5).trainer(tmp_path).run()
    train, validation = read_metrics(tmp_path / "metrics.jsonl")
    assert {len(values) for values in train["losses"].values()} == {3}
    assert train["expected_acceptance"] == [None] * 3  # not measured in training
    for depth in range(3):  # 1 - sum min(p, q) is the loss itself
        assert validation["expected_acceptance"][depth] == pytest.approx(1 - validation["losses"]["total_variation"][depth], abs=1e-5)
    total = sum(0.8**k * (train["losses"]["forward_kl"][k] + 0.2 * train["losses"]["total_variation"][k]) for k in range(3))
    assert train["loss"] == pytest.approx(total)


def test_every_validation_is_told_as_held_out(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(recipe, draft_steps=2, num_steps=5, log_every=1, validate_every=3).trainer(tmp_path).run()
    told = [line for line in capsys.readouterr().err.splitlines() if "held out" in line]
    at = {line["step"]: line for line in read_metrics(tmp_path / "metrics.jsonl") if line["split"] == "validation"}
    figures = {
        step: f"agreement {line['agreement'][0]:.3f} / {line['agreement'][1]:.3f}, "
        f"expected acceptance {line['expected_acceptance'][0]:.3f} / {line['expected_acceptance'][1]:.3f}, loss {line['loss']:.4f}"
        for step, line in at.items()
    }
    said = [f"[mtp-train] held out, after step {step}: {figures[step]}" for step in (3, 5)]
    assert told == [*said, f"[mtp-train] the head of step 5 is in {tmp_path}; held out: {figures[5]}"]


def test_training_in_bfloat16_keeps_float32_weights(recipe: Any, tmp_path: Path) -> None:
    replace(recipe, precision="bf16", num_steps=10).trainer(tmp_path).run()
    assert {tensor.dtype for tensor in read_head_tensors(tmp_path).values()} == {torch.float32}
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["split"] == "train"]
    assert losses[-1] < losses[0]


class Poisoned(Loss):
    """A loss that is not a number from the n-th call on."""

    unit = "nats"

    def __init__(self, *, after_calls: int) -> None:
        self._left = after_calls

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    def __call__(self, chunk: LossChunk) -> torch.Tensor:
        self._left -= 1
        return chunk.hidden_RD.float().mean(-1) * (1.0 if self._left >= 0 else float("nan"))


def test_a_loss_that_is_no_number_stops_before_the_weights_are_touched(recipe: Any, tmp_path: Path) -> None:
    losses = (("poisoned", 1.0, Poisoned(after_calls=1)),)
    recipe = replace(recipe, losses=losses, draft_steps=2, chunk_rows=10_000, packs_per_step=1, num_steps=3)
    head = recipe.head()
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    with pytest.raises(ValueError, match="poisoned at depth 1") as stopped:
        recipe.trainer(tmp_path, head=head).run()
    message = str(stopped.value)
    assert "step 0" in message and "samples s" in message and "projection.weight" in message
    assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())


def test_embedding_and_lm_head_stay_as_they_are(recipe: Any, tmp_path: Path) -> None:
    head = recipe.head()
    shared = {name: getattr(head.shared, name) for name in ("embedding_VD", "lm_head_VD", "final_norm_weight_D")}
    before = {name: tensor.clone() for name, tensor in shared.items()}
    start = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    replace(recipe, num_steps=4).trainer(tmp_path, head=head).run()
    for name, tensor in shared.items():
        assert tensor.numpy().tobytes() == before[name].numpy().tobytes()
        assert not tensor.requires_grad and tensor.grad is None
    saved = read_head_tensors(tmp_path)
    assert saved.keys() == start.keys()
    assert all(not torch.equal(start[name], saved[name]) for name in saved)  # and everything else was trained


def test_states_are_kept_by_age_and_merit(recipe: Any, tmp_path: Path) -> None:
    replace(recipe, num_steps=10, validate_every=2, save_every=1, keep_last=1, final="best").trainer(tmp_path).run()
    made_by = read_head_config(tmp_path)["made_by"]
    best = made_by["best"]["step"]
    agreement = {line["step"]: line["agreement"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["split"] == "validation"}
    assert best == max(agreement, key=lambda step: (sum(agreement[step]), -step))
    assert complete_steps(tmp_path) == sorted({best, 10})
    assert made_by["step"] == best
    final, kept = read_head_tensors(tmp_path), StateReader(tmp_path / f"step-{best:06d}").weights()
    assert all(torch.equal(final[name], kept[name]) for name in final)


def test_validation_hands_a_head_to_its_callable(recipe: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    replace(recipe, validate_every=4).trainer(
        tmp_path, on_validate=lambda step, folder: seen.append((step, read_head_config(folder)["head"]))
    ).run()
    assert seen == [(4, "mtp"), (8, "mtp"), (10, "mtp")]


def test_wandb_offline_writes_its_folder(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    replace(recipe, num_steps=2, wandb_mode="offline").trainer(tmp_path).run()
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    assert any(path.suffix == ".wandb" and path.stat().st_size > 0 for path in runs[0].iterdir())


@pytest.mark.slow
def test_the_copy_task_is_learned_to_the_end(copy_recipe: Any, tmp_path: Path) -> None:
    """Each token is determined by the last, so a head aligned with its inputs and its teacher can be right every time."""
    replace(
        copy_recipe,
        num_steps=80,
        draft_steps=3,
        tokens_per_pack=144,
        lr=1e-2,
        noise_scale=0.0,
        log_every=20,
        validate_every=None,
        save_every=None,
    ).trainer(tmp_path).run()
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["split"] == "validation"
    assert last["agreement"] == [1.0, 1.0, 1.0]
    assert min(last["expected_acceptance"]) > 0.99
    assert decoded_rates(copy_recipe, tmp_path) == [1.0, 1.0, 1.0]


def decoded_rates(recipe: Any, checkpoint: Path) -> list[float]:
    """Acceptance per position of a trained head in real speculative decoding, float32, greedy, K = 3."""
    from mtp_train.checkpoint import read_head_tensors
    from mtp_train.decoding.chain import Chain
    from mtp_train.engine.base import Sampling, SpeculateRequest, SpeculateSettings
    from mtp_train.engine.hf import HfEngine

    def load(path: Path, shared: Any) -> Any:
        head = recipe.head()
        head.load_state_dict(read_head_tensors(path))
        return head

    engine = HfEngine(
        target_path=recipe.target,
        trust_remote_code=False,
        load_head=load,
        dtype="float32",
        device="cpu",
        batch_size=4,
        max_prefill_tokens=256,
        max_cache_tokens=8192,
    )
    requests = [SpeculateRequest(prompt_id=str(n), category="copy", token_ids=tuple(range(n, n + 5))) for n in range(8)]
    settings = SpeculateSettings(
        decoding=Chain(num_speculative_tokens=3, refresh=True),
        draft_sampling="greedy",
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=25, seed=0),
        batch_size=4,
        ignore_eos=True,
    )
    return engine.speculate(requests, checkpoint, settings).rate_per_position()


def test_metrics_are_json_lines(recipe: Any, tmp_path: Path) -> None:
    replace(recipe, num_steps=4).trainer(tmp_path).run()
    text = (tmp_path / "metrics.jsonl").read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def test_a_profiled_run_leaves_a_trace_of_its_steps(recipe: Any, tmp_path: Path) -> None:
    replace(recipe, num_steps=7, validation_fraction=0.0, validate_every=None, save_every=None, profile=True).trainer(tmp_path).run()
    names = [event["name"] for event in json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {f"ProfilerStep#{number}" for number in (3, 4, 5)}
    assert any(name == "aten::linear" for name in names)
