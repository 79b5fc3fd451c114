"""What a served folder says about how an engine loads it: ``serve.json``, written by the exporter, read by the engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.runtime import atomic_write_json, read_json

SERVE = "serve.json"


@dataclass(frozen=True, kw_only=True)
class Served:
    """How vLLM loads a head. ``speculative_config`` holds ``method`` and ``model`` (and more where a method needs it);
    ``hf_overrides`` what must be changed in the target's config (None: nothing); ``plugin`` the package that must be
    installed where vLLM runs (None: stock vLLM); ``max_speculative_tokens`` how many drafts it can give (None: any number)."""

    class_name: str
    speculative_config: dict[str, Any]
    hf_overrides: dict[str, Any] | None
    plugin: str | None
    target_path: str
    max_speculative_tokens: int | None = None

    @property
    def first_speculative_tokens(self) -> int:
        """The number of drafted tokens to start with: it is the reader's to choose, since what pays depends on engine and load."""
        return min(3, self.max_speculative_tokens or 3)

    @property
    def command(self) -> str:
        """Ready to paste, with ``first_speculative_tokens``."""
        return serve_command(
            target=self.target_path,
            speculative_config={**self.speculative_config, "num_speculative_tokens": self.first_speculative_tokens},
            hf_overrides=self.hf_overrides,
            flags=(),
        )


def serve_command(*, target: str, speculative_config: dict[str, Any], hf_overrides: dict[str, Any] | None, flags: Sequence[str]) -> str:
    """The ``vllm serve`` line; ``flags`` are further words of it."""
    parts = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative_config)]
    if hf_overrides is not None:
        parts += ["--hf-overrides", json.dumps(hf_overrides)]
    return shlex.join([*parts, *flags])


def read_served(folder: Path) -> Served:
    """Read ``serve.json``. A ``model`` of ``.`` is this folder, wherever it was moved; ngram has none, draft_model another's.

    Errors: ValueError where the folder is not one that the vLLM exporter wrote.
    """
    if not (folder / SERVE).is_file():
        raise ValueError(f"{folder}: expected a folder written by exporter=vllm ({SERVE}), found none; run export exporter=vllm first")
    document = read_json(folder / SERVE)
    if document.get("engine") != "vllm":
        raise ValueError(f"{folder / SERVE}: expected an export for vllm, found one for {document.get('engine')!r}")
    speculative = dict(document["speculative_config"])
    if speculative.get("model") == ".":
        speculative["model"] = str(folder.resolve())
    return Served(
        class_name=document["class"],
        speculative_config=speculative,
        hf_overrides=document["hf_overrides"],
        plugin=document["plugin"],
        target_path=document["target"],
        max_speculative_tokens=document.get("max_speculative_tokens"),  # folders written before there was one have none
    )


def write_served(folder: Path, served: Served) -> None:
    """Write ``serve.json``: an exporter's last word, or all there is for a method without weights of its own (ngram)."""
    atomic_write_json(
        folder / SERVE,
        {
            "engine": "vllm",
            "class": served.class_name,
            "speculative_config": served.speculative_config,
            "hf_overrides": served.hf_overrides,
            "plugin": served.plugin,
            "target": served.target_path,
            "max_speculative_tokens": served.max_speculative_tokens,
            "command": served.command,
        },
    )
