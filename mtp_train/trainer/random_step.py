"""One training step over random hidden states, of any size: what memory and speed are measured with."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_train.batch.packing import pack
from mtp_train.head.mtp import Mtp
from mtp_train.loss.forward_kl import ForwardKl
from mtp_train.records import Sample
from mtp_train.target.weights import SharedWeights
from mtp_train.trainer.module import TrainingModule, compute_dtype
from mtp_train.trainer.objective import Objective, Term
from mtp_train.trainer.rows import align
from mtp_train.trainer.settings import Precision


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """A Llama-shaped target, head ``mtp`` and ``forward_kl`` over one sample of ``num_tokens``, every ``counts_every``-th of which
    counts, from token ``counts_from`` on. ``recompute`` as ``checkpoint_activations`` of ``conf/train.yaml``."""

    num_tokens: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    counts_every: int
    counts_from: int
    draft_steps: int
    chunk_rows: int
    precision: Precision
    recompute: bool


class RandomStep:
    """Call it for a forward and a backward; gradients are then in ``head``."""

    def __init__(self, sizes: StepSizes, *, device: torch.device) -> None:
        self.head = random_head(sizes, device=device)
        objective = Objective(
            terms={"forward_kl": Term(1.0, ForwardKl())}, draft_steps=sizes.draft_steps, decay=0.8, chunk_rows=sizes.chunk_rows
        )
        self._module = TrainingModule(head=self.head, objective=objective, precision=sizes.precision).to(device)
        draw, number_T = torch.Generator().manual_seed(0), torch.arange(sizes.num_tokens)
        sample = Sample(
            sample_id="random",
            token_ids_T=torch.randint(0, sizes.vocab_size, (sizes.num_tokens,), generator=draw),
            loss_mask_T=(number_T % sizes.counts_every == 0) & (number_T >= sizes.counts_from),
            hidden_TD=torch.randn(sizes.num_tokens, sizes.hidden_size, generator=draw).bfloat16(),
        )
        aligned = align(pack([sample]), draft_steps=sizes.draft_steps, need_top=False)
        self._scale_K = (1.0 / aligned.counts_K.float()).to(device)
        self._pack = aligned.to(device)

    def __call__(self) -> None:
        self._module(self._pack, self._scale_K, measure=False).loss.backward()


def random_head(sizes: StepSizes, *, device: torch.device) -> Mtp:
    """The head over a random embedding, which is also its lm_head."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        num_hidden_layers=1,
        initializer_range=0.2,
        max_position_embeddings=sizes.num_tokens,
    )
    table_VD = torch.randn(sizes.vocab_size, sizes.hidden_size, generator=torch.Generator().manual_seed(1))
    shared = SharedWeights(
        embedding_VD=table_VD, lm_head_VD=table_VD, final_norm_weight_D=torch.ones(sizes.hidden_size), rms_norm_eps=config.rms_norm_eps
    ).to(device=device, dtype=compute_dtype(sizes.precision))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        head = Mtp(
            target_path=Path(folder),
            shared=shared,
            norms=dict.fromkeys(("embed", "hidden", "input", "output", "feedback"), True),
            column_order="hidden_embed",
            zero_first_embedding=True,
            init="random",
            seed=0,
            trust_remote_code=False,
        )
    if sizes.recompute:
        head.recompute_activations(depths=sizes.draft_steps > 1)
    return head
