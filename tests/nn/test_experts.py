"""Our products of a layer's experts are transformers' plain loop, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtp_train.nn.experts import count_rows, grouped_products, products_one_by_one, run_experts, stack_experts

TOKENS, SIZE, INNER, EXPERTS, CHOSEN = 11, 16, 24, 6, 2


@pytest.fixture
def experts() -> Any:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

    config = DeepseekV2Config(hidden_size=SIZE, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, num_attention_heads=2)
    config._experts_implementation = "eager"
    module = DeepseekV2Experts(config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return module


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, chosen experts (the last one is chosen by nobody) and their weights."""
    draw = torch.Generator().manual_seed(2)
    scores = torch.randn((TOKENS, EXPERTS - 1), generator=draw).softmax(-1)
    weight_TA, expert_TA = scores.topk(CHOSEN)
    return torch.randn((TOKENS, SIZE), generator=draw), expert_TA, weight_TA


def test_values_and_gradients_are_the_plain_loops(experts: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    hidden_TD, expert_TA, weight_TA = inputs
    found = []
    for run in (experts, lambda *args: run_experts(experts, *args)):
        leaves = [hidden_TD.clone().requires_grad_(), weight_TA.clone().requires_grad_()]
        out_TD = run(leaves[0], expert_TA, leaves[1])
        found.append([out_TD, *torch.autograd.grad(out_TD.sin().sum(), [*leaves, *experts.parameters()])])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_the_grouped_products_are_those_one_by_one(experts: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    hidden_TD, expert_TA, _ = inputs
    expert_S, order_S = expert_TA.flatten().sort(stable=True)
    rows_SD = hidden_TD.bfloat16()[order_S // CHOSEN]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        one_by_one = products_one_by_one(experts, rows_SD, count_rows(expert_S, EXPERTS))
    with torch.no_grad():
        grouped = grouped_products(experts, rows_SD, expert_S)
    assert grouped.dtype == one_by_one.dtype == torch.bfloat16
    torch.testing.assert_close(grouped, one_by_one, rtol=0.02, atol=0.02)


def test_an_expert_without_its_part_is_named() -> None:
    part = torch.zeros((INNER, SIZE))
    whole = {f"mlp.experts.{n}.{name}.weight": part for n in range(2) for name in ("gate_proj", "up_proj")}
    whole |= {f"mlp.experts.{n}.down_proj.weight": part.T for n in range(2)} | {"mlp.gate.weight": part}
    stacked = stack_experts(whole)
    assert {name: tuple(tensor.shape) for name, tensor in stacked.items()} == {
        "mlp.gate.weight": (INNER, SIZE),
        "mlp.experts.gate_up_proj": (2, 2 * INNER, SIZE),
        "mlp.experts.down_proj": (2, SIZE, INNER),
    }
    del whole["mlp.experts.1.up_proj.weight"]
    with pytest.raises(ValueError, match=r"experts 0 to 1, found no \[\(1, 'up_proj'\)\]"):
        stack_experts(whole)


def test_experts_with_biases_are_refused(experts: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    experts.has_bias = True
    with pytest.raises(ValueError, match="without biases"):
        run_experts(experts, *inputs)
