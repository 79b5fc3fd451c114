"""Which device a process takes: its own of several, where torchrun started several."""

from __future__ import annotations

import pytest
import torch

from mtp_train.engine.hf_model import choose_device


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a machine with four GPUs, on one that has none."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("local_rank", "num_local", "found"), [(0, 4, "cuda:0"), (3, 4, "cuda:3"), (5, 8, "cuda:1"), (0, 1, "cuda")])
@pytest.mark.parametrize("word", ["auto", "cuda"])
def test_each_process_takes_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, word: str, local_rank: int, num_local: int, found: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local))
    assert choose_device(word) == torch.device(found)


@pytest.mark.usefixtures("four_gpus")
def test_a_device_that_was_named_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    for word in ("quantum", "cuda:77"):
        with pytest.raises(
            ValueError, match=f"engine.device: expected auto, or a device that torch finds here, such as cpu, found '{word}'"
        ):
            choose_device(word)
