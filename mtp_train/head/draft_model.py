"""``head=draft_model``: a small causal LM of its own, which drafts from the tokens alone (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from mtp_train.batch.shift import states_at
from mtp_train.head.base import Drafted, Head
from mtp_train.nn.attention import AttentionContext, PackedAttention
from mtp_train.nn.layer import read_config, use_context_attention
from mtp_train.nn.wanted import WantedRows
from mtp_train.prompt.same_tokens import check_same_tokens
from mtp_train.records import Batch, DraftStep
from mtp_train.target.files import read_model_config
from mtp_train.target.resolve import resolve_model
from mtp_train.target.weights import EMBEDDING, LM_HEAD, SharedWeights, read_floats

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Of a config.json: what says nothing of the computation.
_NOT_SIZES = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache", "quantization_config")
# Keys that transformers takes and files under another name, and those that change logits behind the lm_head.
_ALSO_KNOWN = {"model_type", "rope_theta", "rope_scaling"}
# Entries, and what they are where logits are lm_head(hidden state) and attention is softmax(q k): nothing else is computed or exported.
_NEUTRAL = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None, "attn_logit_softcapping": None}
_COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


class DraftModel(Head):
    """A causal LM of any Llama-shaped architecture of transformers, embedding and lm_head its own, over the target's token ids.

    ``config``: entries of its config.json (``model_type`` and sizes). Left out of it, ``vocab_size`` and
    ``max_position_embeddings`` are the target's; without ``checkpoint`` the vocabulary cannot be another.
    ``checkpoint``: a model to begin with, in place of random weights: a folder, or with ``revision`` (a commit) an id on the hub.
    Its tokenizer must number tokens as the target's does. ``config`` null reads the checkpoint's.

    Vocabularies that differ by padding alone: rows that a checkpoint has beyond the target's are dropped, so that they are
    neither drafted nor counted in a softmax; of the target's rows that it lacks, which no tokenizer writes, none is drafted.
    """

    word = "draft_model"
    method = "draft_model"
    reads_hidden = False

    def __init__(
        self,
        *,
        target_path: Path,
        shared: SharedWeights,
        config: Mapping[str, Any] | None,
        checkpoint: str | None,
        revision: str | None,
        seed: int,
        trust_remote_code: bool,
    ) -> None:
        super().__init__(shared=shared)
        from transformers import AutoModel

        if config is None and checkpoint is None:
            raise ValueError(
                "head.config: expected the draft model's sizes (entries of a config.json), or head.checkpoint, found neither; name one"
            )
        self._target_path, self._trust_remote_code = target_path, trust_remote_code
        self._checkpoint, self._revision, self.seed = checkpoint, revision, seed
        vocab_size = shared.embedding_VD.shape[0]
        entries = read_model_config(self._folder()) if config is None else dict(config)
        longest = read_config(target_path, trust_remote_code=trust_remote_code).max_position_embeddings
        self._config = _model_config(entries, vocab_size=vocab_size, longest=longest, from_checkpoint=checkpoint is not None)
        self._entries = json.loads(json.dumps(self._config.to_diff_dict()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with _taking(self._config.model_type):
                self.model: Any = AutoModel.from_config(
                    self._config, attn_implementation=self._config._attn_implementation, dtype=torch.float32, trust_remote_code=False
                )
            self.lm_head = None
            if not self._config.tie_word_embeddings:
                self.lm_head = nn.Linear(self._config.hidden_size, self._config.vocab_size, bias=False)
                nn.init.normal_(self.lm_head.weight, std=self._config.initializer_range)
        _check_shape(self.model)
        drafted = None if self._config.vocab_size == vocab_size else torch.arange(self._config.vocab_size)
        self.drafted_ids: torch.Tensor | None
        self.register_buffer("drafted_ids", drafted, persistent=False)

    @property
    def draft_ids_U(self) -> torch.Tensor | None:
        return self.drafted_ids

    @property
    def config(self) -> PreTrainedConfig:
        """The model's own config, as transformers reads it."""
        return self._config

    @property
    def projection_parameters(self) -> tuple[torch.Tensor, ...]:
        return (self.lm_head_UD,)

    @property
    def lm_head_UD(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight if self.lm_head is None else self.lm_head.weight

    def row_wise(self) -> list[nn.Module]:
        parts = [part for layer in self.model.layers for name, part in layer.named_children() if name != "self_attn"]
        return [self.model.norm, *parts]

    def settings(self) -> dict[str, Any]:
        """The whole config, so that a trained model is rebuilt without the checkpoint that it began with."""
        entries = {key: value for key, value in self._entries.items() if key not in _NOT_SIZES}
        return {"config": entries, "checkpoint": self._checkpoint, "revision": self._revision, "seed": self.seed}

    @property
    def starts_from_data(self) -> bool:
        return self._checkpoint is not None

    def start(self, batches: Iterable[Batch]) -> None:
        """Take the checkpoint's weights; the data is not read.

        Errors: ValueError where its tokenizer is not the target's, or it holds other tensors than its config calls for.
        """
        folder = self._folder()
        check_same_tokens(folder, self._target_path, num_rows=self._config.vocab_size, trust_remote_code=self._trust_remote_code)
        tensors = read_floats(folder)
        ours = dict(self.named_parameters())
        if self.lm_head is None:
            tensors.pop(LM_HEAD, None)  # tied: some files hold it twice
        for name in (EMBEDDING, LM_HEAD):
            if name in tensors:
                tensors[name] = tensors[name][: self._config.vocab_size]
        odd = [
            name
            for name in ours.keys() | tensors.keys()
            if name not in ours or name not in tensors or ours[name].shape != tensors[name].shape
        ]
        if odd:
            raise ValueError(
                f"head.checkpoint {folder}: expected the tensors that its config.json calls for, found others (such as "
                f"{sorted(odd)[:3]}); it is none of the architectures that a draft model can have, or its config is another's"
            )
        if not_finite := sorted(name for name in ours if not tensors[name].isfinite().all()):
            raise ValueError(
                f"head.checkpoint {folder}: expected finite numbers, found others in {not_finite[:3]}; it is damaged, or broke in its "
                "training: choose another"
            )
        for name, parameter in ours.items():
            parameter.data.copy_(tensors[name])

    def _folder(self) -> Path:
        assert self._checkpoint is not None
        return resolve_model(self._checkpoint, self._revision, where="head.checkpoint")

    def unroll(self, batch: Batch, *, wanted: WantedRows | None = None) -> Iterator[DraftStep]:
        """One pass over the samples; depth k of base i is what it says behind x_{i+1+k}, whatever was drafted before.

        Errors: ValueError where several processes share the batch: a base's state lies at a later row, which may be another's.
        """
        if batch.share is not None:
            raise ValueError("parallel.context: expected 1 for head=draft_model, whose depths read later rows; set parallel.context=1")
        drafted = self.draft_to_train(
            token_ids_T=batch.token_ids_T,
            hidden_TD=batch.hidden_TD,
            position_T=batch.position_T,
            context=PackedAttention(bounds=batch.bounds),
            feed_forward_M=None,
        )
        for depth in count():
            hidden_TD = states_at(drafted.hidden_TD, depth=depth)
            yield DraftStep(
                ahead=depth + 2,
                hidden_TD=hidden_TD,
                project=self.project,
                lm_head_UD=self.lm_head_UD,
                parameters=self.projection_parameters,
            )

    def draft(self, *, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, position_T: torch.Tensor, context: AttentionContext) -> Drafted:
        """Tokens at their own positions, a sequence's first one too; the hidden states are not read."""
        # An id beyond its rows is padding of the target's, which no tokenizer writes: read as its last one, it costs a draft at most.
        token_ids_T = token_ids_T.clamp_max(self._config.vocab_size - 1)
        out = self.model(input_ids=token_ids_T[None], position_ids=position_T[None], use_cache=False, attention_context=context)
        own_TD: torch.Tensor = out.last_hidden_state[0]
        return Drafted(own_TD, own_TD)

    def project(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden_MD, self.lm_head_UD)


def _model_config(entries: Mapping[str, Any], *, vocab_size: int, longest: int, from_checkpoint: bool) -> PreTrainedConfig:
    """The model's config, its vocabulary no larger than the target's.

    Errors: ValueError for a model_type that transformers does not know, an entry that it does not, or another vocabulary.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {key: value for key, value in entries.items() if key not in _NOT_SIZES}
    model_type = given.pop("model_type", None)
    try:
        plain = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ValueError(f"head.config.model_type: expected one that transformers knows, found {model_type!r}") from error
    if type(plain) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"head.config.model_type: expected one that transformers has a causal LM for, found {model_type!r}")
    if (unknown := sorted(given.keys() - plain.to_dict().keys() - _ALSO_KNOWN)) and not from_checkpoint:
        raise ValueError(f"head.config: expected entries of a {model_type} config.json, found {unknown}")
    found = given.setdefault("vocab_size", vocab_size)
    if found != vocab_size and not from_checkpoint:
        raise ValueError(
            f"head.config.vocab_size: expected the target's, {vocab_size}, found {found}; its token ids must be the target's: leave it out"
        )
    given["vocab_size"] = min(found, vocab_size)
    given.setdefault("max_position_embeddings", longest)
    given["pad_token_id"] = None  # its embedding would never be trained
    with _taking(model_type):
        config = AutoConfig.for_model(model_type, **given)
    for key in _COUNTS:
        if (number := getattr(config, key, 1)) is not None and number < 1:
            raise ValueError(f"head.config.{key}: expected at least 1, found {number}")
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if shared and heads % shared:
        raise ValueError(f"head.config.num_key_value_heads: expected a divisor of num_attention_heads={heads}, found {shared}")
    for key, neutral in _NEUTRAL.items():
        if (number := getattr(config, key, neutral)) not in (neutral, None):
            raise ValueError(
                f"head.config: expected a model without scaled or capped logits, found {key} = {number} of {model_type}; set it to "
                f"{'null' if neutral is None else neutral}, or choose another model"
            )
    return use_context_attention(config)


@contextmanager
def _taking(model_type: str) -> Iterator[None]:
    """ValueError where transformers can make no model of the sizes; it says so in many ways."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"head.config: expected entries that transformers makes a {model_type} of, found ones that it does not take ({said}); "
            "change them, or leave them out"
        ) from error


def _check_shape(model: nn.Module) -> None:
    """ValueError unless it is built as Llama is, which the forward over flat tokens and the exporters need."""
    parts = dict(model.named_children())
    if not isinstance(parts.get("layers"), nn.ModuleList) or not {"embed_tokens", "norm"} <= parts.keys():
        raise ValueError(
            f"head.config.model_type: expected a model with embed_tokens, layers and a final norm as Llama's, found {type(model).__name__} "
            f"with {sorted(parts)}; choose another architecture"
        )
