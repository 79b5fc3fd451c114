"""What a model's sizes say of its cost: weights, those a token meets, attention, KV cache; counted on the meta device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from mtp_train.head.base import Head
from mtp_train.head.draft_model import DraftModel
from mtp_train.target.files import read_model_config
from mtp_train.target.weights import SharedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters of a stack of layers. ``num_matrix`` are in matrix products that every token goes through, ``num_expert`` in
    routed experts, of which a token meets the share ``chosen``; ``num_other`` are norms and biases."""

    num_matrix: int
    num_expert: int
    num_other: int
    chosen: float

    @property
    def total(self) -> int:
        return self.num_matrix + self.num_expert + self.num_other

    @property
    def num_active(self) -> float:
        """Weights in the products of one token: twice as many floating-point operations."""
        return self.num_matrix + self.num_expert * self.chosen

    def num_read(self, num_tokens: float) -> float:
        """Weights that a forward over ``num_tokens`` tokens reads: each expert with the chance that some token chose it."""
        return self.num_matrix + self.num_other + self.num_expert * (1.0 - (1.0 - self.chosen) ** num_tokens)


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """A target without its weights. ``attention_flops`` are per layer and pair of a query and a key (products with keys and values);
    ``num_kv`` the numbers that a serving engine keeps per token over all layers (the latent ones of MLA), which devices can share in
    at most ``num_kv_parts`` parts."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tied: bool
    layers: Weights
    attention_flops: int
    num_kv: int
    num_kv_parts: int

    @property
    def num_lm_head(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_shared(self) -> int:
        """Embedding, lm_head (once where they are tied) and final norm: what a head shares with the target."""
        return self.num_lm_head * (1 if self.tied else 2) + self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.layers.total + self.num_shared


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """A draft head. What it shares with the target is not counted; ``num_layers`` are those that attend, ``num_lm_head`` the
    weights of lm_heads of its own, counted in ``weights``, 0 where it has none. ``num_blocks``: the parts, equally large, of which
    a depth goes through one. ``num_feed_forward``: the active weights that treat each row by itself and are applied, at depth 0,
    to the rows that count alone, as are all weights at later depths; 0 where every depth goes over all rows."""

    word: str
    weights: Weights
    num_layers: int
    num_lm_head: int
    num_blocks: int
    num_embedding: int  # of an embedding of its own, counted in ``weights``, which no product reads
    attention_flops: int | None  # per layer and pair of a query and a key; None: as the target's layers
    num_feed_forward: float
    largest: int  # parameters of its largest tensor


def chosen_share(config: PreTrainedConfig) -> float:
    """The share of a layer's routed experts that a token goes through; 1 without experts."""
    settings = config.to_dict()
    chosen = settings.get("num_experts_per_tok")
    experts = next((settings[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if settings.get(key)), None)
    return chosen / experts if chosen and experts else 1.0


def count_weights(parameters: Iterable[tuple[str, torch.Tensor]], *, chosen: float) -> Weights:
    """Sort named parameters into matrices, stacks of experts (three axes) and the rest."""
    num = {"matrix": 0, "expert": 0, "other": 0}
    for name, parameter in parameters:
        expert = parameter.ndim == 3 and "experts" in name.split(".")
        num["expert" if expert else "matrix" if parameter.ndim >= 2 else "other"] += parameter.numel()
    return Weights(num_matrix=num["matrix"], num_expert=num["expert"], num_other=num["other"], chosen=chosen)


@contextmanager
def target_folder(node: Mapping[str, Any]) -> Iterator[Path]:
    """A folder with the ``config.json`` of the target that the settings name: its own, or one written from its ``sizes``.

    Errors: ValueError for a target that is neither here nor states its sizes.
    """
    if node["kind"] == "path":
        path = Path(node["path"]).expanduser()
        read_model_config(path)
        yield path
        return
    if node.get("sizes") is None:
        raise ValueError(
            f"target.sizes: expected the sizes of {node['name']} (entries of its config.json, as in conf/target/llama3_8b.yaml), found "
            "none; nothing is downloaded to plan. Add them, or use target=local target.path=... with a folder that holds its config.json"
        )
    with TemporaryDirectory(prefix="mtp-train-plan-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(node["sizes"])), encoding="utf-8")
        yield Path(folder)


def read_target_sizes(folder: Path, *, name: str) -> TargetSizes:
    """Build the target of a ``config.json`` on the meta device, where tensors have sizes and no memory, and count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [(key, p) for key, p in model.base_model.named_parameters() if key.startswith("layers.")]
    attention_flops, num_kv, num_kv_parts = _attention(config)
    return TargetSizes(
        name=name,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        layers=count_weights(layers, chosen=chosen_share(config)),
        attention_flops=attention_flops,
        num_kv=num_kv * config.num_hidden_layers,
        num_kv_parts=num_kv_parts,
    )


def _attention(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Of one layer: floating-point operations per query and key, numbers kept per token, and in how many parts devices can share them.

    Latent attention (DeepSeek-V2 report, section 2.1) keeps its latent vector and one rotary key for all heads; where prompts
    are read, and in training, it multiplies as any other, with keys and values of different sizes.
    """
    settings = config.to_dict()
    heads = config.num_attention_heads
    if settings.get("kv_lora_rank"):
        key_size = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
        return 2 * heads * (key_size + settings["v_head_dim"]), settings["kv_lora_rank"] + settings["qk_rope_head_dim"], 1
    head_size, kv_heads = settings.get("head_dim") or config.hidden_size // heads, settings.get("num_key_value_heads") or heads
    return 4 * heads * head_size, 2 * kv_heads * head_size, kv_heads


def head_sizes(head: Head, *, word: str, chosen: float) -> HeadSizes:
    """Count a head that was built on the meta device."""
    return HeadSizes(
        word=word,
        weights=count_weights(head.named_parameters(), chosen=chosen),
        num_layers=sum(type(module).__name__.endswith("Attention") for module in head.modules()),
        num_lm_head=sum(parameter.numel() for parameter in head.projection_parameters),
        num_blocks=head.num_blocks,
        num_embedding=_num_embedding(head),
        attention_flops=_attention(head.config)[0] if isinstance(head, DraftModel) else None,
        num_feed_forward=sum(count_weights(part.named_parameters(), chosen=chosen).num_active for part in head.feed_forward()),
        largest=max(parameter.numel() for parameter in head.parameters()),
    )


def _num_embedding(head: Head) -> int:
    """Parameters of embeddings that are not also an lm_head."""
    projected = {id(parameter) for parameter in head.projection_parameters}
    tables = [module.weight for module in head.modules() if isinstance(module, torch.nn.Embedding)]
    return sum(table.numel() for table in tables if id(table) not in projected)


def empty_shared(*, vocab_size: int, hidden_size: int, tied: bool, dtype: torch.dtype) -> SharedWeights:
    """What a head shares with its target, in sizes only: call it where tensors take no memory (meta device, ``FakeTensorMode``)."""
    embedding = torch.empty(vocab_size, hidden_size, dtype=dtype)
    return SharedWeights(
        embedding_VD=embedding,
        lm_head_VD=embedding if tied else torch.empty_like(embedding),
        final_norm_weight_D=torch.empty(hidden_size, dtype=dtype),
        rms_norm_eps=1e-6,
    )


def meta_head(make_head: Callable[[SharedWeights], Head], target: TargetSizes) -> Head:
    """A head of real size on the meta device."""
    with torch.device("meta"):
        return make_head(empty_shared(vocab_size=target.vocab_size, hidden_size=target.hidden_size, tied=target.tied, dtype=torch.bfloat16))
