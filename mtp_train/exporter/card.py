"""The model card of an exported head: what it computes, for which target, how it was checked, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtp_train.exporter.base import Source

_CARD = """# {head} draft head for {target}

A draft head for speculative decoding, trained by mtp-train. It is no language model of its own: it reads the target's hidden
states and drafts the tokens that the target then verifies.

| | |
|---|---|
| head / method | `{head}` / `{method}` |
| target | {target}, weights sha256 `{fingerprint}` |
| reads | {reads} |
| parameters | {num_parameters:,}, float32{not_shipped} |
| head weights sha256 | `{sha256}` (of the checkpoint's head.safetensors) |

## Graph

{alignment}

{graph}

| tensor | shape |
|---|---|
{tensors}

## Load

```python
from pathlib import Path
from mtp_train.exporter.hf import load_exported

graph = load_exported(Path("this folder"), target_path=Path("the target's folder"))
for step in graph.unroll({arguments}, num_depths={depths}):
    step.logits_TV  # row t: the draft of token t + depth + 2
```

## Checked

Read back and run through a forward of its own, this export equals the trained head on {num_rows} rows at {num_depths} depths: largest
difference {difference:.1e} of the largest logit (allowed: {tolerance:.0e}). Each tensor, perturbed, changes the logits.
`export.json` holds the sha256 of every file.
"""
_RECURRENT = """
Position i of a sequence, depth 0, reads the pair (h_i, embed(x_(i+1))) and speaks about x_(i+2); depth k reads its own state of
depth k - 1 with embed(x_(i+1+k)), at rotary position i + k, and attends to the depth-0 keys up to i and its own base's later ones."""
_PARALLEL = """
Position i of a sequence reads h_i alone, and head k of {num_heads} speaks about x_(i+2+k), knowing none of the tokens between:
depth k below is head k."""
_LAST_HIDDEN = "the target's last hidden state, `{hidden_state}` (post_norm: after the final norm, what the lm_head reads)"
_LAYER = "(`{model_type}`, sizes and rotary settings as `target_config`\n   in config.json states them)"
_PAIR = """1. e = embed(next token){zeroed}{embed_norm}; s = {hidden_norm}.
2. u = `fc` · concat({columns}){bias}.
3. r = `layers.0`(u): one decoder layer of the target's architecture {layer}, {input_norm}.
4. o = {output_norm}; logits = the target's lm_head · o.
5. The state that depth k + 1 reads in place of h is {feedback}.{blocks}"""
_BLOCKS = """
6. This is depth 0. Depth k takes the tensors of `blocks.k` in place of these, and attends causally to its own rows of that depth
   alone; depths from {last} on take those of `blocks.{last}`, and attend to its first rows up to i and their own base's later ones."""
_EAGLE3 = """1. {fusion}
2. x = concat(`input_layernorm`(embed(next token)), `hidden_norm`(h)), both of `layers.0`; y = h + attention(x), with queries, keys and
   values of two hidden sizes; r = y + MLP(`post_attention_layernorm`(y)): attention and MLP of the target's architecture
   {layer}.
3. o = `norm`(r); logits = `lm_head` · o{vocabulary}.
4. The state that depth k + 1 reads in place of h is {feedback}."""
_MEDUSA = """1. x = h; then, {num_layers} times (j = 0, 1, ...), x = x + SiLU(`blocks.k.layers.j` · x).
2. logits = {lm_head} · x."""


def card(source: Source, config: Mapping[str, Any], *, proof: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """The card as Markdown, in words that follow the config."""
    layer = _LAYER.format(model_type=source.target_config["model_type"])
    reads = _LAST_HIDDEN.format(hidden_state=config["hidden_state"])
    method: str = config["method"]
    eagle3 = method == "eagle3"
    if eagle3 and config["target_layer_ids"]:
        reads = f"the outputs of the target's layers {config['target_layer_ids']} (0-based, before the final norm)"
    return _CARD.format(
        head=config["head"],
        method=method,
        target=config["target"]["target_name"],
        fingerprint=config["target"]["target_fingerprint"],
        reads=reads,
        num_parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        not_shipped=_not_shipped(config),
        sha256=source.head["weights_sha256"],
        alignment=(_PARALLEL.format(num_heads=config["num_heads"]) if method == "medusa" else _RECURRENT).strip(),
        graph=_graph(config, layer),
        tensors="\n".join(f"| `{name}` | {' x '.join(map(str, tensor.shape))} |" for name, tensor in sorted(tensors.items())),
        arguments="token_ids_T=token_ids, hidden_TD=post_norm_hidden"
        + (", taps_TLD=taps" if eagle3 and config["target_layer_ids"] else ""),
        depths=config["num_heads"] if method == "medusa" else 3,
        num_rows=proof["num_rows"],
        num_depths=proof["num_depths"],
        difference=proof["largest_difference"]["logits"],
        tolerance=proof["tolerance"],
    )


def _not_shipped(config: Mapping[str, Any]) -> str:
    """What the head takes from the target, if anything."""
    method = config["method"]
    if method == "medusa" and config["own_lm_heads"]:
        return ""
    taken = {"medusa": "the lm_head is", "eagle3": "the embedding is"}.get(method, "embedding and lm_head are")
    return f"; {taken} the target's own and not in this folder"


def _graph(config: Mapping[str, Any], layer: str) -> str:
    if config["method"] == "medusa":
        lm_head = "`lm_heads.k`" if config["own_lm_heads"] else "the target's lm_head"
        return _MEDUSA.format(num_layers=config["num_layers"], lm_head=lm_head)
    return _eagle3(config, layer) if config["method"] == "eagle3" else _pair(config, layer)


def _pair(config: Mapping[str, Any], layer: str) -> str:
    norms = config["norms"]
    columns = ("s", "e") if config["column_order"] == "hidden_embed" else ("e", "s")
    return _PAIR.format(
        zeroed=", zeroed at base 0" if config["zero_first_embedding"] else "",
        embed_norm=", then RMSNorm `embed_norm`" if norms["embed"] else "",
        hidden_norm="RMSNorm `hidden_norm` of the state" if norms["hidden"] else "the state as it is",
        columns=", ".join(columns),
        bias=" + its bias" if config.get("projection_bias") else "",
        layer=layer,
        input_norm="with its input norm" if norms["input"] else "without its input norm",
        output_norm="RMSNorm `norm` of r" if norms["output"] else "r",
        feedback="o" if norms["feedback"] else "r",
        blocks=_BLOCKS.format(last=config["num_blocks"] - 1) if config.get("num_blocks", 1) > 1 else "",
    )


def _eagle3(config: Mapping[str, Any], layer: str) -> str:
    norms, size = config["norms"], config["draft_vocab_size"]
    taps = "concat(taps), each behind its RMSNorm `fc_norm.i`" if norms["taps"] else "concat(taps)"
    vocabulary = f" over {size} tokens, of which number u is the target's u + `d2t`[u]; all others have probability 0" if size else ""
    return _EAGLE3.format(
        fusion=f"h = `fc` · {taps}." if config["target_layer_ids"] else "h = the target's hidden state as it is.",
        layer=layer,
        vocabulary=vocabulary,
        feedback="o" if norms["feedback"] else "r",
    )
