"""In which order samples are trained on: shuffled over a whole cache, over some shards at a time, or mixed from several caches.

An order is decided by a seed and by what a manifest or a plan says of the samples, before any hidden state exists. Random numbers
are raw PCG64 output, which numpy keeps the same across versions (it does not promise that for shuffles).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np


class Order(Protocol):
    """The sample numbers of each epoch, in order."""

    def epoch(self, number: int) -> list[int]: ...


class Shuffle:
    """Every sample once an epoch. ``shards``: the shard that each sample lies in.

    ``window`` None shuffles over all samples. Else the epoch goes through the shards in a random order, and sample after sample
    is drawn out of ``window`` consecutive ones: the sample with the uniform number u in the shard of rank r stands at
    r + u x window, so that a shard is read from rank r on and done with at rank r + window. ``stream`` tells several orders of one
    seed apart; None for the only one.
    """

    def __init__(self, *, shards: Sequence[int], window: int | None, seed: int, stream: int | None = None) -> None:
        if window is not None and window < 1:
            raise ValueError(f"shuffle_shards: expected at least 1, or null for the whole cache, found {window}")
        if seed < 0:
            raise ValueError(f"seed: expected at least 0, found {seed}")
        self._shards = np.asarray(shards, dtype=np.int64)
        self._window = window
        self._entropy = [seed] if stream is None else [seed, stream + 1]  # a zero behind would change nothing

    def __len__(self) -> int:
        return len(self._shards)

    def epoch(self, number: int) -> list[int]:
        seed, *stream = self._entropy
        draw = np.random.PCG64(np.random.SeedSequence([seed, number, *stream]))
        raw = draw.random_raw(len(self._shards))
        if self._window is None:
            place = raw
        else:
            num_shards = int(self._shards.max()) + 1
            rank = np.empty(num_shards, dtype=np.int64)
            rank[np.argsort(draw.random_raw(num_shards), kind="stable")] = np.arange(num_shards)
            place = rank[self._shards] + raw * 2.0**-64 * self._window
        order: list[int] = np.argsort(place, kind="stable").tolist()
        return order


class Mixture:
    """Samples of several caches in fixed shares of tokens.

    The samples of part p are numbered behind those of the parts before it. The next sample is always of the part that is
    furthest behind its share, so that after every sample each part has its share to within one sample; a part that has been gone
    through begins its own next epoch. An epoch of the mixture is as many tokens as all parts hold together: a part with a larger
    share than its size is gone through more than once in it, one with a smaller share goes on in the next.
    """

    def __init__(self, *, parts: Sequence[Shuffle], lengths: Sequence[int], shares: Sequence[float]) -> None:
        assert len(parts) == len(shares) and sum(map(len, parts)) == len(lengths)
        if min(shares) <= 0:
            raise ValueError(f"mixture: expected shares above 0, found {list(shares)}; leave out what should not be trained on")
        self._parts, self._lengths = list(parts), list(lengths)
        self._shares = [share / sum(shares) for share in shares]
        self._first = [0, *accumulate(map(len, parts))]
        self._total = sum(lengths)
        self._orders: list[tuple[int, list[int]]] = [(-1, [])] * len(parts)
        # Samples and tokens taken of each part when an epoch begins.
        self._began: list[tuple[list[int], list[int]]] = [([0] * len(parts), [0] * len(parts))]

    def epoch(self, number: int) -> list[int]:
        while len(self._began) <= number:
            self._draw(len(self._began) - 1)
        return self._draw(number)

    def _draw(self, epoch: int) -> list[int]:
        samples, tokens = (list(counts) for counts in self._began[epoch])
        drawn: list[int] = []
        while sum(tokens) < (epoch + 1) * self._total:
            part = min(range(len(tokens)), key=lambda index: tokens[index] / self._shares[index])
            number = self._first[part] + self._sample(part, samples[part])
            drawn.append(number)
            samples[part] += 1
            tokens[part] += self._lengths[number]
        if len(self._began) == epoch + 1:
            self._began.append((samples, tokens))
        return drawn

    def _sample(self, part: int, taken: int) -> int:
        epoch, place = divmod(taken, len(self._parts[part]))
        if self._orders[part][0] != epoch:
            self._orders[part] = (epoch, self._parts[part].epoch(epoch))
        return self._orders[part][1][place]
