"""Mixture-of-experts layers: each expert's rows in one product, in autocast's dtype, one gradient for all experts' weights.

transformers stacks the weights of a layer's experts, ``gate_up_proj`` (E, 2 I, D) and ``down_proj`` (E, D, I), and asks a
registered function for the products. Its own are no good in training: the plain loop indexes the stack once per expert, and each
such step's backward fills a tensor of the whole stack's size (64 times 1.5 GB for DeepSeek-V2-Lite); the grouped one does not
know autocast and computes in the float32 of the master weights. Letters here: ``E`` experts, ``A`` chosen per token, ``S``
(token, expert) pairs, ``I`` an expert's inner size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

EXPERTS = "mtp_train"
# The names that transformers 5 saves a stack under, one expert after the other.
_STORED = re.compile(r"(mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")

CountRows = Callable[[torch.Tensor, int], list[int]]


def register() -> None:
    """Make ``EXPERTS`` known to transformers; harmless when repeated."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, run_experts)


def count_rows(expert_S: torch.Tensor, num_experts: int) -> list[int]:
    """How many rows each expert has; waits for the device."""
    counts: list[int] = torch.bincount(expert_S, minlength=num_experts).tolist()
    return counts


def run_experts(
    module: Any, hidden_TD: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor, *, count: CountRows = count_rows
) -> torch.Tensor:
    """transformers' experts interface: the weighted sum over each token's A chosen experts, (T, D).

    ``count`` is asked for the experts' numbers of rows; a plan that has no data answers by itself.
    Errors: ValueError for experts that are not two plain products around a gate.
    """
    if not (module.has_gate and module.is_concatenated) or module.is_transposed or module.has_bias:
        raise ValueError(
            f"target: expected experts of two products around a gate, without biases, found {type(module).__name__}; "
            "this architecture is not supported"
        )
    num_tokens, num_chosen = expert_TA.shape
    expert_S, order_S = expert_TA.flatten().sort(stable=True)
    rows_SD = hidden_TD[order_S // num_chosen]
    kind = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_TD.dtype
    if kind == "cuda" and dtype == torch.bfloat16:
        out_SD = grouped_products(module, rows_SD.to(dtype), expert_S)
    else:
        out_SD = products_one_by_one(module, rows_SD, count(expert_S, module.num_experts))
    weighted_SD = out_SD * weight_TA.flatten()[order_S, None]
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
    return weighted_SD[place_S].view(num_tokens, num_chosen, -1).sum(1).to(hidden_TD.dtype)


def products_one_by_one(module: Any, rows_SD: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Rows sorted by expert through their experts, (S, D): any device and dtype, autocast included."""
    weights = zip(rows_SD.split(counts), module.gate_up_proj.unbind(0), module.down_proj.unbind(0), strict=True)
    return torch.cat(
        [
            functional.linear(module._apply_gate(functional.linear(rows_RD, gate_up)), down)
            for rows_RD, gate_up, down in weights
            if rows_RD.shape[0]
        ]
    )


def grouped_products(module: Any, rows_SD: torch.Tensor, expert_S: torch.Tensor) -> torch.Tensor:
    """The same by torch's grouped product in bfloat16, which waits for nothing. On CUDA not run where this was written."""
    count_E = torch.zeros(module.num_experts, dtype=torch.int32, device=expert_S.device)
    end_E = count_E.scatter_add_(0, expert_S, torch.ones_like(expert_S, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    gate_up_EDI, down_EID = (stack.to(rows_SD.dtype).transpose(1, 2) for stack in (module.gate_up_proj, module.down_proj))
    gated_SI = module._apply_gate(functional.grouped_mm(rows_SD, gate_up_EDI, offs=end_E))
    return functional.grouped_mm(gated_SI, down_EID, offs=end_E)


def stack_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's tensors as they lie on disk -> as its module holds them: the experts' products stacked, all else as it is.

    Errors: ValueError where an expert lacks one of its three products.
    """
    stacked = {name: tensor for name, tensor in tensors.items() if not _STORED.fullmatch(name)}
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _STORED.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for prefix, parts in found.items():
        num_experts = 1 + max(number for number, _ in parts)
        missing = [(n, part) for n in range(num_experts) for part in ("gate_proj", "up_proj", "down_proj") if (n, part) not in parts]
        if missing:
            raise ValueError(f"target: expected gate_proj, up_proj and down_proj of experts 0 to {num_experts - 1}, found no {missing[:3]}")
        pairs = [torch.cat([parts[number, "gate_proj"], parts[number, "up_proj"]]) for number in range(num_experts)]
        stacked[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        stacked[f"{prefix}.down_proj"] = torch.stack([parts[number, "down_proj"] for number in range(num_experts)])
    return stacked


def unstack_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``stack_experts`` undone: a layer's tensors as they lie on disk."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stack, _, part = name.rpartition(".")
        if tensor.ndim != 3 or part not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for number, expert in enumerate(tensor):
            found |= {f"{stack}.{number}.{own}.weight": half for own, half in zip(names, expert.chunk(len(names)), strict=True)}
    return found
