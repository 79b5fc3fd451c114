"""What the exporters of a draft model share: a causal LM's own names and config, its vocabulary as an engine wants it, its card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtp_train.exporter.base import Rename, Source
from mtp_train.target.weights import EMBEDDING, LM_HEAD

FORMAT_VERSION = 1
STATED = "mtp_train"  # the key of config.json under which we say what other readers do not need
DRAFT_MODEL_TABLE = (Rename("model.*", "model.*"), Rename(LM_HEAD, LM_HEAD))

_CARD = """# A draft model for {target}

A causal language model ({architecture}, {num_parameters:,} parameters, {dtype}) that drafts for {target}, distilled from its
distributions by mtp-train. Its token ids are the target's; use the target's tokenizer.

| | |
|---|---|
| target | {target}, weights sha256 `{fingerprint}` |
| vocabulary | {vocabulary} |
| head weights sha256 | `{sha256}` (of the checkpoint's head.safetensors) |

## Load

```python
from transformers import AutoModelForCausalLM

draft = AutoModelForCausalLM.from_pretrained("this folder")
target.generate(**inputs, assistant_model=draft)  # transformers' own speculative decoding
```

## Checked

Read back and run through transformers' own model, this export equals the trained one on {num_rows} rows at {num_depths} depths: largest
difference {difference:.1e} of the largest logit (allowed: {tolerance:.0e}). Each tensor, perturbed, changes the logits.
`export.json` holds the sha256 of every file.
"""


def causal_lm_config(source: Source, *, dtype: str) -> dict[str, Any]:
    """config.json of the model, and under ``STATED`` what it was made from; ``num_drafted``: rows of the vocabulary that it drafts.

    Errors: ValueError where head.json does not state a config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = source.head["settings"].get("config")
    if not isinstance(entries, dict):
        raise ValueError(f"{source.checkpoint}: expected head.json to state the draft model's config, found {entries!r}; train it anew")
    given = dict(entries)
    kind = AutoConfig.for_model(given.pop("model_type"), **given)
    return {
        **entries,
        "architectures": [AutoModelForCausalLM._model_mapping[type(kind)].__name__],
        "tie_word_embeddings": bool(kind.tie_word_embeddings),
        "dtype": dtype,
        STATED: {
            "format_version": FORMAT_VERSION,
            "head": source.head["head"],
            "method": source.head["method"],
            "num_drafted": entries["vocab_size"],
            "target": source.head["target"],
            "head_weights_sha256": source.head["weights_sha256"],
        },
    }


def with_padding(tensors: Mapping[str, torch.Tensor], *, vocab_size: int) -> dict[str, torch.Tensor]:
    """The tensors with embedding and lm_head of ``vocab_size`` rows, as vLLM asks for of a draft model. A row added is the mean of
    all: its logit is the mean logit, which is never the largest."""
    padded = dict(tensors)
    for name in (EMBEDDING, LM_HEAD):
        if name in padded and (missing := vocab_size - padded[name].shape[0]) > 0:
            padded[name] = torch.cat([padded[name], padded[name].mean(0, keepdim=True).expand(missing, -1)])
    return padded


def draft_model_card(source: Source, config: Mapping[str, Any], *, proof: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """The model card as Markdown."""
    drafted, vocab_size = config[STATED]["num_drafted"], int(source.target_config["vocab_size"])
    padding = "" if drafted == vocab_size else f" of the target's {vocab_size}; the rest, padding, is never drafted"
    return _CARD.format(
        target=source.head["target"]["target_name"],
        fingerprint=source.head["target"]["target_fingerprint"],
        architecture=config["architectures"][0],
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        dtype=config["dtype"],
        vocabulary=f"{drafted} tokens{padding}",
        sha256=source.head["weights_sha256"],
        num_rows=proof["num_rows"],
        num_depths=proof["num_depths"],
        difference=proof["largest_difference"]["logits"],
        tolerance=proof["tolerance"],
    )
