"""What was written is read bit for bit; what was damaged is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from mtp_train.cache.format import Manifest
from mtp_train.cache.reader import CacheReader
from mtp_train.runtime import seal


@pytest.mark.parametrize("codec", ["float32", "bf16"])
@pytest.mark.parametrize("vocab_size", [300, 65536, 65537])
@pytest.mark.parametrize(("top_k", "taps"), [(5, (0, 1)), (None, ())])
def test_bit_exact(tmp_path, make_source, identity, codec, vocab_size, top_k, taps):
    source = make_source(replace(identity, codec=codec, vocab_size=vocab_size, top_k=top_k, target_layer_ids=taps))
    edge = source.samples[0].token_ids_T.clone()
    edge[0] = vocab_size - 1
    source.poison(0, token_ids_T=edge)
    source.write(tmp_path)
    reader = CacheReader(tmp_path, verify="first_read")
    assert len(reader) == len(source.samples)
    for number in (7, 0, 9, 1, 2, 3, 4, 5, 6, 8):
        found, expected = reader[number], source.samples[number]
        assert (found.sample_id, found.category) == (expected.sample_id, expected.category)
        for name in ("token_ids_T", "loss_mask_T", "hidden_TD", "taps_TLD"):
            mine, theirs = getattr(found, name), getattr(expected, name)
            assert (mine is None and theirs is None) or (mine.dtype == theirs.dtype and torch.equal(mine, theirs)), name
        if expected.teacher is None:
            assert found.teacher is None
        else:
            for name in ("row_M", "ids_MC", "log_probs_MC", "log_sum_exp_M"):
                mine, theirs = getattr(found.teacher, name), getattr(expected.teacher, name)
                assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


def test_the_lists_are_known_without_opening_a_shard(tmp_path, source):
    source.write(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    reader = CacheReader(tmp_path, verify="first_read")
    assert reader.lengths == [sample.num_tokens for sample in source.samples]
    assert reader.sample_ids == [sample.sample_id for sample in source.samples]
    assert reader.categories == [sample.category for sample in source.samples]
    assert reader.num_loss_tokens == [int(sample.loss_mask_T.sum()) for sample in source.samples]
    assert reader.num_teacher_rows == [len(sample.teacher.row_M) for sample in source.samples]
    assert reader.identity == source.identity


def test_log_probs_are_kept_within_the_stated_error(tmp_path, source):
    log_probs = -torch.rand(10, 5, generator=torch.Generator().manual_seed(0)) * 30
    teacher = source.samples[9].teacher
    assert teacher.log_probs_MC.shape[0] <= 10
    log_probs = log_probs[: len(teacher.row_M)]
    source.poison(9, teacher=replace(teacher, log_probs_MC=log_probs))
    source.write(tmp_path)
    found = CacheReader(tmp_path, verify="none")[9].teacher.log_probs_MC
    assert not torch.equal(found, log_probs)
    assert ((found - log_probs).abs() <= log_probs.abs() / 2048 + 2**-25).all()


def test_a_change_to_a_sample_never_reaches_the_file(tmp_path, source, contents):
    source.write(tmp_path)
    before = contents(tmp_path)
    CacheReader(tmp_path, verify="none")[0].hidden_TD.zero_()
    assert contents(tmp_path) == before


def test_no_manifest_says_how_far_precompute_got(tmp_path, source):
    source.write(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "shard-00003.json").unlink()
    with pytest.raises(ValueError, match="found 3 of 4 shards; run the same precompute again"):
        CacheReader(tmp_path, verify="first_read")
    with pytest.raises(ValueError, match="run precompute first"):
        CacheReader(tmp_path / "elsewhere", verify="first_read")


@pytest.mark.parametrize("fault", ["truncated", "flipped", "missing", "empty"])
def test_a_damaged_shard_is_named_and_the_others_still_read(tmp_path, source, fault):
    source.write(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    damaged = {"truncated": bytes(data[:-1]), "flipped": bytes(data), "empty": b""}
    if fault == "missing":
        shard.unlink()
    else:
        shard.write_bytes(damaged[fault])
    reader = CacheReader(tmp_path, verify="first_read")
    assert torch.equal(reader[0].hidden_TD, source.samples[0].hidden_TD)
    expected = reader.manifest.shards[1].sha256
    with pytest.raises(ValueError, match=rf"shard-00001.safetensors.*{expected}.*delete shard-00001.safetensors and rerun precompute"):
        reader[len(reader.manifest.shards[0].sample_ids)]
    assert source.write(tmp_path) == [1]  # the remedy works
    assert torch.equal(CacheReader(tmp_path, verify="first_read")[4].hidden_TD, source.samples[4].hidden_TD)


def test_unverified_reading_still_refuses_what_cannot_be_right(tmp_path, source):
    source.write(tmp_path)
    shard = tmp_path / "shard-00000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="expected a safetensors file"):
        CacheReader(tmp_path, verify="none")[0]
    shard.write_bytes((tmp_path / "shard-00001.safetensors").read_bytes())
    with pytest.raises(ValueError, match="do not agree with the manifest"):
        CacheReader(tmp_path, verify="none")[0]
    shard.unlink()
    with pytest.raises(ValueError, match="found no file"):
        CacheReader(tmp_path, verify="none")[0]


def _edit(path, change, *, reseal=True):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps({**manifest, "seal": seal(manifest)} if reseal else manifest))


def test_a_changed_manifest_is_refused_and_written_again(tmp_path, source):
    """A sample's id decides on which side of the held-out split it falls: a byte changed in one must not pass."""
    source.write(tmp_path)
    whole = (tmp_path / "manifest.json").read_bytes()
    _edit(tmp_path, lambda manifest: manifest["shards"][0]["sample_ids"].__setitem__(0, "another"), reseal=False)
    with pytest.raises(ValueError, match="it was changed or damaged; run precompute again"):
        CacheReader(tmp_path, verify="first_read")
    source.write(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == whole


def test_a_changed_sidecar_is_not_believed(tmp_path, source):
    source.write(tmp_path)
    whole = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    sidecar = tmp_path / "shard-00000.json"
    sidecar.write_text(sidecar.read_text().replace(source.samples[0].sample_id, "another", 1))
    source.write(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == whole


@pytest.mark.parametrize("name", ["../shard-00000.safetensors", "/etc/passwd", "shard-00000.safetensors/../../x", "shard-0.pt", ""])
def test_a_shard_name_cannot_leave_the_folder(tmp_path, source, name):
    source.write(tmp_path)
    _edit(tmp_path, lambda manifest: manifest["shards"][0].update(name=name))
    with pytest.raises(ValueError, match="shard names"):
        CacheReader(tmp_path, verify="first_read")


def test_a_manifest_must_state_its_hidden_state(tmp_path, source):
    source.write(tmp_path)
    _edit(tmp_path, lambda manifest: manifest["identity"].pop("hidden_state"))
    with pytest.raises(ValueError, match="statement of hidden_state"):
        CacheReader(tmp_path, verify="first_read")


def test_pre_norm_states_another_version_and_unknown_fields_are_refused(tmp_path, source, identity):
    with pytest.raises(ValueError, match="post_norm"):
        replace(identity, hidden_state="pre_norm")
    source.write(tmp_path)
    _edit(tmp_path, lambda manifest: manifest["identity"].update(format_version=99))
    with pytest.raises(ValueError, match="format version 1, found 99"):
        CacheReader(tmp_path, verify="first_read")
    _edit(tmp_path, lambda manifest: manifest["identity"].update(format_version=1, colour="red"))
    with pytest.raises(ValueError, match="colour"):
        CacheReader(tmp_path, verify="first_read")


def test_an_empty_loss_mask_over_the_whole_cache_is_refused(tmp_path, source):
    source.write(tmp_path)

    def empty(manifest):
        for shard in manifest["shards"]:
            shard["num_loss_tokens"] = [0] * len(shard["sample_ids"])

    _edit(tmp_path, empty)
    with pytest.raises(ValueError, match="empty loss mask"):
        CacheReader(tmp_path, verify="first_read")


def test_manifest_round_trip(tmp_path, source):
    source.write(tmp_path)
    manifest = Manifest.read(tmp_path / "manifest.json")
    assert json.loads(json.dumps(manifest.to_json())) == json.loads((tmp_path / "manifest.json").read_text())
    assert manifest.num_tokens == sum(sample.num_tokens for sample in source.samples)
    assert manifest.num_bytes == sum(entry.stat().st_size for entry in tmp_path.glob("*.safetensors"))
