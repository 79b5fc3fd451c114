"""``exporter=vllm``: a head as the folder that stock vLLM serves, or our plugin where no stock class has its graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from mtp_train.exporter.base import Exporter, ExportResult, Source, finished_export, identity_of, publishing, read_source
from mtp_train.exporter.proof import same_tensors
from mtp_train.exporter.served import SERVE
from mtp_train.exporter.vllm_classes import MORE_BLOCKS
from mtp_train.exporter.vllm_draft_model import DraftModelForm
from mtp_train.exporter.vllm_form import WEIGHTS, Form
from mtp_train.exporter.vllm_layer import LayerForm
from mtp_train.exporter.vllm_medusa import MedusaForm
from mtp_train.runtime import read_json

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class VllmExporter(Exporter):
    """Writes ``model.safetensors``, ``config.json``, ``serve.json`` and a README. Settings: ``conf/exporter/vllm.yaml``."""

    word = "vllm"

    def __init__(self, *, dtype: Literal["float32", "bfloat16"], allow_plugin: bool, trust_remote_code: bool, overwrite: bool) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"exporter.dtype: expected one of {tuple(_DTYPES)}, found {dtype!r}")
        self.dtype, self.allow_plugin, self.trust_remote_code, self.overwrite = dtype, allow_plugin, trust_remote_code, overwrite

    def export(self, checkpoint: Path, target_path: Path, out: Path) -> ExportResult:
        source = read_source(checkpoint, target_path)
        form = self._form(source)
        identity = identity_of(source, word=self.word, settings={"dtype": self.dtype, "class": form.class_name})
        finished = finished_export(out, identity=identity)
        if finished is not None:
            return finished
        with publishing(out, identity=identity, overwrite=self.overwrite) as publication:
            tensors = form.tensors(dtype=_DTYPES[self.dtype])
            form.write(publication.folder, tensors=tensors, config=form.config(dtype=self.dtype))
            publication.proof = self._prove(form, tensors, publication.folder)
            publication.serve = read_json(publication.folder / SERVE)["command"]
        assert publication.result is not None
        return publication.result

    def _form(self, source: Source) -> Form:
        """How vLLM reads the head. Errors: ValueError where none of its classes, and not our plugin, computes its graph."""
        settings, method = source.head["settings"], source.head["method"]
        if settings.get("num_blocks", 1) > 1:
            raise ValueError(
                f"exporter=vllm: expected a head of one block, found num_blocks={settings['num_blocks']}; {MORE_BLOCKS}: decode with "
                "engine=hf, or export with exporter=hf"
            )
        if settings.get("projection_bias"):
            raise ValueError(
                "exporter=vllm: expected a projection without a bias, as every class of vLLM 0.32 and our plugin have it, found one with: "
                "decode with engine=hf, export with exporter=hf, or train with head.projection_bias=false"
            )
        if source.head["hidden_state"] != "post_norm":
            raise ValueError(
                f"exporter=vllm: expected a head that reads post_norm hidden states, as vLLM hands them out, "
                f"found {source.head['hidden_state']!r}"
            )
        if method == "medusa":
            return MedusaForm(source)
        if method == "draft_model":
            return DraftModelForm(source)
        if method not in ("mtp", "eagle", "eagle3") or "norms" not in settings:
            raise ValueError(
                f"exporter=vllm: expected a head of method mtp, eagle or eagle3 with its norms stated, medusa or draft_model, "
                f"found {method!r} ({source.head['head']}); see conf/exporter for the formats that hold others"
            )
        return LayerForm(source, allow_plugin=self.allow_plugin, trust_remote_code=self.trust_remote_code)

    def _prove(self, form: Form, written: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
        """Read the folder back and run it through the class's graph: it must say what the trained head said."""
        from safetensors.torch import load_file

        from mtp_train.exporter.proof import prove, read_probe

        read = load_file(folder / WEIGHTS)
        same_tensors(written, read)
        graph, tensors = form.graph(read)
        return prove(graph, tensors, read_probe(form.source.checkpoint), dtype=self.dtype)
