"""Which samples of a cache are trained on and which are held out to validate."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mtp_train.batch.plan import DataPlan
from mtp_train.cache.format import CacheIdentity
from mtp_train.records import Sample


class Cache(Protocol):
    """Samples by number, and what is known of them before they are read: lists with an entry per sample.

    ``shards`` is the shard that a sample lies in. ``num_loss_tokens`` is None where it is not known. A cache that is not
    ``is_local`` is told by ``prepare`` and ``expect`` what training reads, and by ``done`` that it has ended; one that is not
    ``is_whole`` is never on the disk as a whole.
    """

    path: Path
    sample_ids: list[str]
    lengths: list[int]
    shards: list[int]

    @property
    def num_loss_tokens(self) -> list[int] | None: ...
    @property
    def identity(self) -> CacheIdentity: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def is_whole(self) -> bool: ...
    def checksums(self) -> list[str]: ...
    def shard_bytes(self) -> list[int]: ...
    def prepare(self, most_bytes: int) -> None: ...
    def expect(self, shards: Sequence[int]) -> None: ...
    def done(self) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Sample: ...


class Subset:
    """Some samples of a cache, numbered anew from 0. ``tap_columns``: which of the cache's tapped layers they carry; none
    unless ``with_taps`` asks."""

    def __init__(self, *, reader: Cache, numbers: Sequence[int], tap_columns: Sequence[int] = ()) -> None:
        self.cache, self.numbers, self._tap_columns = reader, list(numbers), list(tap_columns)
        self.sample_ids = [reader.sample_ids[number] for number in numbers]
        self.lengths = [reader.lengths[number] for number in numbers]
        self.shards = [reader.shards[number] for number in numbers]
        counts = reader.num_loss_tokens
        self.num_loss_tokens = None if counts is None else [counts[number] for number in numbers]

    @property
    def identity(self) -> CacheIdentity:
        return self.cache.identity

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Sample:
        sample = self.cache[self.numbers[number]]
        if sample.taps_TLD is None:
            return sample
        return replace(sample, taps_TLD=sample.taps_TLD[:, self._tap_columns] if self._tap_columns else None)

    def with_taps(self, target_layer_ids: Sequence[int]) -> Subset:
        """The same samples with the outputs of these layers, in this order.

        Errors: ValueError where the cache has not tapped one of them.
        """
        held = self.identity.target_layer_ids
        if not set(target_layer_ids) <= set(held):
            raise ValueError(
                f"cache: expected the outputs of the layers that the head reads, {list(target_layer_ids)}, found {list(held) or 'none'}; "
                f"precompute into another folder (out=) with target_layer_ids={_words(target_layer_ids)}, "
                "or choose head.target_layer_ids among these"
            )
        return Subset(reader=self.cache, numbers=self.numbers, tap_columns=[held.index(i) for i in target_layer_ids])

    def fingerprint(self) -> str:
        """128 bits of sha256 over the shards' checksums (of a cache that is still made: its plan's) and the samples chosen: other
        data, another fingerprint."""
        digest = hashlib.sha256()
        for line in (*self.cache.checksums(), *self.sample_ids):
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()[:32]


def split(reader: Cache, *, fraction: float, seed: int) -> tuple[Subset, Subset]:
    """The samples to train on, and about ``fraction`` of all to validate on, chosen by a hash of (seed, prompt id): which
    side a sample falls on depends on no other sample, and all answers to one prompt fall on the same.

    Errors: ValueError where one side would be left without a token that counts, or samples would be held out of a cache that is
    not at hand as a whole.
    """
    if fraction and not reader.is_whole:
        raise ValueError(
            f"validation.fraction: expected 0 for a cache that is never on the disk as a whole (they lie all over it), found {fraction}; "
            "set it to 0, and name a small cache to validate on in validation.cache"
        )
    if not 0 <= fraction < 1:
        raise ValueError(f"validation.fraction: expected from 0 to below 1, found {fraction}")
    held_out = [number for number, sample_id in enumerate(reader.sample_ids) if _share(seed, sample_id) < fraction]
    chosen = set(held_out)
    sides = (
        Subset(reader=reader, numbers=[number for number in range(len(reader)) if number not in chosen]),
        Subset(reader=reader, numbers=held_out),
    )
    counts = [side.num_loss_tokens for side in sides]
    empty = [count is not None and sum(count) == 0 for count in counts]
    if empty[0] or (fraction > 0 and empty[1]):
        raise ValueError(
            f"validation.fraction: expected samples with answer tokens on both sides, found {len(sides[0])} to train on and "
            f"{len(held_out)} held out of {len(reader)}; {_other_fraction(reader, seed=seed)}"
        )
    return sides


def _other_fraction(reader: Cache, *, seed: int) -> str:
    """What to set where ``split`` leaves a side empty: the least fraction in hundredths that does not, where there is one."""
    counts = reader.num_loss_tokens
    shares = [_share(seed, sample_id) for number, sample_id in enumerate(reader.sample_ids) if counts is None or counts[number]]
    least = math.floor(100 * min(shares, default=0.0)) / 100 + 0.01
    num_held_out = sum(share < least for share in shares)
    if not 0 < num_held_out < len(shares) or least >= 1:
        return "set validation.fraction=0 to hold out none, and name another cache to validate on in validation.cache, if there is one"
    return f"set validation.fraction={least:.2f}, which holds out {num_held_out}, or validation.fraction=0, which holds out none"


def validation_packs(subset: Subset, *, tokens_per_pack: int) -> list[list[int]]:
    """All samples of a subset in packs, always the same; a sample longer than a pack gets a larger pack."""
    size = max(tokens_per_pack, *subset.lengths)
    plan = DataPlan(lengths=subset.lengths, sample_ids=subset.sample_ids, seed=0, tokens_per_pack=size, packs_per_step=1)
    return plan.epoch_packs(0)


def _words(ids: Sequence[int]) -> str:
    return f"[{','.join(map(str, ids))}]"


def _share(seed: int, sample_id: str) -> float:
    """A number from 0 to below 1 that is uniform over prompts; ``<prompt id>#<n>`` is the id of a prompt's further answers."""
    prompt_id = re.sub(r"#\d+$", "", sample_id)
    digest = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
