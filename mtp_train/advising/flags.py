"""The engines' own flags for an option, ready to paste, and what has to be done before."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtp_train.acceptance.report_way import NO_HEAD
from mtp_train.advising.options import Option
from mtp_train.exporter.base import MANIFEST
from mtp_train.exporter.served import SERVE, read_served, serve_command
from mtp_train.runtime import read_object

_NAME = "Put your target's path or hub id in the name's place."
# SGLang's word for how a head drafts, by the head's own; MTP heads draft as EAGLE's do.
_SGLANG = {"mtp": "EAGLE", "eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE"}


class Flags(NamedTuple):
    """``command`` None: it cannot be served so yet, and ``notes`` say what to do."""

    engine: str
    command: str | None
    notes: list[str]


def plain_flags(target: str) -> list[Flags]:
    """Without drafts."""
    return [
        Flags("vllm", shlex.join(["vllm", "serve", target]), [_NAME]),
        Flags("sglang", shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target]), ["Not run here.", _NAME]),
    ]


def flags(option: Option, *, run: Path, target: str, weights: str | None) -> list[Flags]:
    """For every engine that serves the option. ``run`` is the run's folder, where the head was exported to; ``target`` the name to serve
    where no export says where the target is; ``weights``: how the sha256 of the measured head's weights begins (None: not known)."""
    found = []
    if option.family.is_served("vllm"):
        found.append(_vllm(option, run, target, weights))
    if option.family.is_served("sglang"):
        found.append(_sglang(option, run, target))
    return [*found, _reference(option, run)]


def _settings(option: Option) -> Mapping[str, Any]:
    found: Mapping[str, Any] = option.measured[0].measurement.acceptance.notes.get("decoding", {})
    return found


def _vllm(option: Option, run: Path, target: str, weights: str | None) -> Flags:
    if option.family.decoding == "prompt_lookup":
        settings = _settings(option)
        config = {
            "method": "ngram",
            "num_speculative_tokens": option.num_speculative_tokens,
            "prompt_lookup_max": settings["max_ngram"],
            "prompt_lookup_min": settings["min_ngram"],
        }
        command = serve_command(target=target, speculative_config=config, hf_overrides=None, flags=())
        return Flags("vllm", command, [_NAME])
    folder = run / "served" / f"{option.family.head}-vllm"
    manifest = folder / MANIFEST
    exported = read_object(manifest, {"identity": dict}, remedy="export it again")["identity"] if manifest.is_file() else {}
    if not (folder / SERVE).is_file() or (
        weights is not None and not str(exported.get("head_weights_sha256", weights)).startswith(weights)
    ):
        words = shlex.join(["python", "-m", "mtp_train.export", f"run={run}", f"name={option.family.head}", "exporter=vllm"])
        return Flags("vllm", None, [f"Export the head that was measured, with the target's settings, and call advise again: {words}"])
    served = read_served(folder)
    config = {**served.speculative_config, "num_speculative_tokens": option.num_speculative_tokens}
    if option.family.draft_sampling == "probabilistic":  # its default is greedy
        config["draft_sample_method"] = "probabilistic"
    command = serve_command(target=served.target_path, speculative_config=config, hf_overrides=served.hf_overrides, flags=())
    notes = [] if served.plugin is None else [f"Served by our plugin: install {served.plugin} where vLLM runs."]
    return Flags("vllm", command, notes)


def _sglang(option: Option, run: Path, target: str) -> Flags:
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    k = option.num_speculative_tokens
    if option.family.decoding == "prompt_lookup":
        words += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(option.shape.num_verified)]
        return Flags("sglang", shlex.join(words), ["Not run here.", _NAME])
    width = option.shape.width if option.family.decoding == "dynamic_tree" else 1
    words += ["--speculative-algorithm", _SGLANG[option.family.word], "--speculative-draft-model-path", f"{option.family.head}-sglang"]
    words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", str(width)]
    words += ["--speculative-num-draft-tokens", str(option.shape.num_verified)]
    notes = [
        f"Not run here. {option.family.head}-sglang: the head under the names that SGLang's class wants, which no exporter writes yet."
    ]
    return Flags("sglang", shlex.join(words), [*notes, _NAME])


def _reference(option: Option, run: Path) -> Flags:
    """How to measure this very option again, in the reference engine."""
    family = option.family
    words = ["python", "-m", "mtp_train.evaluate", f"run={run}", f"decoding={family.decoding}"]
    if family.decoding not in NO_HEAD:
        words.append(f"name={family.head}")
    if family.decoding in ("chain", "prompt_lookup"):
        words.append(f"decoding.num_speculative_tokens={option.num_speculative_tokens}")
    elif family.decoding == "eagle_tree":
        levels = _settings(option)["nodes_per_depth"][: option.num_speculative_tokens]
        words.append(f"decoding.nodes_per_depth={str(levels).replace(' ', '')}")
    else:
        changed = {key: value for key, value in _settings(option).items() if key not in ("refresh", "from_prompt")}
        words += [f"decoding.{key}={value}" for key, value in changed.items()]
    return Flags(
        "hf",
        shlex.join(words),
        ["Measures it in the reference engine; add the target's settings, and those that the run was measured with."],
    )
