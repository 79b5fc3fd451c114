"""The target in transformers, run on one flat axis of tokens of many sequences, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mtp_train.engine.stop import stop_token_ids
from mtp_train.nn.attention import AttentionContext, PackedAttention
from mtp_train.nn.bf16 import multiplies_bf16, why_float32
from mtp_train.nn.layer import read_config
from mtp_train.runtime import local_place, log
from mtp_train.target.weights import SharedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(device: str) -> torch.device:
    """``auto`` takes an accelerator where torch sees one, else the CPU; any other word is torch's own. Of several alike, where
    the word has no number, each process of torchrun takes its own.

    Errors: ValueError for a word that torch does not know, and for a device that is not there.
    """
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else _own(accelerator)
    try:
        found = _own(torch.device(device))
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch built without CUDA asserts
        raise ValueError(
            f"engine.device: expected auto, or a device that torch finds here, such as cpu, found {device!r}: {str(error).splitlines()[0]}"
        ) from None
    return found


def choose_dtype(dtype: str, device: torch.device) -> str:
    """``auto``: bfloat16 where the device multiplies it, else float32, which is said. Errors: ValueError for an unknown word."""
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"engine.dtype: expected auto or one of {tuple(DTYPES)}, found {dtype!r}")
    if dtype != "auto":
        return dtype
    if multiplies_bf16(device):
        return "bfloat16"
    log(why_float32("engine.dtype"))
    return "float32"


def device_name(device: torch.device) -> str:
    """A device as a table of times names it: the accelerator's own name; a CPU's number of threads."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'' if threads == 1 else 's'}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _own(device: torch.device) -> torch.device:
    """The device of this kind that is this process': numbered as it is on its machine, from the first again where there are
    fewer devices than processes."""
    local_rank, num_local = local_place()
    if num_local == 1 or str(device) != device.type or device.type != _accelerator_type():  # cuda:1 has its number already
        return device
    return torch.device(device.type, local_rank % torch.accelerator.device_count())


def _accelerator_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def fixed_positions(config: PreTrainedConfig) -> int | None:
    """Positions up to which a token's rotary angles hang on its own position alone; None: all.

    transformers chooses the angles of a whole forward by its longest sequence where ``rope_type`` is dynamic or longrope, so
    that a draft that reaches beyond these positions would change what the target says of the tokens before it.
    """
    stated: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    each = (
        [stated] if "rope_type" in stated else [found for found in stated.values() if isinstance(found, dict)]
    )  # one, or by kind of layer
    limits = []
    for found in each:
        if found.get("rope_type") == "longrope":
            limits.append(int(found["original_max_position_embeddings"]))
        elif "dynamic" in str(found.get("rope_type")):
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


