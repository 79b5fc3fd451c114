"""A cache's bytes are known before anything is computed, and one that its disk cannot hold is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.cache.disk import CacheSize, check_fits
from mtp_train.cache.format import CacheIdentity
from mtp_train.records import Response


def response(number: int, *, num_tokens: int) -> Response:
    return Response(
        prompt_id=f"sample-{number}",
        token_ids=(7,) * num_tokens,
        loss_mask=tuple(t >= num_tokens // 2 for t in range(num_tokens)),
        messages=(),
        finish_reason="stop",
        category="chat",
        source="test",
    )


def size_of(identity: CacheIdentity) -> CacheSize:
    return CacheSize(
        codec=identity.codec,
        hidden_size=identity.hidden_size,
        vocab_size=identity.vocab_size,
        num_taps=identity.num_taps,
        top_k=identity.top_k,
    )


@pytest.mark.parametrize(("codec", "top_k", "taps"), [("bf16", 64, ()), ("bf16", None, (0, 1, 2)), ("float32", 8, (1,))])
def test_within_two_percent_of_what_is_written(
    tmp_path: Path, identity: CacheIdentity, make_source: Callable[..., Any], codec: str, top_k: int | None, taps: tuple[int, ...]
) -> None:
    identity = replace(identity, codec=codec, top_k=top_k, target_layer_ids=taps, hidden_size=256)
    lengths = (210, 90, 350, 128, 411, 67)
    make_source(identity, lengths).write(tmp_path / "cache", shard_tokens=512)
    written = sum(file.stat().st_size for file in (tmp_path / "cache").iterdir())
    responses = [response(number, num_tokens=length) for number, length in enumerate(lengths)]
    assert size_of(identity).of(responses) == pytest.approx(written, rel=0.02)


def test_a_cache_larger_than_the_disk_is_refused_with_both_figures(tmp_path: Path, identity: CacheIdentity) -> None:
    size = replace(size_of(identity), hidden_size=10**12)  # 100 tokens of a few TB each: no disk here has that
    with pytest.raises(ValueError, match="free on that disk; make room") as refused:
        check_fits(tmp_path / "cache", [response(0, num_tokens=100)], size)
    needed, free = size.of([response(0, num_tokens=100)]), shutil.disk_usage(tmp_path).free
    assert f"{needed} bytes" in str(refused.value) and "codec=float32, top_k=5 and 2 tapped layers" in str(refused.value)
    stated = int(str(refused.value).split("free on that disk")[0].rsplit("(", 1)[1].split(" bytes")[0])
    assert stated == pytest.approx(free, rel=0.2)
    assert not (tmp_path / "cache").exists()


def test_what_is_written_already_is_not_asked_for_twice(tmp_path: Path, identity: CacheIdentity, make_source: Callable[..., Any]) -> None:
    responses = [response(number, num_tokens=length) for number, length in enumerate((30, 60, 90))]
    whole = check_fits(tmp_path / "cache", responses, size_of(identity))
    source = make_source(identity, (30, 60, 90))
    source.write(tmp_path / "cache")
    (tmp_path / "cache" / ".shard-00000.safetensors.1-0a1b2c3d.tmp").write_bytes(
        b"x" * 10**6
    )  # what a killed writer leaves counts for nothing
    assert 0 <= check_fits(tmp_path / "cache", responses, size_of(identity)) < 0.2 * whole
