"""The probe beside a head: a few inputs and what the trained head makes of them, for exporters and engines to compare with.

``probe.safetensors`` holds packed samples (``token_ids_T``, ``hidden_TD`` of the target, post-norm, ``bounds``, and ``taps_TLD``
where the head reads any) and, per depth k, ``hidden_<k>_TD`` (what the lm_head reads) and ``logits_<k>_TV`` of all rows, in
float32; -inf outside a draft vocabulary. Row i of a sample of n tokens means
something at depth k where i <= n - 2 - k: beyond, it reads no token of the sample. Its metadata name the head's weights by
their sha256.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mtp_train.batch.packing import pack
from mtp_train.checkpoint import read_head_config
from mtp_train.head.base import Head
from mtp_train.records import Sample
from mtp_train.runtime import atomic_path

PROBE = "probe.safetensors"
# Two samples, so that packing takes part, and depths beyond the first, so that feeding back does; small, since logits are large.
_LENGTHS_TOKENS = (16, 8)
_DEPTHS = 3  # and as many as the head has blocks
_OF = "weights_sha256"


def write_probe(folder: Path, head: Head, samples: Sequence[Sample]) -> None:
    """Run ``head`` (float32, on the CPU), which is the one in ``folder``, over the beginnings of the two longest of ``samples``
    and write the probe."""
    from safetensors.torch import save_file

    chosen = sorted(samples, key=lambda sample: -sample.num_tokens)[: len(_LENGTHS_TOKENS)]
    batch = pack([_beginning(sample, length) for sample, length in zip(chosen, _LENGTHS_TOKENS, strict=False)])
    tensors = {"token_ids_T": batch.token_ids_T, "hidden_TD": batch.hidden_TD, "bounds": torch.tensor(batch.bounds)}
    if head.target_layer_ids:
        assert batch.taps_TLD is not None
        tensors["taps_TLD"] = batch.taps_TLD
    with torch.no_grad():
        for depth, step in enumerate(itertools.islice(head.unroll(batch), max(_DEPTHS, head.num_blocks))):
            tensors[f"hidden_{depth}_TD"] = step.hidden_TD.float()
            tensors[f"logits_{depth}_TV"] = head.over_target(step.project(step.hidden_TD)).float()
    with atomic_path(folder / PROBE) as temporary:
        of = {_OF: read_head_config(folder)[_OF]}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=of)


def has_probe(folder: Path) -> bool:
    """Whether the head in ``folder`` has a probe of these very weights: a training that was killed behind its head has that of
    the head before, or none."""
    from safetensors import SafetensorError, safe_open

    if not (folder / PROBE).is_file():
        return False
    try:
        with safe_open(folder / PROBE, framework="pt") as file:
            of = (file.metadata() or {}).get(_OF)
    except SafetensorError:
        return False
    return bool(of == read_head_config(folder)[_OF])


def _beginning(sample: Sample, num_tokens: int) -> Sample:
    rows = slice(0, num_tokens)
    return replace(
        sample,
        token_ids_T=sample.token_ids_T[rows],
        loss_mask_T=sample.loss_mask_T[rows],
        hidden_TD=sample.hidden_TD[rows].float(),
        taps_TLD=None if sample.taps_TLD is None else sample.taps_TLD[rows].float(),
        teacher=None,
    )
