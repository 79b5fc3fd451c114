"""What a cache says about itself: its identity, its shards and its manifest, as JSON that is checked when it is read.

README.md in this folder is the specification; this module is the only place that knows the field and file names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from mtp_train.records import HiddenState
from mtp_train.runtime import SEAL, check_seal, read_json, read_object, seal
from mtp_train.typed import arguments, fit

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PLAN = "plan.json"

# The one metadata entry of a shard. safetensors writes several entries in random order; one keeps the bytes reproducible.
METADATA_KEY = "mtp_train_cache"

_SHARD_NAME = re.compile(r"shard-\d{5,}\.safetensors")

# Stated, and printed, but two caches that differ in them only are the same: the weights' fingerprint decides.
INFORMATIVE = ("target_name", "git_commit")

_ELSEWHERE = "precompute into another folder (out=...) and train on that one (cache=...)"
_REMEDIES = {
    "format_version": "make the cache anew with this version of mtp-train",
    "hidden_state": "the cache keeps post_norm states; make the cache anew",
    "tokenizer_hash": f"use the tokenizer that the cache was made with, or {_ELSEWHERE}",
    "template_hash": f"use the chat template that the cache was made with, or {_ELSEWHERE}",
    "target_fingerprint": f"use the target that the cache was made from, or {_ELSEWHERE}",
    "engine": f"choose the engine that began the cache, or {_ELSEWHERE}",
    "engine_version": f"install the version that began the cache, or {_ELSEWHERE}",
}
_REMEDY = f"use the setting that the cache was made with, or {_ELSEWHERE}"


def shard_name(index: int) -> str:
    """The file name of shard ``index``."""
    return f"shard-{index:05d}.safetensors"


def shard_path(folder: Path, name: str) -> Path:
    """Where a shard named in a manifest lies; ValueError for a name that could point outside the folder."""
    if not _SHARD_NAME.fullmatch(name):
        raise ValueError(
            f"{folder / MANIFEST}: expected shard names like {shard_name(0)}, found {name!r}; this manifest was not written by us"
        )
    return folder / name


def sidecar_path(shard: Path) -> Path:
    """The JSON beside a shard: ``shard-00000.json``."""
    return shard.with_suffix(".json")


def _fields(cls: type, value: Any, *, where: Path) -> dict[str, Any]:
    """``value`` as the arguments of the dataclass ``cls``; ValueError names what is missing, unknown or of another type."""
    try:
        return arguments(cls, fit(dict, value, cls.__name__), where=cls.__name__, noun="fields")
    except ValueError as fault:
        raise ValueError(f"{where}: {fault}; make the file anew") from None


@dataclass(frozen=True, kw_only=True)
class CacheIdentity:
    """What the numbers in a cache depend on. Two caches are the same where all but ``INFORMATIVE`` fields agree.

    ``target_fingerprint``, ``tokenizer_hash`` and ``template_hash`` are hex digests; ``hidden_state`` must be stated and
    is ``post_norm`` (what the lm_head reads); ``target_layer_ids`` are the tapped layers (DESIGN.md, Words), before the
    final norm; ``dtype`` is what the engine computed in, ``codec`` how vectors are stored; ``top_k`` the teacher
    candidates kept per answer token, None for no teacher; ``quantization`` that of the engine's target, None for none.
    """

    format_version: int
    target_name: str
    target_fingerprint: str
    tokenizer_hash: str
    template_hash: str
    hidden_state: HiddenState
    target_layer_ids: tuple[int, ...]
    dtype: str
    codec: str
    top_k: int | None
    engine: str
    engine_version: str
    quantization: str | None
    hidden_size: int
    vocab_size: int
    git_commit: str | None

    def __post_init__(self) -> None:
        if self.hidden_state not in get_args(HiddenState):
            raise ValueError(f"cache identity: expected hidden_state to be one of {get_args(HiddenState)}, found {self.hidden_state!r}")
        if self.hidden_state != "post_norm":
            raise ValueError(f"cache identity: expected hidden_state post_norm (what the lm_head reads), found {self.hidden_state!r}")
        if self.hidden_size < 1 or self.vocab_size < 1:
            raise ValueError(f"cache identity: expected sizes above 0, found hidden {self.hidden_size}, vocabulary {self.vocab_size}")
        if self.top_k is not None and not 1 <= self.top_k <= self.vocab_size:
            raise ValueError(f"cache identity: expected top_k from 1 to {self.vocab_size} (the vocabulary) or null, found {self.top_k}")

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    def compared(self) -> dict[str, Any]:
        """The fields that decide, as JSON values."""
        return {name: value for name, value in self.to_json().items() if name not in INFORMATIVE}

    @classmethod
    def from_json(cls, value: Any, *, where: Path) -> CacheIdentity:
        if isinstance(value, dict) and "hidden_state" not in value:
            raise ValueError(
                f"{where}: expected a statement of hidden_state (post_norm), found none; a cache that does not say is not read"
            )
        known = _fields(cls, value, where=where)
        return cls(**known)


def check_fields(expected: Mapping[str, Any], found: CacheIdentity, *, where: Path) -> None:
    """Compare the named fields with a cache's; ValueError names each that differs, with both values and the remedy. Of
    ``INFORMATIVE`` ones the target's name stands beside its fingerprint."""
    held = found.to_json()
    lines = []
    for name, value in expected.items():
        assert name in held, name
        value = list(value) if isinstance(value, tuple) else value
        if name not in INFORMATIVE and held[name] != value:
            named = name == "target_fingerprint" and "target_name" in expected
            mine, theirs = (f" ({values['target_name']})" if named else "" for values in (expected, held))
            lines.append(f"  {name}: expected {value!r}{mine}, found {held[name]!r}{theirs}; {_REMEDIES.get(name, _REMEDY)}")
    if lines:
        raise ValueError(f"{where}: this cache does not match:\n" + "\n".join(lines))


