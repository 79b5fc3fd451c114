"""``compile=true``: the same values and gradients from compiled passes, and plain words where nothing can be compiled."""

from __future__ import annotations

import pytest
import torch

from mtp_train.loss import compiled
from mtp_train.loss.compiled import compiled_or_none, compiled_passes
from mtp_train.loss.forward_kl import _Kl, _passes


def _value_and_gradient(rows: int, ids_U: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    columns = 96 if ids_U is None else len(ids_U)
    logits_RU = torch.randn(rows, columns, generator=draw).requires_grad_()
    value_R = _Kl.apply(logits_RU, torch.randn(rows, 96, generator=draw), ids_U)
    (grad_RU,) = torch.autograd.grad((value_R * torch.linspace(0.5, 2.0, rows)).sum(), logits_RU)
    return value_R.detach(), grad_RU


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
@pytest.mark.skipif(not torch._dynamo.is_dynamo_supported(), reason="torch.compile does not work here")
def test_compiled_passes_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    whole = compiled._telling

    def counted(passes):  # type: ignore[no-untyped-def]
        ran.append(1)
        return whole(passes)

    monkeypatch.setattr(compiled, "_telling", counted)
    for rows, ids_U in ((7, None), (12, None), (5, torch.arange(0, 96, 3))):
        expected = _value_and_gradient(rows, ids_U)
        assert not ran
        with compiled_passes(True):
            found = _value_and_gradient(rows, ids_U)
        assert ran.pop() == 1
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with compiled_passes(False):
        assert compiled_or_none(_passes) is None


def test_where_torch_cannot_compile_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise torch._dynamo.exc.TorchDynamoException("no C++ compiler found")

    monkeypatch.setattr(torch, "compile", lambda passes, dynamic: broken)
    with compiled_passes(True):
        passes = compiled_or_none(lambda: None)
    assert passes is not None
    with pytest.raises(ValueError, match=r"compile: expected that torch.compile works.*no C\+\+ compiler.*compile=false"):
        passes()
