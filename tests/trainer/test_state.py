"""A training's state on disk: whole or absent, checked when read, refused under other settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mtp_train.trainer.optim import OptimizerSettings, Rule, build_optimizer
from mtp_train.trainer.state import (
    HeadFile,
    State,
    check_continues,
    check_settings,
    complete_steps,
    load_optimizer_tensors,
    optimizer_tensors,
    prune,
    read_state,
    write_state,
)

HEAD = HeadFile(
    config={"head": "mtp", "method": "mtp", "hidden_state": "post_norm", "settings": {}}, target={"target_name": "t"}, made_by={}
)
ADAM = OptimizerSettings(rule="adamw", lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.5, clip_norm=None)


def state(step: int) -> State:
    weights = {"w": torch.full((2, 2), float(step))}
    settings = {"optimizer": {"lr": 0.1}, "seed": 0}
    random = {"rank0.cpu": torch.get_rng_state()}
    return State(
        step=step, weights=weights, optimizer={"w/step": torch.tensor(3.0)}, random=random, settings=settings, counters={"tokens": 7}
    )


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write_state(tmp_path, state(3), head=HEAD)
    assert path.name == "step-000003"
    back = read_state(path)
    assert (back.step, back.settings, back.counters) == (3, state(3).settings, {"tokens": 7})
    for name in ("weights", "optimizer", "random"):
        mine, theirs = getattr(state(3), name), getattr(back, name)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_only_whole_states_count_and_leftovers_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        write_state(tmp_path, state(step), head=HEAD)
    (tmp_path / "step-000005" / "state.json").unlink()  # killed while it was deleted
    (tmp_path / ".step-000006.tmp").mkdir()  # killed while it was written
    (tmp_path / "step-000007.bak").mkdir()  # somebody's own
    assert complete_steps(tmp_path) == [1, 2, 3, 4]
    prune(tmp_path, keep_last=2, keep={1})
    assert complete_steps(tmp_path) == [1, 3, 4]
    assert not (tmp_path / ".step-000006.tmp").exists() and (tmp_path / "step-000007.bak").exists()
    write_state(tmp_path, state(5), head=HEAD)
    assert complete_steps(tmp_path) == [1, 3, 4, 5]


@pytest.mark.parametrize("name", ["head.safetensors", "optimizer.safetensors", "random.safetensors"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    path = write_state(tmp_path, state(1), head=HEAD)
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: expected sha256"):
        read_state(path)


def test_other_settings_are_named_with_both_values(tmp_path: Path) -> None:
    write_state(tmp_path, state(1), head=HEAD)
    check_continues(tmp_path, state(1).settings)
    check_continues(tmp_path / "nothing there", {"seed": 9})
    with pytest.raises(ValueError, match=r"optimizer\.lr: begun with 0\.1, now 0\.2\n  seed: begun with 0, now 'nothing'"):
        check_continues(tmp_path, {"optimizer": {"lr": 0.2}})
    with pytest.raises(ValueError, match="extra: begun with 'nothing', now 1"):
        check_settings({"extra": 1}, {}, where=tmp_path)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 2))
        self.norm = nn.Parameter(torch.ones(2))

    def step(self, optimizer: torch.optim.Optimizer, size: float) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()


def named(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_an_optimizer_goes_on_from_its_tensors(rule: Rule) -> None:
    one, two = Two(), Two()
    first, second = (build_optimizer(model, replace(ADAM, rule=rule)) for model in (one, two))
    one.step(first, 1.0)
    two.load_state_dict(one.state_dict())
    load_optimizer_tensors(second, named(two), {key: tensor.clone() for key, tensor in optimizer_tensors(first, named(one)).items()})
    one.step(first, -3.0)
    two.step(second, -3.0)
    assert torch.equal(one.matrix, two.matrix) and torch.equal(one.norm, two.norm)
    with pytest.raises(ValueError, match="of another head"):
        load_optimizer_tensors(second, named(two), {"other/step": torch.zeros(())})
