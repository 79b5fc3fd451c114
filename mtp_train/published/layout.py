"""How published draft heads lie on disk: the tables of their tensors' names beside ours, and what else their graph asks of a head.

Two lie in folders of their own, EAGLE-1's and EAGLE-3's, and two inside the target's checkpoint, the multi-token-prediction
blocks of DeepSeek-V3 and of Qwen3-Next. Names, column orders and norms are those of the published checkpoints and of the classes
that load them: SafeAILab/EAGLE (cnets1.py, cnets.py) and vLLM 0.32 (llama_eagle.py, llama_eagle3.py, deepseek_mtp.py,
qwen3_next_mtp.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

ColumnOrder = Literal["hidden_embed", "embed_hidden"]
Shared = Literal["embedding", "lm_head"]
ON, OFF = (dict.fromkeys(("embed", "hidden", "input", "output", "feedback"), on) for on in (True, False))
# Buffers that old checkpoints hold and that follow from the config.
_DERIVED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


class Row(NamedTuple):
    """One row of a table; both names may end in ``*``, which stands for whatever follows. Where two rows fit, the first one counts."""

    ours: str
    theirs: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One head's tensors. ``heads``: the words in conf/head that have its graph. ``prefixes``: the names of its tensors begin with one
    of these, all else in the folder being the target's; None: all tensors are the head's. ``copies``: tensors that are the target's own
    again, by whether they are its embedding or lm_head. ``norms`` and ``zero_first_embedding``: what the graph of a pair head asks of
    the settings, and ``column_order`` what its projection's columns are; all None for EAGLE-3, whose files say more of it."""

    word: str
    heads: tuple[str, ...]
    table: tuple[Row, ...]
    prefixes: tuple[str, ...] | None
    copies: Mapping[str, Shared]
    num_blocks: int
    norms: Mapping[str, bool] | None
    zero_first_embedding: bool | None
    column_order: ColumnOrder | None

    @property
    def in_target(self) -> bool:
        return self.prefixes is not None

    def holds(self, theirs: str) -> bool:
        """Whether a tensor of the folder is the head's, copies and derived buffers left out."""
        mine = self.prefixes is None or theirs.startswith(self.prefixes)
        return mine and theirs not in self.copies and _DERIVED.fullmatch(theirs) is None

    def ours(self, theirs: str) -> str | None:
        """Our name of a tensor; None where no row fits."""
        return next((new for row in self.table if (new := renamed(theirs, old=row.theirs, new=row.ours)) is not None), None)

    def theirs(self, ours: str) -> str | None:
        """Their name of a tensor; None where no row fits."""
        return next((new for row in self.table if (new := renamed(ours, old=row.ours, new=row.theirs)) is not None), None)


def renamed(name: str, *, old: str, new: str) -> str | None:
    """The name by one row of a table; None where the row does not fit."""
    if not old.endswith("*"):
        return new if name == old else None
    return new[:-1] + name[len(old) - 1 :] if name.startswith(old[:-1]) else None


EAGLE1 = Layout(
    word="eagle1",
    heads=("eagle", "mtp"),
    table=(Row("projection.*", "fc.*"), Row("decoder.layer.*", "layers.0.*")),
    prefixes=None,
    copies={"embed_tokens.weight": "embedding", "lm_head.weight": "lm_head"},
    num_blocks=1,
    norms=OFF,
    zero_first_embedding=False,
    column_order="embed_hidden",
)


def eagle3(layer: str) -> Layout:
    """EAGLE-3's; its one layer is called midlayer by its authors and by SGLang, layers.0 by vLLM."""
    return Layout(
        word="eagle3",
        heads=("eagle3",),
        table=(
            Row("tap_norms.*", "fc_norm.*"),
            Row("fusion.weight", "fc.weight"),
            Row("decoder.hidden_norm.weight", f"{layer}.hidden_norm.weight"),
            Row("decoder.layer.*", f"{layer}.*"),
            Row("output_norm.weight", "norm.weight"),
            Row("lm_head.weight", "lm_head.weight"),
        ),
        prefixes=None,
        copies={"embed_tokens.weight": "embedding"},
        num_blocks=1,
        norms=None,
        zero_first_embedding=None,
        column_order=None,
    )


def deepseek_mtp(*, num_layers: int, num_blocks: int) -> Layout:
    """DeepSeek-V3's: block k is decoder layer ``num_layers`` + k of the checkpoint."""
    table: list[Row] = []
    copies: dict[str, Shared] = {}
    names = [f"model.layers.{num_layers + block}." for block in range(num_blocks)]
    for block, theirs in enumerate(names):
        ours = f"later_blocks.{block - 1}." if block else ""
        table += [
            Row(f"{ours}embed_norm.weight", f"{theirs}enorm.weight"),
            Row(f"{ours}hidden_norm.weight", f"{theirs}hnorm.weight"),
            Row(f"{ours}projection.weight", f"{theirs}eh_proj.weight"),
            Row(f"{ours}output_norm.weight", f"{theirs}shared_head.norm.weight"),
            Row(f"{ours}decoder.layer.*", f"{theirs}*"),
        ]
        copies[f"{theirs}embed_tokens.weight"], copies[f"{theirs}shared_head.head.weight"] = "embedding", "lm_head"
    return Layout(
        word="deepseek_mtp",
        heads=("mtp",),
        table=tuple(table),
        prefixes=tuple(names),
        copies=copies,
        num_blocks=num_blocks,
        norms=ON,
        zero_first_embedding=True,
        column_order="embed_hidden",
    )


QWEN3_NEXT_MTP = Layout(
    word="qwen3_next_mtp",
    heads=("mtp",),
    table=(
        Row("embed_norm.weight", "mtp.pre_fc_norm_embedding.weight"),
        Row("hidden_norm.weight", "mtp.pre_fc_norm_hidden.weight"),
        Row("projection.weight", "mtp.fc.weight"),
        Row("output_norm.weight", "mtp.norm.weight"),
        Row("decoder.layer.*", "mtp.layers.0.*"),
    ),
    prefixes=("mtp.",),
    copies={"mtp.embed_tokens.weight": "embedding", "mtp.lm_head.weight": "lm_head"},
    num_blocks=1,
    norms=ON,
    zero_first_embedding=False,
    column_order="embed_hidden",
)


def find_layout(names: Iterable[str], *, num_layers: int | None) -> Layout | None:
    """The layout of a folder with these tensors; None where it is none of those known. ``num_layers``: of the model whose folder it
    is, as its config.json says. ValueError where blocks lie elsewhere than behind so many."""
    found = set(names)
    if "mtp.fc.weight" in found:
        return QWEN3_NEXT_MTP
    blocks = sorted(int(match[1]) for name in found if (match := re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name)))
    if blocks and num_layers is not None:
        if blocks != list(range(num_layers, num_layers + len(blocks))):
            raise ValueError(
                f"expected blocks behind the last of num_hidden_layers={num_layers} (model.layers.{num_layers}.eh_proj and on), found them "
                f"at {blocks}; config.json is another model's"
            )
        return deepseek_mtp(num_layers=num_layers, num_blocks=len(blocks))
    for layer in ("midlayer", "layers.0"):
        if f"{layer}.hidden_norm.weight" in found:
            return eagle3(layer)
    return EAGLE1 if {"fc.weight", "layers.0.post_attention_layernorm.weight"} <= found else None
