"""A training's state on disk: whole or absent, checked when read, shared out anew at will, refused under other settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_train.trainer.state import (
    Piece,
    Position,
    StateReader,
    begin_state,
    check_continues,
    check_settings,
    complete_steps,
    finish_state,
    folder_name,
    prune,
    write_shard,
)

SHAPES = {"matrix": (3, 4), "norm": (5,)}
WEIGHTS = {name: torch.arange(float(torch.Size(shape).numel())) for name, shape in SHAPES.items()}
SETTINGS = {"optimizer": {"lr": 0.1}, "seed": 0}


def position(step: int) -> Position:
    return Position(step=step, shapes=dict(SHAPES), settings=SETTINGS, counters={"tokens": 7})


def cut(name: str, start: int, stop: int) -> Piece:
    weight = WEIGHTS[name][start:stop]
    return Piece(start=start, tensors={"weight": weight, "exp_avg": weight * 10, "step": torch.tensor(3.0)})


def write(folder: Path, step: int) -> Path:
    """Three processes: the first holds most of the matrix, the second its end and a part of the norm, the last nothing."""
    temporary = begin_state(folder, step)
    held = [{"matrix": cut("matrix", 0, 7), "norm": cut("norm", 3, 5)}, {"matrix": cut("matrix", 7, 12), "norm": cut("norm", 0, 3)}, {}]
    shards = [
        write_shard(temporary, rank=rank, num_processes=3, pieces=pieces, own={"random/cpu": torch.tensor([rank])})
        for rank, pieces in enumerate(held)
    ]
    return finish_state(temporary, position(step), shards)


def test_any_stretch_comes_back_whoever_wrote_it(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    assert path == tmp_path / folder_name(3) == tmp_path / "step-000003"
    state = StateReader(path)
    state.verify()
    assert state.position == position(3)
    assert state.entries("matrix") == ["exp_avg", "step", "weight"]
    for name, whole in WEIGHTS.items():
        for start in range(len(whole) + 1):
            for stop in range(start, len(whole) + 1):
                assert torch.equal(state.read(name, "weight", start=start, stop=stop), whole[start:stop])
                assert torch.equal(state.read(name, "exp_avg", start=start, stop=stop), 10 * whole[start:stop])
        assert torch.equal(state.weights()[name], whole.view(SHAPES[name]))
    assert torch.equal(state.read("norm", "step", start=1, stop=2), torch.tensor(3.0))
    assert [{name: int(held) for name, held in state.own(rank).items()} for rank in range(3)] == [{"random/cpu": n} for n in range(3)]
    with pytest.raises(ValueError, match="of another head"):
        state.entries("other")


def test_only_whole_states_count_and_leftovers_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    (tmp_path / "step-000005" / "state.json").unlink()  # killed while it was deleted
    begin_state(tmp_path, 6)  # killed while it was written
    (tmp_path / "step-000007.bak").mkdir()  # somebody's own
    assert complete_steps(tmp_path) == [1, 2, 3, 4]
    prune(tmp_path, keep_last=2, keep={1})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000001", "step-000003", "step-000004", "step-000007.bak"]
    write(tmp_path, 5)
    assert complete_steps(tmp_path) == [1, 3, 4, 5]


def test_a_writer_that_was_left_over_does_not_reach_a_new_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a run is killed and the run started anew, while another of the old ones still writes its shard."""
    with monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: 1)
        old = begin_state(tmp_path, 1)
    new = begin_state(tmp_path, 1)
    assert old != new and not old.exists(), "a new state begins where the old one's folder is gone"
    shard = write_shard(new, rank=1, num_processes=2, pieces={}, own={"sums": torch.zeros(1)})
    write_shard(old, rank=1, num_processes=2, pieces={}, own={"sums": torch.ones(1)})
    StateReader(finish_state(new, position(1), [shard])).verify()
    prune(tmp_path, keep_last=1, keep=set())
    assert [entry.name for entry in tmp_path.iterdir()] == [folder_name(1)]


def test_a_state_is_not_finished_without_all_shards(tmp_path: Path) -> None:
    temporary = begin_state(tmp_path, 1)
    shards = [write_shard(temporary, rank=rank, num_processes=2, pieces={}, own={"sums": torch.zeros(1)}) for rank in (0, 1)]
    (temporary / shards[1].name).unlink()  # it lies on the other machine's disk
    with pytest.raises(ValueError, match="where all machines see it"):
        finish_state(temporary, position(1), shards)
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_is_found_by_the_process_that_checks_the_shard(tmp_path: Path, number: int) -> None:
    path = write(tmp_path, 1)
    shard = sorted(path.glob("*.safetensors"))[number]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    state = StateReader(path)
    for rank in (0, 1):
        if number % 2 == rank:
            with pytest.raises(ValueError, match=f"{shard.name}: expected sha256"):
                state.verify(rank=rank, num_processes=2)
        else:
            state.verify(rank=rank, num_processes=2)


@pytest.mark.parametrize("content", ["", "[1]", '{"format_version": 3}', "other step"])
def test_a_damaged_document_is_told_with_the_remedy(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, 1)
    whole = (path / "state.json").read_text()
    (path / "state.json").write_text(whole.replace('"step": 1', '"step": 7') if content == "other step" else content)
    with pytest.raises(ValueError, match=rf"state\.json.*delete {path} to continue from the state before"):
        StateReader(path)
    with pytest.raises(ValueError, match=r"state\.json"):
        check_continues(tmp_path, SETTINGS)
    (path / "state.json").write_text(whole.replace('"format_version": 3', '"format_version": 2'))
    with pytest.raises(ValueError, match="expected format_version 3, found 2; train anew"):
        StateReader(path)


def test_other_settings_are_named_with_both_values(tmp_path: Path) -> None:
    write(tmp_path, 1)
    check_continues(tmp_path, SETTINGS)
    check_continues(tmp_path / "nothing there", {"seed": 9})
    with pytest.raises(ValueError, match=r"optimizer\.lr: begun with 0\.1, now 0\.2\n  seed: begun with 0, now 'nothing'"):
        check_continues(tmp_path, {"optimizer": {"lr": 0.2}})
    check_continues(tmp_path, {"seed": SETTINGS["seed"]}, only_these=True)
    with pytest.raises(ValueError, match=r"seed: begun with 0, now 9\nset them back"):
        check_continues(tmp_path, {"seed": 9}, only_these=True)
    with pytest.raises(ValueError, match="extra: begun with 'nothing', now 1"):
        check_settings({"extra": 1}, {}, where=tmp_path)
