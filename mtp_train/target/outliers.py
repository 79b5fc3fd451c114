"""Makes a copy of a target whose last hidden states carry outlier channels, as large models' do, and whose logits are the same.

Large models keep a few channels at many times the size of all others (Sun et al. 2024, "Massive Activations in Large Language
Models", section 2). Here the final norm's weight of some channels is multiplied by a power of two and the lm_head's columns are
divided by it: every product is the same number, so that the logits, and the texts, stay what they were to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mtp_train.records import Sample
from mtp_train.target.files import read_model_config, read_tensor, tensor_files
from mtp_train.target.model_folder import is_there, write_model_folder
from mtp_train.target.weights import EMBEDDING, FINAL_NORM, LM_HEAD


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """Channels of the post-norm hidden state, and what each is multiplied by: a power of two, so that nothing is rounded."""

    channels: tuple[int, ...]
    factor: float

    def __post_init__(self) -> None:
        if not self.factor > 0 or math.frexp(self.factor)[0] != 0.5:
            raise ValueError(f"outliers: expected a factor that is a power of two (any other would round), found {self.factor}")
        if not self.channels or len(set(self.channels)) != len(self.channels) or min(self.channels) < 0:
            raise ValueError(f"outliers: expected different channels, none below 0, found {list(self.channels)}")

    def scale(self, values_D: torch.Tensor) -> torch.Tensor:
        """A copy of what lies along the hidden axis (the last one), its channels multiplied."""
        scaled = values_D.clone()
        scaled[..., list(self.channels)] *= self.factor
        return scaled

    def scale_sample(self, sample: Sample) -> Sample:
        """A cached sample as the scaled target would give it; tapped layers lie before the final norm and stay."""
        return replace(sample, hidden_TD=self.scale(sample.hidden_TD))


def spread_channels(hidden_size: int, *, count: int) -> tuple[int, ...]:
    """``count`` channels evenly over the hidden size."""
    if not 1 <= count <= hidden_size:
        raise ValueError(f"outliers: expected 1 to {hidden_size} channels (the hidden size), found {count}")
    return tuple((2 * number + 1) * hidden_size // (2 * count) for number in range(count))


def write_outlier_target(source: Path, out: Path, *, outliers: Outliers) -> Path:
    """Write the scaled copy of the target in ``source`` to ``out``, whole or not at all; one that is there is kept.

    The copy has an lm_head of its own, since the embedding keeps its size. Errors: ValueError where a channel is beyond the
    hidden size, the target is quantized, or ``out`` holds something else.
    """
    config = read_model_config(source)
    if max(outliers.channels) >= config["hidden_size"]:
        raise ValueError(f"outliers: expected channels below {config['hidden_size']} (the hidden size), found {max(outliers.channels)}")
    if config.get("quantization_config") is not None:
        raise ValueError(f"{source}: expected a target in floats, found a quantized one; its lm_head cannot be scaled exactly")
    if is_there(out):
        return out
    files = tensor_files(source)
    tensors = {name: read_tensor(files, name).clone() for name in files}
    lm_head_VD = tensors[EMBEDDING] if config.get("tie_word_embeddings") or LM_HEAD not in tensors else tensors[LM_HEAD]
    tensors[FINAL_NORM] = outliers.scale(tensors[FINAL_NORM])
    tensors[LM_HEAD] = replace(outliers, factor=1 / outliers.factor).scale(lm_head_VD)
    return write_model_folder(out, source=source, tensors=tensors, config={**config, "tie_word_embeddings": False})
