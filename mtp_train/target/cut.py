"""Makes a smaller model out of some of a model's own layers, as a draft model to be distilled where no smaller sibling exists.

The residual stream lets a decoder layer be left out at a loss (Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper
Layers", section 3); what is left speaks the same vocabulary, and distillation on the target's distributions mends a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mtp_train.target.files import read_model_config, read_tensor, tensor_files
from mtp_train.target.model_folder import is_there, write_model_folder

_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..+)$")
# Entries of a config.json with one value per layer, or that name layers by number: cut or refused, never left to disagree.
_PER_LAYER, _BY_NUMBER = ("layer_types",), ("no_rope_layers", "mlp_only_layers", "first_k_dense_replace")


def write_cut_model(source: Path, out: Path, *, layers: Sequence[int]) -> Path:
    """Write the model of ``source`` with only its ``layers`` (0-based, rising) to ``out``; one that is there is kept.

    Embedding, final norm, lm_head, tokenizer and template are the source's. Errors: ValueError for a layer that it does not have, a
    quantized model, one whose layers are told apart by number, or where ``out`` holds something else.
    """
    config = read_model_config(source)
    total = int(config["num_hidden_layers"])
    if list(layers) != sorted(set(layers)) or not layers or not 0 <= layers[0] <= layers[-1] < total:
        raise ValueError(f"layers: expected some of 0 to {total - 1}, each once and rising, found {list(layers)}")
    if config.get("quantization_config") is not None:
        raise ValueError(f"{source}: expected a model in floats, found a quantized one; cut its unquantized checkpoint")
    if odd := [key for key in _BY_NUMBER if config.get(key)]:
        raise ValueError(f"{source}: expected layers that are all alike, found {odd[0]}={config[odd[0]]!r}; such models are not cut yet")
    if is_there(out):
        return out
    place = {layer: number for number, layer in enumerate(layers)}
    files, tensors = tensor_files(source), {}
    for name in files:
        if (found := _LAYER.match(name)) is None:
            tensors[name] = read_tensor(files, name).clone()
        elif int(found[2]) in place:
            tensors[f"{found[1]}{place[int(found[2])]}{found[3]}"] = read_tensor(files, name).clone()
    cut = {key: [config[key][layer] for layer in layers] for key in _PER_LAYER if config.get(key)}
    return write_model_folder(out, source=source, tensors=tensors, config={**config, **cut, "num_hidden_layers": len(layers)})