class TargetModel:
    """A causal LM whose decoder and lm_head are called apart, so that only the rows needed are projected."""

    def __init__(self, *, path: Path, dtype: str, device: torch.device, trust_remote_code: bool) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        if not (path / "config.json").is_file():
            raise ValueError(
                f"target path: expected a folder with config.json and safetensors, found none at {path}; fetch the target first"
            )
        self.path, self.device = path, device
        config = read_config(path, trust_remote_code=trust_remote_code)
        disable_progress_bar()  # loading takes seconds; its bar would stand between the stages' own
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            attn_implementation=config._attn_implementation,
            dtype=DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
        )
        self.model.to(self.device).eval().requires_grad_(False)
        self.decoder, self.lm_head = self._parts()
        self.fixed_positions = fixed_positions(config)
        self.stop_ids = frozenset(stop_token_ids(path, trust_remote_code=trust_remote_code))
        if not self.stop_ids:
            log(f"target {path}: neither generation_config nor tokenizer name an end-of-turn token; answers run to their length limit")
        self._check_projection()

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def num_rows(self) -> int:
        """Tokens that its embedding has."""
        embedding: nn.Embedding = self.model.get_input_embeddings()
        return embedding.num_embeddings

    def _parts(self) -> tuple[Any, nn.Linear]:
        decoder, lm_head = self.model.base_model, self.model.get_output_embeddings()
        if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(decoder, "norm"):
            raise ValueError(
                f"target {type(self.model).__name__}: expected a decoder with `layers` and a final `norm` as Llama's, found "
                f"{[name for name, _ in decoder.named_children()]}; this architecture is not supported by engine=hf"
            )
        if not isinstance(lm_head, nn.Linear) or "bias" in dict(lm_head.named_parameters()):
            raise ValueError(f"target {type(self.model).__name__}: expected an lm_head that is a linear map without bias, found {lm_head}")
        return decoder, lm_head

    @torch.inference_mode()
    def _check_projection(self) -> None:
        """The logits must be lm_head(post-norm hidden) and nothing else (no soft cap, no scale): heads assume it."""
        ids_1T = torch.tensor([[0, 1]], device=self.device)
        position_1T = torch.tensor([[0, 1]], device=self.device)
        context = PackedAttention(bounds=(0, 2))
        expected = self.model(input_ids=ids_1T, position_ids=position_1T, use_cache=False, attention_context=context).logits[0]
        found = self.logits(self.forward(ids_1T[0], position_1T[0], PackedAttention(bounds=(0, 2))))
        if not torch.equal(expected.to(found.dtype), found):
            raise ValueError(
                f"target {type(self.model).__name__}: expected logits that are lm_head(last hidden state), found them changed by "
                f"{float((expected - found).abs().max()):.3g} (a soft cap or a scale?); draft heads cannot share this lm_head as it is"
            )

    def forward(self, token_ids_T: torch.Tensor, position_T: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Post-norm hidden states (T, D) of tokens at their positions.

        Errors: ValueError for a position beyond those that the rotary embedding leaves as they are (``check_length``).
        """
        if self.fixed_positions is not None:
            self.check_length(int(position_T.max()) + 1)
        hidden_TD: torch.Tensor = self.decoder(
            input_ids=token_ids_T[None], position_ids=position_T[None], use_cache=False, attention_context=context
        ).last_hidden_state[0]
        return hidden_TD

    def check_length(self, num_tokens: int) -> None:
        """ValueError for a sequence, drafts included, so long that it would turn the other tokens in its forward by other angles."""
        if self.fixed_positions is not None and num_tokens > self.fixed_positions:
            raise ValueError(
                f"target {type(self.model).__name__}: expected sequences of at most {self.fixed_positions} tokens, drafts included, found "
                f"{num_tokens}; beyond them its rotary embedding changes all positions in the forward, and drafts would change the text: "
                "set a lower max_length_tokens or max_new_tokens, or use engine=vllm"
            )

    def forward_with_taps(
        self, token_ids_T: torch.Tensor, position_T: torch.Tensor, context: AttentionContext, target_layer_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``forward``, and the outputs of these layers in the order asked for, (T, L, D); None where none are asked for."""
        with self.tapping(target_layer_ids) as taken:
            hidden_TD = self.forward(token_ids_T, position_T, context)
        if not target_layer_ids:
            return hidden_TD, None
        by_layer = dict(zip(sorted(target_layer_ids), taken, strict=True))
        return hidden_TD, torch.stack([by_layer[index] for index in target_layer_ids], dim=1)

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """The lm_head over rows, (M, V), in the target's dtype."""
        logits_MV: torch.Tensor = self.lm_head(hidden_MD)
        return logits_MV

    @contextmanager
    def tapping(self, target_layer_ids: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """While open, every forward leaves the outputs of these decoder layers, each (T, D), in the list yielded.

        The list is emptied by the caller between forwards. Ids are 0-based, outputs before the final norm.
        """
        for index in target_layer_ids:
            if not 0 <= index < self.num_layers:
                raise ValueError(f"target_layer_ids: expected ids from 0 to {self.num_layers - 1}, found {index}")
        taken: list[torch.Tensor] = []

        def take(module: nn.Module, args: Any, output: Any) -> None:
            taken.append((output[0] if isinstance(output, tuple) else output)[0])

        # Hooks fire in the order of the layers; the order asked for is restored by whoever reads the list.
        handles = [self.decoder.layers[index].register_forward_hook(take) for index in sorted(target_layer_ids)]
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()

    def shared_weights(self) -> SharedWeights:
        """What a head shares with the target: the model's own tensors, not copied."""
        return SharedWeights(
            embedding_VD=self.model.get_input_embeddings().weight,
            lm_head_VD=self.lm_head.weight,
            final_norm_weight_D=self.decoder.norm.weight,
            rms_norm_eps=float(self.model.config.rms_norm_eps),
        )
