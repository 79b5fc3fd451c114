"""A cache of random text through a random target, of any size: what speed is measured on where no model is at hand.

Token ids fall off as 1 / rank. The target's state at a position is a fixed linear map of its own and the previous token's
embedding, normed, so that a head has something to learn; its logits have a standard deviation of 4, which gives the most
probable token of some 50,000 a probability about as real models do. Lengths are log-normal, cut at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_train.batch.shift import teacher_rows
from mtp_train.cache.format import FORMAT_VERSION, CacheIdentity
from mtp_train.cache.plan import PlannedSample, content_hash
from mtp_train.cache.writer import CacheWriter
from mtp_train.records import Sample, Teacher
from mtp_train.target.weights import SharedWeights

_LOGIT_STD = 4.0
_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class RandomTarget:
    """The sizes of a Llama-shaped target with tied embeddings."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    num_layers: int

    def write_config(self, folder: Path) -> None:
        """``config.json``, which is all that heads read of a target beside the shared weights."""
        from transformers import LlamaConfig

        LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            num_hidden_layers=self.num_layers,
            tie_word_embeddings=True,
        ).save_pretrained(folder)

    def shared(self, *, seed: int) -> SharedWeights:
        """Embedding and lm_head, float32, the same tensor."""
        draw = torch.Generator().manual_seed(seed)
        table_VD = torch.randn(self.vocab_size, self.hidden_size, generator=draw) * (_LOGIT_STD / math.sqrt(self.hidden_size))
        return SharedWeights(
            embedding_VD=table_VD, lm_head_VD=table_VD, final_norm_weight_D=torch.ones(self.hidden_size), rms_norm_eps=1e-5
        )


@dataclass(frozen=True, kw_only=True)
class RandomText:
    """How much text and of what lengths: log-normal of ``median`` and ``spread`` (of the logarithm), from ``shortest`` to
    ``longest`` tokens; the last ``answer_share`` of each sample is the target's own."""

    num_samples: int
    median: int
    spread: float
    shortest: int
    longest: int
    answer_share: float

    def lengths(self, *, seed: int) -> list[int]:
        draw = torch.Generator().manual_seed(seed)
        drawn = self.median * (torch.randn(self.num_samples, generator=draw) * self.spread).exp()
        lengths: list[int] = drawn.round().long().clamp(self.shortest, self.longest).tolist()
        return lengths


def write_random_cache(
    path: Path, *, target: RandomTarget, text: RandomText, num_taps: int, top_k: int, codec: str, shard_tokens: int, seed: int
) -> None:
    """Write the cache; the teacher's candidates are those of the states themselves through the lm_head."""
    lengths = text.lengths(seed=seed)
    tokens = [_tokens(length, vocab_size=target.vocab_size, seed=seed + number) for number, length in enumerate(lengths)]
    masks = [torch.arange(length) >= round(length * (1 - text.answer_share)) for length in lengths]
    identity = CacheIdentity(
        format_version=FORMAT_VERSION,
        target_name="random",
        target_fingerprint=f"random {target} {seed}",
        tokenizer_hash="random",
        template_hash="random",
        hidden_state="post_norm",
        target_layer_ids=tuple(range(num_taps)),
        dtype="bfloat16",
        codec=codec,
        top_k=top_k,
        engine="random",
        engine_version=torch.__version__,
        quantization=None,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        git_commit=None,
    )
    planned = [
        PlannedSample(f"random-{number}", len(ids), content_hash(ids.tolist(), mask.tolist()))
        for number, (ids, mask) in enumerate(zip(tokens, masks, strict=True))
    ]
    writer = CacheWriter(path=path, identity=identity, samples=planned, shard_tokens=shard_tokens)
    samples = _samples(target, tokens, masks, num_taps=num_taps, top_k=top_k, seed=seed)
    for index, sample_ids in writer.missing_shards():
        writer.write_shard(index, (next(samples) for _ in sample_ids))
    writer.finish()


def _tokens(length: int, *, vocab_size: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (vocab_size ** torch.rand(length, generator=draw, dtype=torch.float64) - 1).long().clamp(0, vocab_size - 1)


def _samples(
    target: RandomTarget, tokens: list[torch.Tensor], masks: list[torch.Tensor], *, num_taps: int, top_k: int, seed: int
) -> Iterator[Sample]:
    shared, draw = target.shared(seed=seed), torch.Generator().manual_seed(seed + 1)
    size = target.hidden_size
    maps = [torch.randn(size, size, generator=draw) / math.sqrt(size) for _ in range(2 + num_taps)]
    lm_head_VD = shared.lm_head_VD.bfloat16()
    for number, (ids_T, mask_T) in enumerate(zip(tokens, masks, strict=True)):
        embed_TD = shared.embedding_VD[ids_T]
        raw_TD = embed_TD @ maps[0] + 0.5 * embed_TD.roll(1, 0) @ maps[1]
        hidden_TD = (raw_TD * raw_TD.square().mean(-1, keepdim=True).rsqrt()).bfloat16()
        row_M = teacher_rows(mask_T)
        tops = [_top(hidden_TD[rows] @ lm_head_VD.T, top_k) for rows in row_M.split(_ROWS)]
        yield Sample(
            sample_id=f"random-{number}",
            token_ids_T=ids_T,
            loss_mask_T=mask_T,
            hidden_TD=hidden_TD,
            taps_TLD=torch.stack([embed_TD @ tap for tap in maps[2:]], 1).bfloat16() if num_taps else None,
            teacher=Teacher(
                row_M=row_M,
                ids_MC=torch.cat([top[0] for top in tops]),
                log_probs_MC=torch.cat([top[1] for top in tops]),
                log_sum_exp_M=torch.cat([top[2] for top in tops]),
            ),
        )


def _top(logits_RV: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, log-probabilities and log-sum-exp of the most probable tokens."""
    log_sum_exp_R = logits_RV.float().logsumexp(-1)
    values, ids = logits_RV.float().topk(top_k)
    return ids, values - log_sum_exp_R[:, None], log_sum_exp_R
