"""A machine as a plan sees it: its devices, their memory and rates, its disk, and what an hour of it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from mtp_train.quantity import parse_bytes

Kind = Literal["gpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """``num_devices`` alike, each with ``memory_bytes`` (of which ``usable_share`` is ours), ``flops_per_s`` in dense bfloat16
    products, ``memory_bytes_per_s`` to its memory and ``link_bytes_per_s`` to the others, one way; a disk that all share;
    ``usd_per_hour`` of the whole machine, None where no price is given. ``source`` says where the figures come from."""

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

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"hardware.kind: expected gpu or cpu, found {self.kind!r}")
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
    def usable_bytes(self) -> int:
        """Of one device's memory."""
        return int(self.memory_bytes * self.usable_share)

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Hardware:
        """From settings in which sizes and rates may be written as people do (80GB). ValueError names a key that is wrong."""
        names = {field.name for field in fields(cls)}
        if settings.keys() != names:
            missing, unknown = sorted(names - settings.keys()), sorted(settings.keys() - names)
            raise ValueError(f"hardware: expected the settings {sorted(names)}, found missing {missing}, unknown {unknown}")
        sizes = {name: parse_bytes(settings[name], where=f"hardware.{name}") for name in names if "_bytes" in name}
        price = settings["usd_per_hour"]
        return cls(**{**settings, **sizes, "usd_per_hour": None if price is None else float(price)})
