"""Reads a cache that precompute is still writing, or holds only in part: as it is planned, each shard waited for."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from mtp_train.cache.codec import codec_for
from mtp_train.cache.format import PLAN, CacheIdentity, ShardInfo, shard_name, shard_path, sidecar_path
from mtp_train.cache.plan import CachePlan
from mtp_train.cache.reader import check_shard
from mtp_train.cache.shard import OpenShard
from mtp_train.cache.wanted import Wanted
from mtp_train.records import Response, Sample, Teacher
from mtp_train.runtime import atomic_path, is_main

ANSWER_COUNTS = "answer_counts.safetensors"
# Between two looks whether a file is there, and between two lines that say so.
_LOOK_S, _SAY_S = 0.2, 60.0


class GrowingCache:
    """The samples of a cache by number, as ``CacheReader`` gives them, known from its plan before there are any.

    ``expect`` tells precompute, through a file in the folder, what is read next. A shard that is not there is waited for, and a
    line says so once a minute. A sample that precompute had to leave out (its numbers were not finite) comes with the length that
    was planned, hidden states of zero, and no token that counts. Errors: ValueError where the plan or a shard is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        wait_until((path / PLAN).exists, what=f"{path / PLAN}, which precompute begins with")
        self.plan = CachePlan.read(path)
        self._plan_sha256 = self.plan.sha256()
        self.sample_ids = [sample.sample_id for sample in self.plan.samples]
        self.lengths = [sample.num_tokens for sample in self.plan.samples]
        self.num_loss_tokens: list[int] | None = None  # the plan does not say
        self._most_bytes = 0
        self.shards = [index for index in range(self.plan.num_shards) for _ in self.plan.shard(index)]
        self._open: dict[int, tuple[OpenShard, dict[str, int]]] = {}
        self._lock = threading.Lock()

    @property
    def identity(self) -> CacheIdentity:
        return self.plan.identity

    @property
    def is_local(self) -> bool:
        return False

    @property
    def is_whole(self) -> bool:
        return False

    def checksums(self) -> list[str]:
        """What tells this cache's content from another's."""
        return [self._plan_sha256]

    def shard_bytes(self) -> list[int]:
        """An upper bound of each shard's size."""
        return [self.plan.most_bytes(index) for index in range(self.plan.num_shards)]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, number: int) -> Sample:
        shard, places = self._shard(self.shards[number])
        place = places.get(self.sample_ids[number])
        return self._left_out(number) if place is None else shard.sample(place)

    def answer_counts(self) -> torch.Tensor:
        """How often each token stands in the target's own text of all samples, int64 (V,)."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / ANSWER_COUNTS
        wait_until(path.exists, what=f"{path}, which precompute writes when it begins")
        try:
            counts_V = load_file(path)["counts"]
        except (SafetensorError, KeyError) as error:
            raise ValueError(
                f"{path}: expected counts of answer tokens, found {error}; precompute writes it anew when it is started"
            ) from None
        if counts_V.shape != (self.identity.vocab_size,):
            raise ValueError(
                f"{path}: expected {self.identity.vocab_size} counts, found {tuple(counts_V.shape)}; delete it and start precompute"
            )
        return counts_V

    def prepare(self, most_bytes: int) -> None:
        """Training reads shards of up to so many bytes at once; to be said before ``expect``."""
        self._most_bytes = most_bytes

    def expect(self, shards: Sequence[int]) -> None:
        """Have precompute make these shards, in this order, and keep them; all others it may drop."""
        self._tell(Wanted(plan_sha256=self._plan_sha256, shards=tuple(shards), most_bytes=self._most_bytes, done=False))
        wanted = set(shards)
        with self._lock:  # a deleted file takes room until nobody has it mapped
            for index in [index for index in self._open if index not in wanted]:
                del self._open[index]

    def done(self) -> None:
        """Have precompute end: nothing more is read."""
        self._tell(Wanted(plan_sha256=self._plan_sha256, shards=(), most_bytes=self._most_bytes, done=True))

    def _tell(self, wanted: Wanted) -> None:
        if is_main():
            wanted.write(self.path)

    def _shard(self, index: int) -> tuple[OpenShard, dict[str, int]]:
        with self._lock:
            path = shard_path(self.path, shard_name(index))
            while index not in self._open:
                wait_until(
                    lambda: path.exists() and sidecar_path(path).exists(), what=f"{path}, which a precompute with the same mode makes"
                )
                try:
                    self._open[index] = self._opened(path)
                except ValueError:
                    if path.exists() and sidecar_path(path).exists():
                        raise
                    # else it was just being dropped, on an older word of ours
            return self._open[index]

    def _opened(self, path: Path) -> tuple[OpenShard, dict[str, int]]:
        sidecar = sidecar_path(path)
        info = ShardInfo.from_sidecar(sidecar)
        if info.plan_sha256 != self._plan_sha256 or info.name != path.name:
            raise ValueError(
                f"{sidecar}: expected a shard of the plan {self._plan_sha256[:16]}, found {info.name} of {info.plan_sha256[:16]}; delete it"
            )
        check_shard(path, info)
        return OpenShard(path=path, info=info, identity=self.identity), {name: place for place, name in enumerate(info.sample_ids)}

    def _left_out(self, number: int) -> Sample:
        length, identity = self.lengths[number], self.identity
        hidden_TD = torch.zeros(length, identity.hidden_size, dtype=codec_for(identity.codec).dtype)
        top_k = identity.top_k
        return Sample(
            sample_id=self.sample_ids[number],
            token_ids_T=torch.zeros(length, dtype=torch.int64),
            loss_mask_T=torch.zeros(length, dtype=torch.bool),
            hidden_TD=hidden_TD,
            taps_TLD=hidden_TD[:, None].expand(-1, identity.num_taps, -1) if identity.num_taps else None,
            teacher=None
            if top_k is None
            else Teacher(
                row_M=torch.zeros(0, dtype=torch.int64),
                ids_MC=torch.zeros(0, top_k, dtype=torch.int64),
                log_probs_MC=torch.zeros(0, top_k),
                log_sum_exp_M=torch.zeros(0),
            ),
        )


def write_answer_counts(folder: Path, responses: Iterable[Response], *, vocab_size: int) -> None:
    """Count the answers' tokens before there are hidden states, for a training that reads them while they are made."""
    from safetensors.torch import save_file

    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for response in responses:
        own = [token for token, counts in zip(response.token_ids, response.loss_mask, strict=True) if counts]
        counts_V += torch.tensor(own, dtype=torch.int64).bincount(minlength=vocab_size)
    with atomic_path(folder / ANSWER_COUNTS) as temporary:
        save_file({"counts": counts_V}, temporary)


def wait_until(there: Callable[[], bool], *, what: str) -> None:
    """Wait, for as long as it takes; every process says what for, since one that waits holds up all others."""
    began_s = said_s = time.monotonic()
    while not there():
        time.sleep(_LOOK_S)
        if time.monotonic() - said_s >= _SAY_S:
            said_s = time.monotonic()
            print(f"[mtp-train] waiting for {what} ({said_s - began_s:.0f} s)", file=sys.stderr, flush=True)
