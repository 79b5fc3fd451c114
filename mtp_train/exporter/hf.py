"""``exporter=hf``: a head as plain config.json and model.safetensors, which any reader can rebuild from its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_train.exporter.base import Exporter, ExportResult, Rename, Source, finished_export, identity_of, publishing, read_source, rename
from mtp_train.exporter.card import card
from mtp_train.exporter.draft_model import DRAFT_MODEL_TABLE, STATED, causal_lm_config, draft_model_card
from mtp_train.exporter.eagle3 import EAGLE3_TABLE, with_offsets
from mtp_train.exporter.graph import Graph, PairGraph
from mtp_train.exporter.graph_draft_model import DraftModelGraph
from mtp_train.exporter.graph_eagle3 import Eagle3Graph
from mtp_train.exporter.graph_medusa import MEDUSA_TABLE, MedusaGraph
from mtp_train.exporter.proof import prove, read_probe, same_tensors
from mtp_train.runtime import atomic_write_json, atomic_write_text, read_json
from mtp_train.target.weights import SharedWeights, read_shared

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FORMAT_VERSION = 1
_BLOCK = (
    Rename("embed_norm.weight", "embed_norm.weight"),
    Rename("hidden_norm.weight", "hidden_norm.weight"),
    Rename("projection.*", "fc.*"),
    Rename("decoder.layer.*", "layers.0.*"),
    Rename("output_norm.weight", "norm.weight"),
)


def pair_table(num_blocks: int) -> tuple[Rename, ...]:
    """The renames of a pair head's tensors: later blocks, which head.safetensors counts from 0, are blocks.1 and on here."""
    later = (Rename(f"later_blocks.{k - 1}.{row.ours}", f"blocks.{k}.{row.theirs}") for k in range(1, num_blocks) for row in _BLOCK)
    return (*_BLOCK, *later)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How heads of one graph are written: ``settings`` and ``norms`` (None: it has none) are what head.json must state of them."""

    model_type: str
    architecture: str
    graph: type[Graph]
    table: Callable[[int], tuple[Rename, ...]]  # by the number of blocks
    settings: tuple[str, ...]
    norms: frozenset[str] | None


_PAIR = _Layout(
    model_type="mtp_train_pair",
    architecture="MtpTrainPairHead",
    graph=PairGraph,
    table=pair_table,
    settings=("norms", "column_order", "zero_first_embedding"),
    norms=frozenset({"embed", "hidden", "input", "output", "feedback"}),
)
_EAGLE3 = _Layout(
    model_type="mtp_train_eagle3",
    architecture="MtpTrainEagle3Head",
    graph=Eagle3Graph,
    table=lambda _: EAGLE3_TABLE,
    settings=("norms", "target_layer_ids", "draft_vocab_size"),
    norms=frozenset({"taps", "feedback"}),
)
_MEDUSA = _Layout(
    model_type="mtp_train_medusa",
    architecture="MtpTrainMedusaHead",
    graph=MedusaGraph,
    table=lambda _: MEDUSA_TABLE,
    settings=("num_heads", "num_layers", "own_lm_heads"),
    norms=None,
)
_DRAFT_MODEL = _Layout(  # under its own model_type and architecture: any reader of causal LMs loads it
    model_type="causal_lm",
    architecture="",
    graph=DraftModelGraph,
    table=lambda _: DRAFT_MODEL_TABLE,
    settings=("config",),
    norms=None,
)
_LAYOUTS = {"mtp": _PAIR, "eagle": _PAIR, "eagle3": _EAGLE3, "medusa": _MEDUSA, "draft_model": _DRAFT_MODEL}


class HfExporter(Exporter):
    """float32 weights under readable names, with the target's config for the layer. Embedding and a shared lm_head are the
    target's own and not shipped. ``overwrite``: whether another head's export in the same folder may be replaced.
    ``trust_remote_code`` must be off: the layer is rebuilt from config.json by transformers' own classes alone."""

    word = "hf"

    def __init__(self, *, overwrite: bool, trust_remote_code: bool) -> None:
        if trust_remote_code:
            raise ValueError(
                "exporter=hf: expected a target whose architecture transformers knows, found trust_remote_code=true; "
                "this format carries no code: choose exporter=vllm"
            )
        self.overwrite = overwrite

    def export(self, checkpoint: Path, target_path: Path, out: Path) -> ExportResult:
        source = read_source(checkpoint, target_path)
        config = exported_config(source)
        layout = _LAYOUTS.get(source.head["method"], _PAIR)
        identity = identity_of(source, word=self.word, settings={"format_version": FORMAT_VERSION})
        finished = finished_export(out, identity=identity)
        if finished is not None:
            return finished
        num_blocks = config.get("num_blocks", 1)
        tensors = {name: tensor.contiguous() for name, tensor in rename(with_offsets(source), layout.table(num_blocks)).items()}
        with publishing(out, identity=identity, overwrite=self.overwrite) as publication:
            _write(publication.folder, config, tensors)
            read_config, read = _read(publication.folder)
            if read_config != config:
                raise ValueError(f"export: expected {CONFIG} as it was written, found another; the disk or the writer damaged it")
            same_tensors(tensors, read)
            graph = layout.graph(config=read_config, tensors=read, shared=read_shared(target_path))
            publication.proof = prove(graph, read, read_probe(checkpoint), dtype="float32")
            publication.serve = f'mtp_train.exporter.hf.load_exported(Path("{out}"), target_path=Path("{target_path}"))'
            described = (draft_model_card if layout is _DRAFT_MODEL else card)(source, config, proof=publication.proof, tensors=read)
            atomic_write_text(publication.folder / CARD, described)
        assert publication.result is not None
        return publication.result


