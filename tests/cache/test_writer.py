"""Whatever interrupts the writer, the same call ends with the same bytes, and refuses what does not belong."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_train.cache import writer as writer_module
from mtp_train.cache.reader import CacheReader
from mtp_train.records import Sample


def test_every_shard_is_made_once_and_the_same_call_does_nothing_more(tmp_path, source, contents):
    assert source.write(tmp_path / "a") == [0, 1, 2, 3]
    first = contents(tmp_path / "a")
    assert source.write(tmp_path / "a") == []
    assert contents(tmp_path / "a") == first
    source.write(tmp_path / "b")
    assert contents(tmp_path / "b") == first


def _run_and_die(source, path: Path, *, event: int, half: bool) -> bool:
    """Write in a forked process that kills itself (SIGKILL) before its ``event``-th save, fsync or rename; True if it lived."""
    child = os.fork()
    if child == 0:
        count = 0

        def deadly(original):
            def call(*arguments, **named):
                nonlocal count
                count += 1
                if count == event:
                    if half and original.__name__ == "save_file":  # die in the middle of the shard's bytes
                        original(*arguments, **named)
                        os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **named)

            return call

        import safetensors.torch

        os.replace, os.fsync = deadly(os.replace), deadly(os.fsync)
        safetensors.torch.save_file = deadly(safetensors.torch.save_file)
        code = 1
        try:
            source.write(path)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


@pytest.mark.parametrize("half", [False, True])
def test_killed_at_every_step_it_continues_to_the_same_bytes(tmp_path, source, contents, half):
    source.write(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    lived, event = False, 0
    while not lived:
        event += 1
        path = tmp_path / f"killed-{event}"
        lived = _run_and_die(source, path, event=event, half=half)
        if not lived:
            source.write(path)
        assert contents(path) == expected, f"killed at event {event}"
        shutil.rmtree(path)
    assert event > 4 * 7  # a save, and fsyncs and renames of shard and sidecar, for each of four shards


_PROCESS = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("conftest_of_cache", sys.argv[2])
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)
source = fixtures.Source(fixtures._identity())
writer = source.writer(Path(sys.argv[1]))
by_id = {sample.sample_id: sample for sample in source.samples}
def slowly(ids):
    for sample_id in ids:
        time.sleep(0.1)
        yield by_id[sample_id]
for index, ids in writer.missing_shards():
    writer.write_shard(index, slowly(ids))
    print(index, flush=True)
"""


def test_a_process_killed_from_outside_keeps_its_finished_shards(tmp_path, source, contents):
    source.write(tmp_path / "whole")
    arguments = [sys.executable, "-c", _PROCESS, str(tmp_path / "killed"), str(Path(__file__).with_name("conftest.py"))]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == ["0", "1"]
    time.sleep(0.05)
    process.kill()
    process.wait()
    process.stdout.close()
    assert source.write(tmp_path / "killed") == [2, 3]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_two_writers_share_the_shards_of_one_cache(tmp_path, source, contents):
    source.write(tmp_path / "alone")
    by_id = {sample.sample_id: sample for sample in source.samples}
    writers = [source.writer(tmp_path / "shared") for _ in range(2)]
    busy = tmp_path / "shared" / ".shard-00003.safetensors.123-0a1b2c3d.tmp"
    busy.write_bytes(b"another process is writing this")
    missing = [list(writer.missing_shards()) for writer in writers]
    for rank in (1, 0):
        for index, sample_ids in missing[rank][rank:3:2]:
            writers[rank].write_shard(index, [by_id[sample_id] for sample_id in sample_ids])
    source.writer(tmp_path / "shared")  # one that comes late
    assert busy.exists()
    writers[1].write_shard(3, [by_id[sample_id] for sample_id in missing[1][3][1]])
    assert not busy.exists()
    writers[0].finish()
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -2])
@pytest.mark.parametrize("name", ["shard-00001.safetensors", "shard-00001.json"])
def test_a_truncated_file_is_made_anew_and_nothing_else(tmp_path, source, contents, name, keep):
    source.write(tmp_path)
    expected = contents(tmp_path)
    (tmp_path / name).write_bytes(expected[name][:keep])
    assert source.write(tmp_path) == [1]
    assert contents(tmp_path) == expected


