"""What all processes save and find together: whose part is whose, and what a disk that is full leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mtp_train.trainer.module import make_accelerator
from mtp_train.trainer.saving import Saver
from mtp_train.trainer.state import Position, StateReader, begin_state, complete_steps, finish_state, write_shard

# Added in another order they give another number.
SUMS = [torch.tensor([[0.1, 1e16]], dtype=torch.float64), torch.tensor([[0.2, 1.0]], dtype=torch.float64)]


class Held:
    """A ``Parallel`` of which only the pieces are asked for."""

    def pieces(self) -> dict[str, Any]:
        return {}


def saver(folder: Path, accelerator: Any) -> Saver:
    return Saver(folder=folder, accelerator=accelerator, head=nn.Module(), settings={}, keep_last=1)


def two_writers(folder: Path) -> StateReader:
    temporary = begin_state(folder, 4)
    shards = [
        write_shard(
            temporary,
            rank=rank,
            num_processes=2,
            pieces={},
            own={"sums": sums, "random/cpu": torch.Generator().manual_seed(rank).get_state()},
        )
        for rank, sums in enumerate(SUMS)
    ]
    return StateReader(finish_state(temporary, Position(step=4, shapes={}, settings={}, counters={}), shards))


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_each_process_goes_on_with_its_part_of_the_sums_and_none_counts_twice(tmp_path: Path, num_processes: int) -> None:
    state = two_writers(tmp_path)
    found = []
    with torch.random.fork_rng(devices=[]):
        for rank in range(num_processes):
            process = SimpleNamespace(process_index=rank, num_processes=num_processes, device=torch.device("cpu"))
            found.append(saver(tmp_path, process).restore_own(state))
            if rank < 2:
                assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(rank).get_state())
    if num_processes == 2:
        assert all(torch.equal(mine, saved) for mine, saved in zip(found, SUMS, strict=True))
    else:
        assert torch.equal(found[0], SUMS[0] + SUMS[1]) and not any(rest.any() for rest in found[1:])


def test_a_full_disk_is_told_and_the_states_before_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors has an error of its own for it, which the other processes of a run must be told too."""
    import safetensors.torch
    from safetensors import SafetensorError

    def save(step: int) -> Path:
        one = saver(tmp_path, make_accelerator("cpu"))
        return one.save(step, parallel=Held(), counters={}, sums_KX=SUMS[0], best_step=None)  # type: ignore[arg-type]

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    save(1)
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(ValueError, match="No space left on device; make room there, then run the same command again"):
            save(2)
    assert complete_steps(tmp_path) == [1]
    StateReader(tmp_path / "step-000001").verify()
    save(3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000003"]


def test_what_a_killed_run_left_is_taken_away(tmp_path: Path) -> None:
    """Killed when the newest state had its name and the one before was still to be deleted; and while files were written."""
    one = saver(tmp_path, make_accelerator("cpu"))
    for step in (1, 2):
        one.save(step, parallel=Held(), counters={}, sums_KX=SUMS[0], best_step=1)  # type: ignore[arg-type]
    begin_state(tmp_path, 3)
    (tmp_path / ".head.safetensors.123.tmp").touch()
    (tmp_path / "metrics.jsonl").touch()
    one.tidy(best_step=None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl", "step-000002"]
