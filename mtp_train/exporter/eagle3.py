"""What the exporters of an EAGLE-3 head share: the published names of its tensors, and d2t as offsets."""

from __future__ import annotations

import torch

from mtp_train.exporter.base import Rename, Source
from mtp_train.exporter.graph_eagle3 import D2T
from mtp_train.target.draft_vocabulary import fingerprint, from_offsets, to_offsets

_IDS = "draft_ids"
# The names of the published checkpoints, where their one layer is called midlayer, and of vLLM's class, where it is layers.0.
EAGLE3_TABLE = (
    Rename("tap_norms.*", "fc_norm.*"),
    Rename("fusion.weight", "fc.weight"),
    Rename("decoder.hidden_norm.weight", "layers.0.hidden_norm.weight"),
    Rename("decoder.layer.*", "layers.0.*"),
    Rename("output_norm.weight", "norm.weight"),
    Rename("lm_head.weight", "lm_head.weight"),
    Rename(D2T, D2T),
)


def with_offsets(source: Source) -> dict[str, torch.Tensor]:
    """A head's tensors, its draft vocabulary's ids as the engines' ``d2t``; of a head without one, as they are.

    Errors: ValueError where the ids are not those whose hash ``head.json`` states, or no vocabulary of the target.
    """
    tensors = dict(source.tensors)
    if _IDS not in tensors:
        return tensors
    ids_U = tensors.pop(_IDS)
    stated, found = source.head.get("draft_vocabulary_sha256"), fingerprint(ids_U)
    if stated != found:
        raise ValueError(
            f"{source.checkpoint}: expected the draft vocabulary of sha256 {stated}, which head.json states, found {found}; "
            "weights and head.json are of different heads: copy the folder again, or train anew"
        )
    tensors[D2T] = to_offsets(ids_U)
    from_offsets(tensors[D2T], vocab_size=int(source.target_config["vocab_size"]))
    return tensors
