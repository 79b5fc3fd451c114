"""Measures the head in training by real speculative decoding, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.acceptance.report_data import Measurement, part_from_json
from mtp_train.commandline import quoted
from mtp_train.orphan import PARENT
from mtp_train.runtime import environment_apart, log, read_json

_SHOWN_LOG_CHARACTERS = 400
_NAME = "training"


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """``validation.decode`` of ``conf/train.yaml``, without ``every``. ``overrides`` are further settings of ``evaluate``,
    as one would type them (``engine.dtype=float32``); ``devices`` becomes CUDA_VISIBLE_DEVICES of the process (None: as
    the training's); ``timeout_s`` ends an evaluation that hangs."""

    engine: str
    prompt_set: str
    limit: int
    max_new_tokens: int
    num_speculative_tokens: int
    overrides: tuple[str, ...]
    devices: str | int | None
    timeout_s: float

    def __post_init__(self) -> None:
        for name in ("limit", "max_new_tokens", "num_speculative_tokens", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"validation.decode.{name}: expected more than 0, found {getattr(self, name)}")
        for word in self.overrides:
            if "=" not in word and not word.startswith("~"):
                raise ValueError(f"validation.decode.overrides: expected settings such as engine.dtype=float32, found {word!r}")


class MeasuredAcceptance:
    """Call it with a step and a folder that holds that step's head: it starts ``python -m mtp_train.evaluate`` there.

    ``target`` are the words that choose the target on a command line. ``prepare(folder)`` writes what an exporter needs
    beside the head (the probe). A failed evaluation is said and counted, and training goes on.
    """

    def __init__(self, *, settings: DecodeSettings, target: Mapping[str, Any], prepare: Callable[[Path], None]) -> None:
        self._settings, self._target, self._prepare = settings, dict(target), prepare
        self.num_failed = 0

    def __call__(self, step: int, folder: Path) -> dict[str, Any]:
        """``acceptance_length``, ``acceptance_per_position`` and what they were measured on; ``failure`` instead, in words."""
        try:
            self._prepare(folder)
            return self._figures(self._evaluate(folder))
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            self.num_failed += 1
            log(f"the head of step {step} could not be measured ({self.num_failed} failed so far), training goes on: {error}")
            return {"acceptance_length": None, "failure": str(error)}

    def _evaluate(self, folder: Path) -> Measurement:
        out, words = folder / "report", self.command(folder)
        # Killed with the training: it would be in the way of the one that the continued training starts.
        environment = environment_apart() | {PARENT: str(os.getpid())}
        if self._settings.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(self._settings.devices)
        with open(folder / "log.txt", "wb") as stream:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment,
                timeout=self._settings.timeout_s,
                check=False,
            )
        if done.returncode != 0:
            wrote = " ".join((folder / "log.txt").read_text(encoding="utf-8", errors="replace").split())[-_SHOWN_LOG_CHARACTERS:]
            raise ValueError(f"evaluate: expected exit status 0, found {done.returncode}; {folder / 'log.txt'} ends with: {wrote}")
        return part_from_json(Measurement, read_json(out / "pieces" / _NAME / "project.greedy.json")["measurement"])

    def command(self, folder: Path) -> list[str]:
        """The command line of the measuring process: greedy, one prompt set, nothing but the count."""
        settings = self._settings
        return [
            sys.executable,
            "-m",
            "mtp_train.evaluate",
            "target=local",
            *(f"target.{key}={quoted(value)}" for key, value in self._target.items()),
            f"engine={settings.engine}",
            f"benchmark@prompt_sets.project={settings.prompt_set}",
            f"prompt_sets.project.limit={settings.limit}",
            f"name={_NAME}",
            f"run={quoted(folder)}",
            f"checkpoint={quoted(folder)}",
            f"out={quoted(folder / 'report')}",
            f"max_new_tokens={settings.max_new_tokens}",
            f"decoding.num_speculative_tokens={settings.num_speculative_tokens}",
            "~ways.sampled",
            "ways.greedy.prompt_sets=[project]",
            "ways.greedy.plain=false",
            "ways.greedy.estimate=false",
            "identity.num_prompts=0",
            "num_shown=0",
            *settings.overrides,
        ]

    def _figures(self, measurement: Measurement) -> dict[str, Any]:
        acceptance = measurement.acceptance
        return {
            "acceptance_length": acceptance.acceptance_length(),
            "acceptance_per_position": acceptance.rate_per_position(),
            "num_prompts": len(acceptance.prompts),
            "num_drafts": acceptance.num_drafts,
            "prompt_set": self._settings.prompt_set,
            "measured_by": acceptance.measured_by,
            "engine_version": acceptance.engine_version,
            "dtype": acceptance.dtype,
        }
