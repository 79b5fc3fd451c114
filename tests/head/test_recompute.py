"""Activations computed again in the backward: the same gradients, and far less kept in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from mtp_train.head.pair import PairHead
from mtp_train.nn.recompute import by_rows
from mtp_train.records import Batch

DEPTHS = 3
MakeHead = Callable[..., PairHead]


def gradients(head: PairHead, batch: Batch, *, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int]:
    """The parameters' gradients of a sum over all depths, and the bytes of tensors that the forward kept for the backward."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    head.zero_grad()
    enabled = dtype != torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        total = sum(step.hidden_TD.float().sin().sum() for step in itertools.islice(head.unroll(batch), DEPTHS))
    assert isinstance(total, torch.Tensor)
    total.backward()
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}
    return found, sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depths", [False, True])
def test_the_gradients_are_the_same_and_much_less_is_kept(make_head: MakeHead, batch: Batch, dtype: torch.dtype, depths: bool) -> None:
    """The depths' gradients are added in another order."""
    head, again = make_head(), make_head()
    again.recompute_activations(depths=depths)
    plain, plain_bytes = gradients(head, batch, dtype=dtype)
    found, found_bytes = gradients(again, batch, dtype=dtype)
    assert plain.keys() == found.keys() == dict(head.named_parameters()).keys()
    for name, gradient in plain.items():
        rounding = (1e-5 if dtype == torch.float32 else 1e-2) * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=rounding)
    assert found_bytes < plain_bytes / (4 if depths else 1.5), (found_bytes, plain_bytes)
    assert again.state_dict().keys() == head.state_dict().keys()


def test_stretches_of_rows_give_what_the_whole_gives(make_head: MakeHead, batch: Batch) -> None:
    head, again = make_head(), make_head()
    for module in again.row_wise():
        by_rows(module, rows=7)  # 25 rows: three whole stretches and a rest
    plain, _ = gradients(head, batch, dtype=torch.float32)
    found, _ = gradients(again, batch, dtype=torch.float32)
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


def test_all_but_attention_and_the_projections_is_row_wise(make_head: MakeHead) -> None:
    head = make_head()
    parts = {id(parameter) for module in head.row_wise() for parameter in module.parameters()}
    left = {name for name, parameter in head.named_parameters() if id(parameter) not in parts}
    assert all(name == "projection.weight" or ".self_attn." in name for name in left)


def test_nothing_is_recomputed_where_nothing_is_differentiated(make_head: MakeHead, batch: Batch) -> None:
    head = make_head()
    calls: list[int] = []
    head.decoder.register_forward_hook(lambda *_: calls.append(1))
    head.recompute_activations(depths=True)
    with torch.no_grad():
        list(itertools.islice(head.unroll(batch), DEPTHS))
    assert len(calls) == DEPTHS
    sum(step.hidden_TD.sum() for step in itertools.islice(head.unroll(batch), DEPTHS)).backward()
    assert len(calls) == 3 * DEPTHS
