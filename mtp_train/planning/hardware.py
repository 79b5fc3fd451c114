"""A machine as a plan sees it: its devices, their memory and rates, its disk, and what an hour of it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, cast, get_args

from mtp_train.quantity import parse_bytes
from mtp_train.trainer.settings import Precision

Kind = Literal["gpu", "cpu"]
FlopsDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """``num_devices`` alike, each with ``memory_bytes`` (of which ``usable_share`` is ours), ``flops_per_s`` in dense
    products of ``flops_dtype``, ``memory_bytes_per_s`` to its memory and ``link_bytes_per_s`` to the others, one way; a disk that all
    share; ``usd_per_hour`` of the whole machine, None where no price is given. ``source`` says where the figures come from."""

    name: str
    device: str
    kind: Kind
    num_devices: int
    memory_bytes: int
    usable_share: float
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    disk_bytes: int
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    usd_per_hour: float | None
    source: str
    flops_dtype: FlopsDtype = "bfloat16"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"hardware.kind: expected gpu or cpu, found {self.kind!r}")
        if self.flops_dtype not in get_args(FlopsDtype):
            raise ValueError(f"hardware.flops_dtype: expected bfloat16 or float32, found {self.flops_dtype!r}")
        if self.num_devices < 1 or not 0 < self.usable_share <= 1:
            raise ValueError(
                f"hardware: expected num_devices of at least 1 and usable_share up to 1, found {self.num_devices} and {self.usable_share}"
            )
        for field in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"hardware.{field}: expected above 0, found {getattr(self, field)}")
        if self.usd_per_hour is not None and not 0 <= self.usd_per_hour < math.inf:
            raise ValueError(f"hardware.usd_per_hour: expected 0 or more, or null, found {self.usd_per_hour}")

    @property
    def own_precision(self) -> Precision:
        """What ``flops_per_s`` is of, in train's words."""
        return "bf16" if self.flops_dtype == "bfloat16" else "fp32"

    def precision(self, asked: str) -> Precision:
        """Of a training that was asked for: ``auto`` comes to the machine's own. ValueError for a word that is none."""
        if asked == "auto":
            return self.own_precision
        for known in get_args(Precision):
            if asked == known:
                return cast(Precision, known)
        raise ValueError(f"precision: expected auto, bf16 or fp32, found {asked!r}")

    @property
    def usable_bytes(self) -> int:
        """Of one device's memory."""
        return int(self.memory_bytes * self.usable_share)

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Hardware:
        """From settings in which sizes and rates may be written as people do (80GB). ValueError names a key that is wrong."""
        names = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if not required <= settings.keys() <= names:
            missing, unknown = sorted(required - settings.keys()), sorted(settings.keys() - names)
            raise ValueError(f"hardware: expected the settings {sorted(names)}, found missing {missing}, unknown {unknown}")
        sizes = {name: parse_bytes(settings[name], where=f"hardware.{name}") for name in names if "_bytes" in name}
        price = settings["usd_per_hour"]
        return cls(**{**settings, **sizes, "usd_per_hour": None if price is None else float(price)})
