"""What a served folder says about how an engine loads it: ``serve.json``, written by the exporter, read by the engine."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.runtime import read_json

SERVE = "serve.json"


@dataclass(frozen=True, kw_only=True)
class Served:
    """How vLLM loads a head. ``speculative_config`` holds ``method`` and ``model`` (and more where a method needs it);
    ``hf_overrides`` what must be changed in the target's config (None: nothing); ``plugin`` the package that must be
    installed where vLLM runs (None: stock vLLM)."""

    class_name: str
    speculative_config: dict[str, Any]
    hf_overrides: dict[str, Any] | None
    plugin: str | None
    target_path: str

    @property
    def command(self) -> str:
        """Ready to paste; the number of drafted tokens is the reader's to choose."""
        return serve_command(
            target=self.target_path,
            speculative_config={**self.speculative_config, "num_speculative_tokens": 3},
            hf_overrides=self.hf_overrides,
        )


def serve_command(*, target: str, speculative_config: dict[str, Any], hf_overrides: dict[str, Any] | None) -> str:
    """The ``vllm serve`` line."""
    parts = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative_config)]
    if hf_overrides is not None:
        parts += ["--hf-overrides", json.dumps(hf_overrides)]
    return shlex.join(parts)


def read_served(folder: Path) -> Served:
    """Read ``serve.json``; ``model`` becomes this folder, wherever it was moved.

    Errors: ValueError where the folder is not one that the vLLM exporter wrote.
    """
    if not (folder / SERVE).is_file():
        raise ValueError(f"{folder}: expected a folder written by exporter=vllm ({SERVE}), found none; run export exporter=vllm first")
    document = read_json(folder / SERVE)
    if document.get("engine") != "vllm":
        raise ValueError(f"{folder / SERVE}: expected an export for vllm, found one for {document.get('engine')!r}")
    return Served(
        class_name=document["class"],
        speculative_config={**document["speculative_config"], "model": str(folder.resolve())},
        hf_overrides=document["hf_overrides"],
        plugin=document["plugin"],
        target_path=document["target"],
    )
