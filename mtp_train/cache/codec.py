"""How a vector of hidden states is stored: a codec turns it into one or more tensors and back.

A codec is a word in the cache's identity. Adding one is a class here and an entry in ``CODECS``; the shards keep each of
its tensors under ``hidden.<name>`` (and ``taps.<name>``), all with the tokens as their first axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Codec(ABC):
    """Stores vectors along the last axis."""

    word: ClassVar[str]
    dtype: ClassVar[torch.dtype]  # what ``decode`` returns

    @abstractmethod
    def bytes_per_vector(self, size: int) -> float:
        """Bytes that one vector of ``size`` numbers takes."""

    @abstractmethod
    def encode(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """(..., D) of any float dtype -> tensors on the CPU whose leading axes are those of ``vectors``."""

    @abstractmethod
    def decode(self, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        """What ``encode`` made, or rows of it -> (..., D) in ``dtype``. No copy where the codec needs none."""


class _Cast(Codec):
    """One number stored as one number of ``dtype``."""

    def bytes_per_vector(self, size: int) -> float:
        return size * self.dtype.itemsize

    def encode(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"values": vectors.detach().to(device="cpu", dtype=self.dtype)}

    def decode(self, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        return stored["values"]


class Bf16(_Cast):
    """bfloat16: exact where the engine computes in it, rounded to 8 bits of mantissa otherwise."""

    word = "bf16"
    dtype = torch.bfloat16


class Float32(_Cast):
    """float32: exact for every engine; for proofs, and twice the size."""

    word = "float32"
    dtype = torch.float32


CODECS: dict[str, Codec] = {codec.word: codec for codec in (Bf16(), Float32())}


def codec_for(word: str) -> Codec:
    """The codec of that word; ValueError lists those that exist."""
    if word not in CODECS:
        raise ValueError(f"codec: expected one of {sorted(CODECS)}, found {word!r}")
    return CODECS[word]


def id_dtype(vocab_size: int) -> torch.dtype:
    """How token ids are stored: 2 bytes where the vocabulary fits (up to 65536), else 4."""
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


def bytes_per_token(*, codec: str, hidden_size: int, num_taps: int, vocab_size: int, top_k: int | None, answer_share: float) -> float:
    """Cache bytes per token (README.md, Size): vectors + token id + mask + teacher rows x ``answer_share``.

    ``answer_share`` is the share of tokens that the target wrote itself (each has one teacher row). Headers, bounds and
    the JSON files are left out: a few bytes per token at most on samples of useful length.
    """
    id_bytes = id_dtype(vocab_size).itemsize
    vectors = codec_for(codec).bytes_per_vector(hidden_size) * (1 + num_taps)
    # A teacher row: position int32, log-sum-exp float32, and per candidate its id and a float16.
    teacher = 0.0 if top_k is None else answer_share * (top_k * (id_bytes + 2) + 8)
    return vectors + id_bytes + 1 + teacher
