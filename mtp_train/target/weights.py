"""The target's weights that a head shares: embedding, final norm and lm_head, read without building the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mtp_train.target.files import read_model_config, read_tensor, tensor_files

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class SharedWeights:
    """Frozen weights of the target. Where it ties them, ``lm_head_VD`` is ``embedding_VD`` itself, the same storage."""

    embedding_VD: torch.Tensor
    lm_head_VD: torch.Tensor
    final_norm_weight_D: torch.Tensor
    rms_norm_eps: float

    def __post_init__(self) -> None:
        if self.embedding_VD.shape != self.lm_head_VD.shape:
            raise ValueError(
                f"target weights: expected embedding and lm_head of one shape, found {tuple(self.embedding_VD.shape)} "
                f"and {tuple(self.lm_head_VD.shape)}; heads need the whole vocabulary on both sides"
            )

    @property
    def tied(self) -> bool:
        return self.lm_head_VD.data_ptr() == self.embedding_VD.data_ptr()

    def to(self, *, device: torch.device | str, dtype: torch.dtype) -> SharedWeights:
        """The same weights on another device or in another dtype, still tied where they are tied."""
        embedding = self.embedding_VD.to(device, dtype)
        return replace(
            self,
            embedding_VD=embedding,
            lm_head_VD=embedding if self.tied else self.lm_head_VD.to(device, dtype),
            final_norm_weight_D=self.final_norm_weight_D.to(device, dtype),
        )


def read_shared(path: Path) -> SharedWeights:
    """Read the shared weights from a model folder, memory-mapped, in the dtype they are stored in.

    Of a quantized target too: schemes keep embedding, norms and lm_head in floats unless told otherwise, and engines take
    them from these tensors. Errors: ValueError where a tensor is missing, under the names of a Llama-shaped model, or is
    stored quantized.
    """
    config = read_model_config(path)
    files = tensor_files(path)
    embedding = _read_floats(files, EMBEDDING)
    tied = LM_HEAD not in files if config.get("tie_word_embeddings") is None else bool(config["tie_word_embeddings"])
    return SharedWeights(
        embedding_VD=embedding,
        lm_head_VD=embedding if tied else _read_floats(files, LM_HEAD),
        final_norm_weight_D=_read_floats(files, FINAL_NORM),
        rms_norm_eps=float(config["rms_norm_eps"]),
    )


def read_layer(path: Path, layer_index: int) -> dict[str, torch.Tensor]:
    """One decoder layer's tensors by their names inside the layer (``self_attn.q_proj.weight``)."""
    files = tensor_files(path)
    prefix = f"model.layers.{layer_index}."
    names = [name for name in files if name.startswith(prefix)]
    if not names:
        layers = {name.split(".")[2] for name in files if name.startswith("model.layers.")}
        raise ValueError(f"{path}: expected tensors under {prefix}, found none; the model has {len(layers)} layers")
    return {name.removeprefix(prefix): _read_floats(files, name) for name in names}


def read_floats(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder by their names. ValueError where one is stored quantized."""
    files = tensor_files(path)
    return {name: _read_floats(files, name, remedy="begin from a checkpoint that is not quantized") for name in files}


_SHARED_REMEDY = (
    "heads share the target's embedding and lm_head as they are: use a target that leaves them out of its quantization "
    "(a head whose layer begins as the target's needs that layer in floats too: choose head.init=random)"
)


def _read_floats(files: dict[str, Path], name: str, *, remedy: str = _SHARED_REMEDY) -> torch.Tensor:
    """A tensor that is what it says. The integers, or 8-bit floats, of a quantized one mean nothing without their scales."""
    tensor = read_tensor(files, name)
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{files[name]}: expected {name} in float32, bfloat16 or float16, found {tensor.dtype}, quantized; {remedy}")
    return tensor