def check_same(expected: CacheIdentity, found: CacheIdentity, *, where: Path) -> None:
    """Refuse another identity; ValueError names each field that differs, with both values and the remedy."""
    check_fields(expected.to_json(), found, where=where)


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A sample left out, and why."""

    sample_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One shard as its sidecar and the manifest describe it; the tuples hold one entry per sample kept, in file order."""

    name: str
    sha256: str
    num_bytes: int
    plan_sha256: str
    sample_ids: tuple[str, ...]
    categories: tuple[str, ...]
    lengths: tuple[int, ...]
    num_loss_tokens: tuple[int, ...]
    num_teacher_rows: tuple[int, ...]
    quarantined: tuple[Quarantined, ...]

    def __post_init__(self) -> None:
        for name in ("categories", "lengths", "num_loss_tokens", "num_teacher_rows"):
            if len(getattr(self, name)) != len(self.sample_ids):
                raise ValueError(f"{self.name}: expected {len(self.sample_ids)} {name} (one per sample), found {len(getattr(self, name))}")

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, *, where: Path) -> ShardInfo:
        return cls(**_fields(cls, value, where=where))

    def to_sidecar(self) -> dict[str, Any]:
        """What the shard's own JSON holds: sealed, since it alone says what the manifest will say of the shard."""
        return {**self.to_json(), SEAL: seal(self.to_json())}

    @classmethod
    def from_sidecar(cls, path: Path) -> ShardInfo:
        """Read a shard's own JSON; ValueError where it is damaged."""
        value = read_json(path)
        info = cls.from_json({key: entry for key, entry in fit(dict, value, str(path)).items() if key != SEAL}, where=path)
        check_seal(value, where=path, remedy="make the shard anew")
        return info


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The index of a finished cache, written last: where it exists, precompute was finished."""

    identity: CacheIdentity
    plan_sha256: str
    shards: tuple[ShardInfo, ...]

    @property
    def num_samples(self) -> int:
        return sum(len(shard.sample_ids) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_loss_tokens(self) -> int:
        return sum(sum(shard.num_loss_tokens) for shard in self.shards)

    @property
    def num_teacher_rows(self) -> int:
        return sum(sum(shard.num_teacher_rows) for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        return tuple(entry for shard in self.shards for entry in shard.quarantined)

    def to_json(self) -> dict[str, Any]:
        content = {
            "identity": self.identity.to_json(),
            "plan_sha256": self.plan_sha256,
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "num_loss_tokens": self.num_loss_tokens,
            "num_teacher_rows": self.num_teacher_rows,
            "num_bytes": self.num_bytes,
            "num_quarantined": len(self.quarantined),
            "shards": [shard.to_json() for shard in self.shards],
        }
        return {**content, SEAL: seal(content)}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check ``manifest.json``; ValueError names the file and what is wrong with it."""
        remedy = "run precompute again, which writes it anew from the shards"
        value = read_object(path, {"identity": dict, "plan_sha256": str, "shards": list}, remedy=remedy)
        manifest = cls(
            identity=CacheIdentity.from_json(value["identity"], where=path),
            plan_sha256=value["plan_sha256"],
            shards=tuple(ShardInfo.from_json(entry, where=path) for entry in value["shards"]),
        )
        if manifest.identity.format_version != FORMAT_VERSION:
            raise ValueError(
                f"{path}: expected format version {FORMAT_VERSION}, found {manifest.identity.format_version}; make the cache anew"
            )
        check_seal(value, where=path, remedy=remedy)
        return manifest
