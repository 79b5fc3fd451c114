"""Several caches of one target as one, for a training that takes from each the share that is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mtp_train.cache.format import CacheIdentity, check_same
from mtp_train.records import Sample
from mtp_train.trainer.data import Cache


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One cache of a mixture, a folder or a URL, and its share of the tokens, relative to the others' shares."""

    cache: str
    share: float


class MixedCache:
    """The samples of all ``parts`` (by name), those of the first one first; ``parts``: the part that each sample lies in.

    Errors: ValueError where there is no part, and where they were not made with the same target, tokenizer, template, engine and settings.
    """

    def __init__(self, parts: Mapping[str, Cache]) -> None:
        if not parts:
            raise ValueError("mixture: expected caches with their shares, found none; name some, or set mixture=null to train on cache=")
        self.names, self._parts = list(parts), list(parts.values())
        for name, part in parts.items():
            try:
                check_same(self.identity, part.identity, where=part.path)
            except ValueError as fault:
                raise ValueError(f"mixture.{name}: expected a cache like that of mixture.{self.names[0]}; {fault}") from None
        self.path = self._parts[0].path
        self._first = [0, *accumulate(len(part) for part in self._parts)]
        self._first_shard = [0, *accumulate(len(part.shard_bytes()) for part in self._parts)]
        self.sample_ids = [sample_id for part in self._parts for sample_id in part.sample_ids]
        self.lengths = [length for part in self._parts for length in part.lengths]
        self.num_loss_tokens = [count for part in self._parts for count in part.num_loss_tokens or ()]
        self.shards = [self._first_shard[index] + shard for index, part in enumerate(self._parts) for shard in part.shards]
        self.parts = [index for index, part in enumerate(self._parts) for _ in part.sample_ids]

    @property
    def identity(self) -> CacheIdentity:
        return self._parts[0].identity

    @property
    def is_local(self) -> bool:
        return all(part.is_local for part in self._parts)

    @property
    def is_whole(self) -> bool:
        return all(part.is_whole for part in self._parts)

    def checksums(self) -> list[str]:
        return [line for part in self._parts for line in part.checksums()]

    def shard_bytes(self) -> list[int]:
        """What shards take where they are fetched to: nothing, of a part that is at hand."""
        return [0 if part.is_local else size for part in self._parts for size in part.shard_bytes()]

    def prepare(self, most_bytes: int) -> None:
        for part in self._parts:
            part.prepare(most_bytes)

    def expect(self, shards: Sequence[int]) -> None:
        for index, part in enumerate(self._parts):
            first, stop = self._first_shard[index : index + 2]
            part.expect([shard - first for shard in shards if first <= shard < stop])

    def done(self) -> None:
        for part in self._parts:
            part.done()

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, number: int) -> Sample:
        index = bisect_right(self._first, number) - 1
        return self._parts[index][number - self._first[index]]