def test_a_flipped_bit_is_made_anew(tmp_path, source, contents):
    source.write(tmp_path)
    expected = contents(tmp_path)
    broken = bytearray(expected["shard-00002.safetensors"])
    broken[-1] ^= 1
    (tmp_path / "shard-00002.safetensors").write_bytes(broken)
    assert source.write(tmp_path) == [2]
    assert contents(tmp_path) == expected


def test_a_cache_with_a_shard_being_made_anew_is_not_complete(tmp_path, source):
    source.write(tmp_path)
    (tmp_path / "shard-00000.safetensors").unlink()
    writer = source.writer(tmp_path)
    index, ids = next(writer.missing_shards())
    writer.write_shard(index, [sample for sample in source.samples if sample.sample_id in ids])
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_fingerprint", "ff"),
        ("tokenizer_hash", "ff"),
        ("template_hash", "ff"),
        ("top_k", None),
        ("target_layer_ids", (1,)),
        ("engine_version", "transformers 6"),
        ("codec", "bf16"),
        ("quantization", "fp8"),
        ("dtype", "bfloat16"),
    ],
)
def test_another_identity_is_refused_with_both_values(tmp_path, source, make_source, field, value):
    source.writer(tmp_path)
    with pytest.raises(ValueError, match=field) as caught:
        make_source(replace(source.identity, **{field: value})).writer(tmp_path)
    held = getattr(source.identity, field)
    for side in (value, held):
        assert repr(list(side) if isinstance(side, tuple) else side) in str(caught.value)
    assert "(out=...) and train on that one (cache=...)" in str(caught.value)
    assert (f"'ff' ({source.identity.target_name})" in str(caught.value)) == (field == "target_fingerprint")


def test_every_field_that_differs_is_named(tmp_path, source, make_source):
    source.writer(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)tokenizer_hash.*template_hash"):
        make_source(replace(source.identity, tokenizer_hash="x", template_hash="y")).writer(tmp_path)


def test_name_and_commit_only_inform(tmp_path, source, make_source, contents):
    source.write(tmp_path)
    expected = contents(tmp_path)
    assert make_source(replace(source.identity, target_name="other", git_commit=None)).write(tmp_path) == []
    assert contents(tmp_path) == expected


def test_other_samples_and_another_shard_size_are_refused(tmp_path, source, make_source):
    source.writer(tmp_path)
    with pytest.raises(ValueError, match="shard_tokens 24, expected 31"):
        source.writer(tmp_path, shard_tokens=31)
    with pytest.raises(ValueError, match="number 9"):
        make_source(source.identity, (3, 12, 7, 9, 4, 11, 5, 8, 6)).writer(tmp_path)
    source.poison(4, token_ids_T=source.samples[4].token_ids_T.flip(0))  # same id, same length
    with pytest.raises(ValueError, match=r"number 4.*responses have changed"):
        source.writer(tmp_path)


def test_a_shard_of_another_plan_does_not_count(tmp_path, source):
    source.write(tmp_path)
    (tmp_path / "plan.json").unlink()
    assert len(source.write(tmp_path, shard_tokens=25)) == source.writer(tmp_path, shard_tokens=25).num_shards


def test_a_plan_that_was_edited_is_refused(tmp_path, source):
    source.writer(tmp_path)
    plan = tmp_path / "plan.json"
    plan.write_text(plan.read_text().replace("aa11", "aa12"))
    with pytest.raises(ValueError, match="sha256"):
        source.writer(tmp_path)


def _poisoned(sample: Sample, place: str, value: float) -> dict[str, object]:
    if place == "hidden":
        hidden_TD = sample.hidden_TD.clone()
        hidden_TD[1, 3] = value
        return {"hidden_TD": hidden_TD}
    if place == "taps":
        taps_TLD = sample.taps_TLD.clone()
        taps_TLD[1, 1, 2] = value
        return {"taps_TLD": taps_TLD}
    part = getattr(sample.teacher, place).clone()
    part[1] = value
    return {"teacher": replace(sample.teacher, **{place: part})}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["hidden", "taps", "log_probs_MC", "log_sum_exp_M"])
