"""The learning rate's course and what the optimizer decays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mtp_train.trainer.optim import build_optimizer, set_lr
from mtp_train.trainer.settings import OptimizerSettings, Schedule


def test_warm_up_then_half_a_cosine_to_the_last_step() -> None:
    schedule = Schedule(kind="cosine", warmup_steps=4, min_ratio=0.2)
    factors = [schedule.factor(step, num_steps=25) for step in range(25)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[14] == pytest.approx(0.6)  # halfway between 1 and 0.2
    assert factors[24] == pytest.approx(0.2)
    assert factors[4:] == sorted(factors[4:], reverse=True)


def test_constant_stays() -> None:
    schedule = Schedule(kind="constant", warmup_steps=2, min_ratio=0.0)
    assert [schedule.factor(step, num_steps=5) for step in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_warm_up_longer_than_the_run_is_no_error(num_steps: int) -> None:
    schedule = Schedule(kind="cosine", warmup_steps=10, min_ratio=0.0)
    assert [schedule.factor(step, num_steps=num_steps) for step in range(num_steps)] == [0.1, 0.2, pytest.approx(0.3)][:num_steps]


def test_weight_decay_shrinks_matrices_and_leaves_norms() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.RMSNorm(3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build_optimizer(
        model,
        OptimizerSettings(rule="adamw", lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.5, clip_norm=None),
        dtype=torch.float32,
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    matrix, norm = model.parameters()
    torch.testing.assert_close(matrix.detach(), before[0] * 0.95)
    assert torch.equal(norm.detach(), before[1])


MUON = OptimizerSettings(rule="muon", lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=None)


class HeadLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(6, 4, bias=False)
        self.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, 9, bias=False)


def test_muon_steps_matrices_by_their_directions_and_leaves_the_rest_to_adamw() -> None:
    """One step from a zero state: the matrix moves by 0.2 sqrt(max(rows, columns)) lr in each singular direction of its gradient
    (0.7 to 1.2 of it after five Newton-Schulz steps), however long the gradient is there; norm and lm_head move by lr."""
    torch.manual_seed(0)
    model = HeadLike()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, MUON, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 100
    optimizer.step()
    moved = {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
    sizes = torch.linalg.svdvals(moved["matrix.weight"]) / (MUON.lr * 0.2 * 6**0.5)
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    for name in ("norm.weight", "lm_head.weight"):
        torch.testing.assert_close(moved[name].abs(), torch.full_like(moved[name], MUON.lr), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_multiplies_in_what_training_does(dtype: torch.dtype) -> None:
    """Newton and Schulz's five iterations written out (Jordan et al. 2024): bit for bit the step taken."""
    model = HeadLike()
    before = model.matrix.weight.detach().clone()
    optimizer = build_optimizer(model, MUON, dtype=dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    assert model.matrix.weight.grad is not None
    grad = model.matrix.weight.grad
    x = grad.lerp(torch.zeros_like(grad).lerp(grad, 0.05), 0.95).to(dtype)
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    assert x.dtype == dtype
    assert torch.equal(model.matrix.weight.detach(), before.add(x, alpha=-0.2 * 6**0.5 * MUON.lr))


def test_one_rate_and_one_state_serve_both_halves_of_muon() -> None:
    model = HeadLike()
    optimizer = build_optimizer(model, MUON, dtype=torch.float32)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does to any optimizer: other groups, another state
    set_lr(optimizer, 0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert set(optimizer.state) == set(model.parameters())


@pytest.mark.parametrize("change", [{"rule": "sgd"}, {"lr": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"clip_norm": 0.0}])
def test_impossible_optimizers_are_refused(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "rule": "adamw",
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "clip_norm": None,
    }
    with pytest.raises(ValueError, match="optimizer"):
        OptimizerSettings(**{**settings, **change})


@pytest.mark.parametrize("change", [{"kind": "linear"}, {"warmup_steps": -1}, {"min_ratio": 1.5}])
def test_impossible_schedules_are_refused(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"kind": "cosine", "warmup_steps": 1, "min_ratio": 0.1}
    with pytest.raises(ValueError, match="schedule"):
        Schedule(**{**settings, **change})
