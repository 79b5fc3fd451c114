"""One shard: samples gathered into the tensors that a safetensors file holds, and taken out of them again."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mtp_train.cache.codec import Codec, codec_for, id_dtype
from mtp_train.cache.format import METADATA_KEY, CacheIdentity, Quarantined, ShardInfo
from mtp_train.records import Sample, Teacher

# float32 on the way in, float16 on disk: half the bytes of the teacher for an error of |log_prob| / 2048 nats.
_LOG_PROB_DTYPE = torch.float16


def metadata(identity: CacheIdentity) -> dict[str, str]:
    """What a shard says of itself without its manifest: format version and codec."""
    return {METADATA_KEY: json.dumps({"format_version": identity.format_version, "codec": identity.codec})}


class ShardBuilder:
    """Gathers samples into preallocated tensors, so that a shard is held in memory once; bad samples are left out."""

    def __init__(self, *, identity: CacheIdentity, num_tokens: int) -> None:
        self._identity = identity
        self._codec = codec_for(identity.codec)
        self._num_tokens = num_tokens
        self._columns: dict[str, torch.Tensor] = {}
        self._teachers: list[Teacher] = []
        self._bounds = [0]
        self._teacher_bounds = [0]
        self.sample_ids: list[str] = []
        self.categories: list[str] = []
        self.num_loss_tokens: list[int] = []
        self.quarantined: list[Quarantined] = []

    def add(self, sample: Sample) -> None:
        """Keep the sample, or quarantine it where a number is not finite as it would be stored."""
        self._check_shapes(sample)
        encoded = self._encode(sample)
        bad = _non_finite(self._codec, encoded, sample)
        if bad is not None:
            self.quarantined.append(Quarantined(sample_id=sample.sample_id, reason=bad))
            return
        start, stop = self._bounds[-1], self._bounds[-1] + sample.num_tokens
        assert stop <= self._num_tokens, (sample.sample_id, stop, self._num_tokens)
        for name, rows in encoded.items():
            self._column(name, rows)[start:stop] = rows
        if sample.teacher is not None:
            self._teachers.append(sample.teacher)
            self._teacher_bounds.append(self._teacher_bounds[-1] + len(sample.teacher.row_M))
        self._bounds.append(stop)
        self.sample_ids.append(sample.sample_id)
        self.categories.append(sample.category)
        self.num_loss_tokens.append(int(sample.loss_mask_T.sum()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything gathered, by the names of README.md."""
        stop = self._bounds[-1]
        out = {name: column[:stop] for name, column in self._columns.items()}
        out["bounds"] = torch.tensor(self._bounds, dtype=torch.int64)
        if self._identity.top_k is not None and self._teachers:
            ids = id_dtype(self._identity.vocab_size)
            out["teacher.bounds"] = torch.tensor(self._teacher_bounds, dtype=torch.int64)
            out["teacher.row"] = torch.cat([t.row_M for t in self._teachers]).to(torch.int32)
            out["teacher.ids"] = torch.cat([t.ids_MC.to(ids) for t in self._teachers])
            out["teacher.log_probs"] = torch.cat([t.log_probs_MC.to(_LOG_PROB_DTYPE) for t in self._teachers])
            out["teacher.log_sum_exp"] = torch.cat([t.log_sum_exp_M for t in self._teachers]).to(torch.float32)
        return out

    def info(self, *, name: str, sha256: str, num_bytes: int, plan_sha256: str) -> ShardInfo:
        lengths = tuple(b - a for a, b in zip(self._bounds, self._bounds[1:], strict=False))
        rows = tuple(b - a for a, b in zip(self._teacher_bounds, self._teacher_bounds[1:], strict=False))
        return ShardInfo(
            name=name,
            sha256=sha256,
            num_bytes=num_bytes,
            plan_sha256=plan_sha256,
            sample_ids=tuple(self.sample_ids),
            categories=tuple(self.categories),
            lengths=lengths,
            num_loss_tokens=tuple(self.num_loss_tokens),
            num_teacher_rows=rows if self._identity.top_k is not None else (0,) * len(lengths),
            quarantined=tuple(self.quarantined),
        )

    def _column(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if name not in self._columns:
            self._columns[name] = rows.new_empty((self._num_tokens, *rows.shape[1:]))
        return self._columns[name]

    def _encode(self, sample: Sample) -> dict[str, torch.Tensor]:
        out = {
            "token_ids": sample.token_ids_T.cpu().to(id_dtype(self._identity.vocab_size)),
            "loss_mask": sample.loss_mask_T.cpu().to(torch.uint8),
        }
        out |= {f"hidden.{name}": rows for name, rows in self._codec.encode(sample.hidden_TD).items()}
        if sample.taps_TLD is not None:
            out |= {f"taps.{name}": rows for name, rows in self._codec.encode(sample.taps_TLD).items()}
        return out

    def _check_shapes(self, sample: Sample) -> None:
        identity, where = self._identity, f"sample {sample.sample_id!r}"
        width = sample.hidden_TD.shape[1]
        assert width == identity.hidden_size, f"{where}: expected hidden size {identity.hidden_size}, found {width}"
        num_taps = 0 if sample.taps_TLD is None else sample.taps_TLD.shape[1]
        assert num_taps == identity.num_taps, f"{where}: expected {identity.num_taps} tapped layers, found {num_taps}"
        low, high = int(sample.token_ids_T.min()), int(sample.token_ids_T.max())
        assert 0 <= low and high < identity.vocab_size, f"{where}: expected token ids below {identity.vocab_size}, found {low} to {high}"
        assert (sample.teacher is None) == (identity.top_k is None), f"{where}: expected a teacher exactly where top_k is set"
        if sample.teacher is None:
            return
        rows, ids = sample.teacher.row_M, sample.teacher.ids_MC
        assert ids.shape[1] == identity.top_k, f"{where}: expected {identity.top_k} candidates, found {ids.shape[1]}"
        if len(rows):
            assert 0 <= int(rows[0]) and int(rows[-1]) < sample.num_tokens and bool((rows.diff() > 0).all()), (
                f"{where}: teacher rows {rows}"
            )
            assert 0 <= int(ids.min()) and int(ids.max()) < identity.vocab_size, f"{where}: teacher ids outside the vocabulary"


def _non_finite(codec: Codec, encoded: dict[str, torch.Tensor], sample: Sample) -> str | None:
    """Why a sample must not be trained on, checked on the numbers as a reader would get them; None where it is fine."""
    decoded = {
        group: codec.decode({name.removeprefix(f"{group}."): rows for name, rows in encoded.items() if name.startswith(f"{group}.")})
        for group in ("hidden", "taps")
        if any(name.startswith(f"{group}.") for name in encoded)
    }
    if sample.teacher is not None:
        decoded["teacher.log_probs"] = sample.teacher.log_probs_MC.to(_LOG_PROB_DTYPE)
        decoded["teacher.log_sum_exp"] = sample.teacher.log_sum_exp_M
    for name, values in decoded.items():
        finite = torch.isfinite(values)
        if not finite.all():
            bad = (~finite).reshape(len(values), -1)
            rows = bad.any(dim=1)
            return f"{name}: {int(bad.sum())} non-finite numbers in {int(rows.sum())} rows, the first at row {int(rows.nonzero()[0])}"
    return None


class OpenShard:
    """A memory-mapped shard; ``sample(i)`` copies the small columns and maps the vectors."""

    def __init__(self, *, path: Path, info: ShardInfo, identity: CacheIdentity) -> None:
        from safetensors import SafetensorError, safe_open

        self._info = info
        self._codec = codec_for(identity.codec)
        try:
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(f"{path}: expected a safetensors file, found {error}; delete it and rerun precompute") from error
        if found != metadata(identity):
            raise ValueError(f"{path}: expected metadata {metadata(identity)}, found {found}; delete it and rerun precompute")
        self._bounds = self._ends("bounds", info.lengths, path=path)
        self._teacher_bounds = None if identity.top_k is None else self._ends("teacher.bounds", info.num_teacher_rows, path=path)

    def _ends(self, name: str, counts: tuple[int, ...], *, path: Path) -> list[int]:
        """A column of bounds, compared with what the manifest says; a shard that lost all its samples has none."""
        expected = [0]
        for count in counts:
            expected.append(expected[-1] + count)
        found = self._tensors[name].tolist() if name in self._tensors else [0]
        if found != expected:
            raise ValueError(f"{path}: {name} do not agree with the manifest; delete the shard and rerun precompute")
        return expected

    def _vectors(self, group: str, start: int, stop: int) -> torch.Tensor | None:
        stored = {name.removeprefix(f"{group}."): rows[start:stop] for name, rows in self._tensors.items() if name.startswith(f"{group}.")}
        return self._codec.decode(stored) if stored else None

    def _teacher(self, number: int) -> Teacher | None:
        if self._teacher_bounds is None:
            return None
        rows = slice(self._teacher_bounds[number], self._teacher_bounds[number + 1])
        return Teacher(
            row_M=self._tensors["teacher.row"][rows].to(torch.int64),
            ids_MC=self._tensors["teacher.ids"][rows].to(torch.int64),
            log_probs_MC=self._tensors["teacher.log_probs"][rows].to(torch.float32),
            log_sum_exp_M=self._tensors["teacher.log_sum_exp"][rows],
        )

    def sample(self, number: int) -> Sample:
        """Sample ``number`` of this shard."""
        start, stop = self._bounds[number], self._bounds[number + 1]
        hidden_TD = self._vectors("hidden", start, stop)
        assert hidden_TD is not None, self._info.name
        return Sample(
            sample_id=self._info.sample_ids[number],
            token_ids_T=self._tensors["token_ids"][start:stop].to(torch.int64),
            loss_mask_T=self._tensors["loss_mask"][start:stop].to(torch.bool),
            hidden_TD=hidden_TD,
            taps_TLD=self._vectors("taps", start, stop),
            teacher=self._teacher(number),
            category=self._info.categories[number],
        )