def test_a_sample_that_is_not_finite_is_quarantined(tmp_path, source, place, value):
    source.poison(3, **_poisoned(source.samples[3], place, value))
    source.write(tmp_path)
    reader = CacheReader(tmp_path, verify="first_read")
    assert reader.sample_ids == [f"sample-{number}" for number in range(10) if number != 3]
    assert [entry.sample_id for entry in reader.manifest.quarantined] == ["sample-3"]
    assert place.removesuffix("_MC").removesuffix("_M") in reader.manifest.quarantined[0].reason
    assert "row 1" in reader.manifest.quarantined[0].reason
    for number, sample in enumerate(s for s in source.samples if s.sample_id != "sample-3"):
        assert torch.equal(reader[number].hidden_TD, sample.hidden_TD)
        assert torch.equal(reader[number].teacher.ids_MC, sample.teacher.ids_MC)
        assert torch.equal(reader[number].teacher.row_M, sample.teacher.row_M)
    assert source.write(tmp_path) == []


def test_what_overflows_in_the_codec_is_quarantined_too(tmp_path, make_source, identity):
    source = make_source(replace(identity, codec="bf16"))
    hidden_TD = source.samples[0].hidden_TD.float()
    hidden_TD[0, 0] = torch.finfo(torch.float32).max  # finite, but rounds to infinity in bf16
    source.poison(0, hidden_TD=hidden_TD)
    source.write(tmp_path)
    assert [entry.sample_id for entry in CacheReader(tmp_path, verify="none").manifest.quarantined] == ["sample-0"]


def test_a_shard_that_loses_all_its_samples(tmp_path, source):
    bad = [number for number, sample in enumerate(source.samples) if sample.sample_id in dict(source.writer(tmp_path).missing_shards())[1]]
    for number in bad:
        source.poison(number, hidden_TD=source.samples[number].hidden_TD * float("nan"))
    source.write(tmp_path)
    reader = CacheReader(tmp_path, verify="first_read")
    assert len(reader) == 10 - len(bad) and len(bad) > 0
    kept = [sample for number, sample in enumerate(source.samples) if number not in bad]
    assert all(torch.equal(reader[number].hidden_TD, sample.hidden_TD) for number, sample in enumerate(kept))


def test_nothing_to_learn_is_an_error(tmp_path, source):
    for number in range(10):
        source.poison(number, loss_mask_T=torch.zeros(source.samples[number].num_tokens, dtype=torch.bool))
    with pytest.raises(ValueError, match="loss mask"):
        source.write(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_finish_refuses_while_shards_are_missing(tmp_path, source):
    with pytest.raises(ValueError, match=r"4 are missing, the first is shard-00000"):
        source.writer(tmp_path).finish()


def test_a_full_disk_is_found_before_the_target_runs(tmp_path, source, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: full)

    def engine():
        raise AssertionError("the target was run for a shard that has no room")
        yield

    with pytest.raises(ValueError, match=r"shard-00000.*No space left on device \(1000 bytes free there\)"):
        source.writer(tmp_path).write_shard(0, engine())


def test_a_write_that_fails_loses_nothing_and_continues(tmp_path, source, contents):
    """A real failing write: the operating system refuses files above 3000 bytes, as it would on a full disk."""
    source.write(tmp_path / "whole")
    writer = source.writer(tmp_path / "cut")
    by_id = {sample.sample_id: sample for sample in source.samples}
    (first, first_ids), (second, second_ids) = list(writer.missing_shards())[:2]
    writer.write_shard(first, [by_id[sample_id] for sample_id in first_ids])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(ValueError, match=r"shard-00001.*expected to write \d+ bytes.*File too large.*1 finished shards are kept"):
            writer.write_shard(second, [by_id[sample_id] for sample_id in second_ids])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert source.write(tmp_path / "cut") == [1, 2, 3]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path, source):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match="Not a directory"):
        source.writer(tmp_path / "file" / "cache")


def test_an_engine_that_returns_something_else_is_our_fault(tmp_path, source):
    writer = source.writer(tmp_path)
    first, second, third = source.samples[:3]
    with pytest.raises(AssertionError, match="expected sample 'sample-0' next"):
        writer.write_shard(0, [second, first, third])
    with pytest.raises(AssertionError, match="no sample 'sample-1'"):
        writer.write_shard(0, [first])
    with pytest.raises(AssertionError, match="other tokens"):
        writer.write_shard(0, [replace(first, token_ids_T=first.token_ids_T + 1), second, third])
