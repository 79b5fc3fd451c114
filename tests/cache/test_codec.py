"""Codecs keep what they promise, and the size formula agrees with real files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtp_train.cache.codec import CODECS, codec_for
from mtp_train.cache.describe import describe, expected_bytes_per_token, verify
from mtp_train.cache.reader import CacheReader


@pytest.mark.parametrize("word", sorted(CODECS))
def test_numbers_of_the_codecs_dtype_are_exact(word):
    codec = codec_for(word)
    vectors = torch.randn(7, 2, 33, generator=torch.Generator().manual_seed(0)).to(codec.dtype)
    stored = codec.encode(vectors)
    assert torch.equal(codec.decode(stored), vectors) and codec.decode(stored).dtype == codec.dtype
    assert torch.equal(codec.decode({name: rows[2:5] for name, rows in stored.items()}), vectors[2:5])
    assert sum(rows.nbytes for rows in stored.values()) == 14 * codec.bytes_per_vector(33)


def test_float32_is_exact_and_bf16_rounds_to_nearest():
    vectors = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(codec_for("float32").encode(vectors)["values"], vectors)
    error = (codec_for("bf16").encode(vectors)["values"].float() - vectors).abs()
    assert 0 < error.max() and (error <= vectors.abs() * 2**-8).all()


def test_an_unknown_codec_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"\['bf16', 'float32'\], found 'int3'"):
        codec_for("int3")


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize(("top_k", "taps", "vocab_size"), [(None, (), 300), (16, (), 300), (4, (0, 1, 2), 70000), (None, (3,), 70000)])
def test_bytes_per_token_within_two_percent_of_real_files(tmp_path, make_source, identity, codec, top_k, taps, vocab_size):
    identity = replace(identity, codec=codec, top_k=top_k, target_layer_ids=taps, vocab_size=vocab_size, hidden_size=64)
    make_source(identity, (200, 340, 90, 510, 120, 260)).write(tmp_path, shard_tokens=1000)
    manifest = CacheReader(tmp_path, verify="first_read").manifest
    real = sum(entry.stat().st_size for entry in tmp_path.glob("*.safetensors")) / manifest.num_tokens
    assert real == pytest.approx(expected_bytes_per_token(manifest), rel=0.02)


def test_description_and_verification(tmp_path, source):
    source.poison(2, hidden_TD=source.samples[2].hidden_TD * float("nan"))
    source.write(tmp_path)
    text = describe(tmp_path)
    for expected in ("post_norm", "shard-00003.safetensors", "quarantined sample-2: hidden", "by the formula"):
        assert expected in text
    assert verify(tmp_path) == 4
    for name in ("shard-00001.safetensors", "shard-00002.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"(?s)shard-00001.*shard-00002"):
        verify(tmp_path)
