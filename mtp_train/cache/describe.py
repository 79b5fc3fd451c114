"""Describes a cache for people: identity, sizes, a table of shards, bytes per token against the formula."""

from __future__ import annotations

from pathlib import Path

from mtp_train.cache.codec import bytes_per_token
from mtp_train.cache.format import MANIFEST, PLAN, Manifest, shard_path
from mtp_train.cache.reader import check_shard, read_manifest
from mtp_train.runtime import progress


def expected_bytes_per_token(manifest: Manifest) -> float:
    """What the formula (README.md, Size) says for this cache's identity and share of teacher rows."""
    identity = manifest.identity
    return bytes_per_token(
        codec=identity.codec,
        hidden_size=identity.hidden_size,
        num_taps=identity.num_taps,
        vocab_size=identity.vocab_size,
        top_k=identity.top_k,
        answer_share=manifest.num_teacher_rows / max(1, manifest.num_tokens),
    )


def describe(path: Path) -> str:
    """The cache in ``path`` as text; ValueError where it is not finished."""
    manifest = read_manifest(path)
    lines = [f"cache {path}", "", "identity"]
    lines += [f"  {name:20} {value}" for name, value in manifest.identity.to_json().items()]
    tokens = max(1, manifest.num_tokens)
    lines += [
        "",
        f"  {'samples':20} {manifest.num_samples}",
        f"  {'tokens':20} {manifest.num_tokens}",
        f"  {'answer tokens':20} {manifest.num_loss_tokens} ({manifest.num_loss_tokens / tokens:.1%})",
        f"  {'teacher rows':20} {manifest.num_teacher_rows}",
        f"  {'quarantined':20} {len(manifest.quarantined)}",
        f"  {'bytes':20} {manifest.num_bytes} in {len(manifest.shards)} shards, {_json_bytes(path)} in {MANIFEST} and {PLAN}",
        f"  {'bytes per token':20} {manifest.num_bytes / tokens:.1f}, by the formula {expected_bytes_per_token(manifest):.1f}",
        "",
        f"  {'shard':28} {'samples':>8} {'tokens':>9} {'teacher':>9} {'bytes':>13}  sha256",
    ]
    for shard in manifest.shards:
        lines.append(
            f"  {shard.name:28} {len(shard.sample_ids):8d} {shard.num_tokens:9d} {sum(shard.num_teacher_rows):9d} "
            f"{shard.num_bytes:13d}  {shard.sha256[:16]}"
        )
    lines += [f"  quarantined {entry.sample_id}: {entry.reason}" for entry in manifest.quarantined]
    return "\n".join(lines)


def verify(path: Path) -> int:
    """Hash every shard again and return how many there are; ValueError lists all that do not agree."""
    manifest = read_manifest(path)
    faults = []
    for shard in progress(manifest.shards, desc="verify", unit="shard"):
        try:
            check_shard(shard_path(path, shard.name), shard)
        except ValueError as fault:
            faults.append(str(fault))
    if faults:
        raise ValueError("\n".join(faults))
    return len(manifest.shards)


def _json_bytes(path: Path) -> int:
    return sum((path / name).stat().st_size for name in (MANIFEST, PLAN) if (path / name).exists())
