"""Codecs keep what they promise, and the size formula agrees with real files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtp_train.cache.codec import CODECS, bytes_per_token, codec_for
from mtp_train.cache.describe import describe, expected_bytes_per_token, verify
from mtp_train.cache.reader import CacheReader
from mtp_train.cache.recode import recode


@pytest.mark.parametrize("word", ["bf16", "float32"])
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


def _largest_of_group(vectors: torch.Tensor, size: int) -> torch.Tensor:
    """Per number, the largest magnitude of its group of ``size``."""
    return torch.cat([part.abs().amax(-1, keepdim=True).expand_as(part) for part in vectors.split(size, dim=-1)], -1)


@pytest.mark.parametrize("size", [1, 33, 64, 100, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_err_by_what_they_say(size, dtype):
    """Channels a thousand times larger than the rest, as real hidden states have; rounding to bfloat16 on the way out counts too."""
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(50, 2, size, generator=draw) * 10 ** torch.randn(size, generator=draw)
    vectors[..., : size // 8] *= 1000
    vectors = vectors.to(dtype)
    for word, group, share in (("int8", 64, 1 / 254), ("fp8", size, 0.0)):
        codec = codec_for(word)
        stored = codec.encode(vectors)
        found = codec.decode(stored)
        assert found.dtype == torch.bfloat16 and found.shape == vectors.shape
        assert sum(rows.nbytes for rows in stored.values()) == 100 * codec.bytes_per_vector(size)
        exact, error = vectors.double(), (found.double() - vectors.double()).abs()
        largest = _largest_of_group(exact, group)
        # fp8: 1/16 of the number, and half of e4m3's smallest step (2^-9 of 448) below.
        step = exact.abs() / 16 + largest / 448 * 2**-10 if word == "fp8" else largest * share
        assert (error <= step * 1.01 + exact.abs() * 2**-8).all() and (size == 1 or error.max() > 0)
        assert torch.equal(codec.decode({name: rows[7:9] for name, rows in stored.items()}), found[7:9])


def test_plain_e4m3_would_lose_what_the_scales_keep():
    vectors = torch.tensor([[4704.0, 1.0, -0.01, 0.0]])
    assert vectors.to(torch.float8_e4m3fn)[0, 0].item() != pytest.approx(4704, rel=0.5)
    for word in ("fp8", "int8"):
        found = codec_for(word).decode(codec_for(word).encode(vectors))
        assert found[0, 0].item() == pytest.approx(4704, rel=2**-7) and found[0, 3] == 0


@pytest.mark.parametrize("word", ["fp8", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_read_back_as_such(word, bad):
    vectors = torch.ones(3, 130)
    vectors[1, 70] = bad
    finite = torch.isfinite(codec_for(word).decode(codec_for(word).encode(vectors))).all(-1)
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize("word", ["fp8", "int8"])
def test_zeros_and_the_smallest_numbers_stay_finite(word):
    vectors = torch.zeros(4, 128)
    vectors[1] = 1e-38
    vectors[2] = 1e-45
    vectors[3] = 3e38
    found = codec_for(word).decode(codec_for(word).encode(vectors))
    assert torch.isfinite(found).all() and torch.equal(found[0], torch.zeros(128).bfloat16())
    assert found[3].float() == pytest.approx(3e38, rel=0.02)


@pytest.mark.parametrize("word", ["fp8", "int8"])
@pytest.mark.parametrize(("hidden_size", "vocab_size"), [(64, 300), (576, 49152), (4096, 65536)])
def test_eight_bits_stay_below_the_bound(word, hidden_size, vocab_size):
    """H + H/16 + 8 + share x (4C + 4), where ids take 2 bytes."""
    for share in (0.0, 0.39, 1.0):
        bound = hidden_size * 17 / 16 + 8 + share * (4 * 64 + 4)
        assert (
            bytes_per_token(codec=word, hidden_size=hidden_size, num_taps=0, vocab_size=vocab_size, top_k=64, answer_share=share) <= bound
        )


def test_an_unknown_codec_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"\['bf16', 'float32', 'fp8', 'int8'\], found 'int3'"):
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


@pytest.mark.parametrize("word", ["bf16", "fp8", "int8"])
def test_a_cache_is_written_again_with_another_codec(tmp_path, source, word):
    """All but the vectors stays bit for bit; the vectors are what the codec makes of them; the manifest says which."""
    source.write(tmp_path / "exact")
    exact = CacheReader(tmp_path / "exact", verify="none")
    recode(exact, codec=word, out=tmp_path / "small")
    small, codec = CacheReader(tmp_path / "small", verify="first_read"), codec_for(word)
    assert small.identity == replace(exact.identity, codec=word) and small.sample_ids == exact.sample_ids
    for number in range(len(exact)):
        found, expected = small[number], exact[number]
        for name in ("hidden_TD", "taps_TLD"):
            assert torch.equal(getattr(found, name), codec.decode(codec.encode(getattr(expected, name))))
        assert torch.equal(found.token_ids_T, expected.token_ids_T) and torch.equal(found.loss_mask_T, expected.loss_mask_T)
        for name in ("row_M", "ids_MC", "log_probs_MC", "log_sum_exp_M"):
            assert torch.equal(getattr(found.teacher, name), getattr(expected.teacher, name))
    whole = {file.name: file.read_bytes() for file in (tmp_path / "small").iterdir()}
    (tmp_path / "small" / "shard-00001.json").unlink()
    recode(exact, codec=word, out=tmp_path / "small")
    assert {file.name: file.read_bytes() for file in (tmp_path / "small").iterdir()} == whole