def exported_config(source: Source) -> dict[str, Any]:
    """config.json: the graph's switches, and the target's config for the layer's sizes, rotary embedding and norms.

    Errors: ValueError where the head is of no graph that this format holds.
    """
    head = source.head
    layout, settings = _LAYOUTS.get(head["method"], _PAIR), head["settings"]
    missing = [key for key in layout.settings if key not in settings]
    if missing or (layout.norms is not None and set(settings["norms"]) != layout.norms):
        raise ValueError(
            f"exporter=hf: expected one of {sorted(_LAYOUTS)}, whose settings state {layout.settings} and the norms "
            f"{sorted(layout.norms or ())}, found {head['head']!r} without {missing or 'all of the norms'}; this format does not hold it"
        )
    if head["hidden_state"] != "post_norm":
        raise ValueError(
            f"exporter=hf: expected a head that reads post_norm hidden states, found {head['hidden_state']!r}; retrain it on them"
        )
    if layout is _DRAFT_MODEL:
        return causal_lm_config(source, dtype="float32")
    return {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "format_version": FORMAT_VERSION,
        "dtype": "float32",
        "head": head["head"],
        "method": head["method"],
        "hidden_state": head["hidden_state"],
        **{key: settings[key] for key in (*layout.settings, "num_blocks", "projection_bias") if key in settings},
        "target": head["target"],
        "target_config": source.target_config,
        "head_weights_sha256": head["weights_sha256"],
    }


def load_exported(path: Path, *, target_path: Path, shared: SharedWeights | None = None) -> Graph:
    """Rebuild an exported head's graph; the target's folder gives embedding and lm_head (or ``shared`` does).

    Errors: ValueError where the folder is no such export, or was made for another target.
    """
    config, tensors = _read(path)
    stated = config.get(STATED)
    layout = {layout.model_type: layout for layout in _LAYOUTS.values()}.get(str(config.get("model_type")))
    if isinstance(stated, dict):
        layout = _DRAFT_MODEL
    if layout is None or (stated or config).get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path / CONFIG}: expected an export by exporter=hf of format {FORMAT_VERSION}, found model_type {config.get('model_type')!r}"
        )
    return layout.graph(config=config, tensors=tensors, shared=read_shared(target_path) if shared is None else shared)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    atomic_write_json(folder / CONFIG, config)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder}: expected an export ({CONFIG} and {WEIGHTS}), found no {WEIGHTS}; run export exporter=hf first")
    return read_json(folder / CONFIG), load_file(folder / WEIGHTS)
