"""How a vector of hidden states is stored: a codec turns it into one or more tensors and back.

A codec is a word in the cache's identity. Adding one is a class here and an entry in ``CODECS``; the shards keep each of
its tensors under ``hidden.<name>`` (and ``taps.<name>``), all with the tokens as their first axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

# Numbers of a block that stays in a CPU core's second-level cache while ``decode`` passes over it twice.
_BLOCK_NUMBERS = 2**18


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


class _Scaled(Codec):
    """One byte per number, and a bfloat16 scale for each group of ``group`` numbers (None: for the whole vector).

    A number is ``value x scale``; the scale maps the group's largest magnitude to ``largest``, the storage type's own. Without
    scales e4m3 would cut off at 448 and int8 at 127, and hidden states of real models have channels beyond both.
    A number that is not finite makes its group's scale, and so what is read back, not finite.
    """

    dtype = torch.bfloat16
    storage: ClassVar[torch.dtype]
    largest: ClassVar[float]
    group: ClassVar[int | None]

    def bytes_per_vector(self, size: int) -> float:
        return size + 2 * (1 if self.group is None else -(-size // self.group))

    def encode(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = vectors.detach().to(device="cpu", dtype=torch.float32)
        values = torch.empty(wide.shape, dtype=self.storage)
        parts = wide.split(self.group or wide.shape[-1], dim=-1)
        scale = torch.stack([part.abs().amax(-1) for part in parts], -1).div_(self.largest).to(torch.bfloat16)
        # Divided by the scale as it is stored, so that its rounding costs nothing; a group of zeros has scale 0, and stays 0.
        divisor = scale.float().masked_fill_(scale == 0, 1.0)
        for part, column, number in zip(parts, values.split(self.group or wide.shape[-1], dim=-1), divisor.unbind(-1), strict=True):
            column.copy_(self._rounded((part / number[..., None]).clamp_(-self.largest, self.largest)))
        return {"values": values, "scale": scale}

    def decode(self, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        values, scale = stored["values"], stored["scale"]
        out = torch.empty(values.shape, dtype=self.dtype)
        rows = max(1, _BLOCK_NUMBERS * len(values) // max(1, values.numel()))
        for first in range(0, len(values), rows):
            block = out[first : first + rows]
            block.copy_(values[first : first + rows])
            for part, number in zip(block.split(self.group or out.shape[-1], dim=-1), scale[first : first + rows].unbind(-1), strict=True):
                part.mul_(number[..., None])
        return out

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Fp8(_Scaled):
    """float8 e4m3 with a scale per vector: each number to 3 bits of mantissa, 1/16 of itself at most, or, where it is small, 1/458,752 of
    the vector's largest."""

    word = "fp8"
    storage = torch.float8_e4m3fn
    largest = 448.0
    group = None


class Int8(_Scaled):
    """int8 with a scale per 64 numbers: each number to 1/254 of the largest in its group."""

    word = "int8"
    storage = torch.int8
    largest = 127.0
    group = 64

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.round_()


CODECS: dict[str, Codec] = {codec.word: codec for codec in (Bf16(), Float32(), Fp8(), Int8())}


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
