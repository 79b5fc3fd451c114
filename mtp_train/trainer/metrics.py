"""Where a training run's numbers go: metrics.jsonl always, Weights & Biases where asked for."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtp_train.runtime import atomic_write_text, is_main, read_json_lines

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_run_id"
WandbMode = Literal["disabled", "offline", "online"]


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """``mode``: disabled; offline, which writes a folder that ``wandb sync`` uploads later; or online, which needs a key
    in the environment. ``project`` and ``name`` as wandb has them; ``name`` None lets wandb choose."""

    mode: WandbMode
    project: str
    name: str | None

    def __post_init__(self) -> None:
        if self.mode not in ("disabled", "offline", "online"):
            raise ValueError(f"wandb.mode: expected disabled, offline or online, found {self.mode!r}")


class Metrics:
    """Writes one JSON object per line, flushed line by line, from the main process only.

    On opening, lines of steps beyond ``resumed_step`` are dropped: the continued run writes them again.
    """

    def __init__(self, *, out: Path, wandb: WandbSettings, settings: Mapping[str, Any], resumed_step: int) -> None:
        self._stream = None
        self._wandb: Any = None
        if not is_main():
            return
        out.mkdir(parents=True, exist_ok=True)
        path = out / METRICS
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step] if path.exists() and resumed_step else []
        atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        if wandb.mode != "disabled":
            self._wandb = _open_wandb(out, wandb, settings)
        self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the run's whole length

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line. It has ``step`` and ``split``; numbers that are not finite are written as null."""
        if self._stream is None:
            return
        clean = _finite(dict(line))
        self._stream.write(json.dumps(clean) + "\n")
        self._stream.flush()
        if self._wandb is not None:
            split = clean["split"]
            flat = {f"{split}/{key}": value for key, value in _flat(clean).items() if key not in ("step", "split") and value is not None}
            self._wandb.log(flat, step=clean["step"])

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a killed run left half written is dropped."""
    return read_json_lines(path)


def _open_wandb(out: Path, settings: WandbSettings, config: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"wandb.mode: expected the package wandb for {settings.mode!r}, found none; "
            "install it (pip install wandb) or set wandb.mode=disabled"
        ) from None
    remembered = out / WANDB_ID
    run_id = remembered.read_text(encoding="utf-8").strip() if remembered.exists() else uuid.uuid4().hex[:8]
    run = wandb.init(
        project=settings.project, name=settings.name, mode=settings.mode, dir=str(out), id=run_id, resume="allow", config=dict(config)
    )
    atomic_write_text(remembered, run_id + "\n")
    return run


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return value


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            flat.update({f"{key}/{inner}": deeper for inner, deeper in _flat(entry).items()})
        elif isinstance(entry, list):
            flat.update({f"{key}/depth_{depth}": number for depth, number in enumerate(entry)})
        else:
            flat[key] = entry
    return flat
