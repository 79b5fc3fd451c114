"""Which sample goes into which shard, decided before anything is computed, so that a cache can be continued anywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from mtp_train.cache.codec import bytes_per_token
from mtp_train.cache.format import PLAN, CacheIdentity, check_same
from mtp_train.records import Response, Sample
from mtp_train.runtime import create_json, read_object


def content_hash(token_ids: Sequence[int], loss_mask: Sequence[bool]) -> str:
    """128 bits of sha256 over token ids and loss mask: two responses of the same id and length are told apart by it."""
    tokens = torch.tensor(token_ids, dtype=torch.int32).numpy().tobytes()
    mask = torch.tensor(loss_mask, dtype=torch.uint8).numpy().tobytes()
    return hashlib.sha256(tokens + mask).hexdigest()[:32]


@dataclass(frozen=True)
class PlannedSample:
    """One sample that the cache will hold."""

    sample_id: str
    num_tokens: int
    content: str

    @classmethod
    def of(cls, response: Response) -> PlannedSample:
        return cls(response.prompt_id, len(response.token_ids), content_hash(response.token_ids, response.loss_mask))

    def check(self, sample: Sample) -> None:
        """Assert that an engine returned what was asked for: this sample, its tokens and its mask."""
        assert sample.sample_id == self.sample_id, f"expected sample {self.sample_id!r} next, the engine returned {sample.sample_id!r}"
        found = content_hash(sample.token_ids_T.tolist(), sample.loss_mask_T.tolist())
        assert found == self.content, f"sample {self.sample_id!r}: the engine returned other tokens or another mask than the response has"


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The samples in order and the shards they fall into: shard i is ``samples[bounds[i]:bounds[i + 1]]``."""

    identity: CacheIdentity
    shard_tokens: int
    samples: tuple[PlannedSample, ...]
    bounds: tuple[int, ...]

    @classmethod
    def make(cls, *, identity: CacheIdentity, shard_tokens: int, samples: Iterable[PlannedSample]) -> CachePlan:
        """Fill shards in order up to ``shard_tokens``; a longer sample gets a shard of its own."""
        planned = tuple(samples)
        if not planned:
            raise ValueError("cache: expected at least one sample to write, found none; look at the skips of the step before")
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens: expected at least 1, found {shard_tokens}")
        seen: set[str] = set()
        for sample in planned:
            if sample.sample_id in seen:
                raise ValueError(f"cache: expected each sample id once, found {sample.sample_id!r} twice")
            seen.add(sample.sample_id)
            if sample.num_tokens < 1:
                raise ValueError(f"cache: expected at least one token in sample {sample.sample_id!r}, found none")
        bounds, held = [0], 0
        for number, sample in enumerate(planned):
            if number > bounds[-1] and held + sample.num_tokens > shard_tokens:
                bounds.append(number)
                held = 0
            held += sample.num_tokens
        return cls(identity=identity, shard_tokens=shard_tokens, samples=planned, bounds=(*bounds, len(planned)))

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    def shard(self, index: int) -> tuple[PlannedSample, ...]:
        return self.samples[self.bounds[index] : self.bounds[index + 1]]

    def most_bytes(self, index: int) -> int:
        """An upper bound of a shard's size: every token an answer, and room for its header and sidecar."""
        identity = self.identity
        per_token = bytes_per_token(
            codec=identity.codec,
            hidden_size=identity.hidden_size,
            num_taps=identity.num_taps,
            vocab_size=identity.vocab_size,
            top_k=identity.top_k,
            answer_share=1.0,
        )
        return int(sum(sample.num_tokens for sample in self.shard(index)) * per_token) + (1 << 16)

    def sha256(self) -> str:
        """Over everything that decides the shards' bytes; each sidecar repeats it, so that no other plan's shard counts."""
        decisive = [self.identity.compared(), self.shard_tokens, [astuple(sample) for sample in self.samples]]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Store the plan where there is none yet: of two that begin at once, the first one's stands."""
        create_json(
            folder / PLAN,
            {
                "sha256": self.sha256(),
                "identity": self.identity.to_json(),
                "shard_tokens": self.shard_tokens,
                "num_shards": self.num_shards,
                "samples": [list(astuple(sample)) for sample in self.samples],
            },
        )

    @classmethod
    def read(cls, folder: Path) -> CachePlan:
        """The plan that a cache was begun with; ValueError where the file does not hold what its own hash says."""
        path = folder / PLAN
        remedy = f"delete {PLAN} and run the same precompute again: shards of the same plan are kept"
        value = read_object(path, {"sha256": str, "shard_tokens": int, "identity": dict, "samples": list}, remedy=remedy)
        try:
            samples = [PlannedSample(sample_id, num_tokens, content) for sample_id, num_tokens, content in value["samples"]]
            identity = CacheIdentity.from_json(value["identity"], where=path)
            plan = cls.make(identity=identity, shard_tokens=value["shard_tokens"], samples=samples)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected the plan of a cache, found {error}; {remedy}") from error
        if (found := plan.sha256()) != value["sha256"]:
            raise ValueError(f"{path}: expected content of sha256 {value['sha256']}, found {found}; {remedy}")
        return plan

    def check_continues(self, begun: CachePlan, *, folder: Path) -> None:
        """Refuse to continue a cache that was begun with other settings or samples; ValueError says which."""
        check_same(self.identity, begun.identity, where=folder)
        if self.shard_tokens != begun.shard_tokens:
            raise ValueError(
                f"{folder}: this cache was begun with shard_tokens {begun.shard_tokens}, expected {self.shard_tokens}; "
                "use that value, or precompute into another folder"
            )
        if self.samples != begun.samples:
            pairs = zip(self.samples, begun.samples, strict=False)
            first = next(
                (number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(self.samples), len(begun.samples))
            )
            raise ValueError(
                f"{folder}: this cache was begun with {len(begun.samples)} samples, expected {len(self.samples)}; the first "
                f"difference is at number {first}: begun with {_entry(begun, first)}, expected {_entry(self, first)}; "
                "the responses have changed since: precompute into another folder, or delete this one"
            )


def _entry(plan: CachePlan, number: int) -> str:
    return repr(plan.samples[number]) if number < len(plan.samples) else "no sample"
