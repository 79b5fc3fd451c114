"""What the proof of an export takes for a tensor that counts: heads of few steps, branches that are silent still, one that is idle."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from mtp_train.batch.packing import pack
from mtp_train.exporter.base import Exporter
from mtp_train.exporter.hf import HfExporter
from mtp_train.exporter.proof import every_tensor_matters
from mtp_train.exporter.vllm import VllmExporter
from mtp_train.head.pair import PairHead
from mtp_train.records import Sample

_SPEC = importlib.util.spec_from_file_location("conftest_of_exporter", Path(__file__).with_name("conftest.py"))
assert _SPEC is not None and _SPEC.loader is not None
MADE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(MADE)


def started(target: Path, word: str, *, step_size: float) -> PairHead:
    """A head as training begins, its projection fitted and both branches of its layer zero, each number then moved by about
    ``step_size``, as in the first steps of a warm-up."""
    head = MADE.untouched_head(target, word=word, init="least_squares")
    draw = torch.Generator().manual_seed(5)
    sample = Sample(
        sample_id="fitted",
        token_ids_T=torch.randint(0, 320, (160,), generator=draw),
        loss_mask_T=torch.ones(160, dtype=torch.bool),
        hidden_TD=torch.randn(160, 64, generator=draw),
    )
    with torch.no_grad():
        head.start([pack([sample])])
        for parameter in head.parameters():
            parameter.add_(step_size * torch.randn(parameter.shape, generator=draw).sign())
    return head


@pytest.mark.parametrize("word", ["mtp", "eagle"])
@pytest.mark.parametrize("step_size", [0.0, 1e-7, 1e-4])
@pytest.mark.parametrize("form", ["hf", "vllm"])
def test_a_head_of_no_step_or_few_is_exported(form: str, step_size: float, word: str, tiny_llama: Path, tmp_path: Path) -> None:
    head = started(tiny_llama, word, step_size=step_size)
    layer = dict(head.decoder.layer.named_parameters())
    assert float(layer["mlp.down_proj.weight"].detach().abs().max()) <= 1.01 * step_size
    checkpoint = MADE.write_checkpoint(tmp_path / "head", tiny_llama, head)
    common: dict[str, Any] = {"trust_remote_code": False, "overwrite": False}
    exporter: Exporter = HfExporter(**common) if form == "hf" else VllmExporter(dtype="float32", allow_plugin=False, **common)
    proof = exporter.export(checkpoint, tiny_llama, tmp_path / "served").proof
    assert proof["least_effect_of_a_tensor"][1] > 1e-5


def test_a_tensor_that_counts_beside_large_numbers_is_found() -> None:
    """Its share of the logits is below rounding as it stands, and with noise of its own size."""
    tensors = {"large": torch.full((3,), 1e4), "small": torch.full((3,), 1e-3), "gate": torch.zeros(3)}

    def logits_of(changed: Any) -> torch.Tensor:
        return functional.pad(changed["large"], (0, 3)) + functional.pad(changed["small"] * changed["gate"], (3, 0))

    assert min(every_tensor_matters(tensors, logits_of).values()) > 1e-5


def test_a_tensor_outside_the_graph_is_refused_however_loud() -> None:
    tensors = {"read": torch.randn(3), "zero": torch.zeros(3), "idle": torch.randn(3)}

    def logits_of(changed: Any) -> torch.Tensor:
        return torch.cat([changed["read"], changed["read"] * changed["zero"]])

    with pytest.raises(ValueError, match=r"found that idle does not, with noise 1000 times .*; it is not part of this graph"):
        every_tensor_matters(tensors, logits_of)
