"""32k tokens in one sample on one device: memory grows with the tokens, not with their square nor with the vocabulary."""

from __future__ import annotations

import pytest
import torch

from mtp_train.nn.attention import PackedAttention
from mtp_train.trainer.peak import peak_bytes
from mtp_train.trainer.random_step import RandomStep, StepSizes

SIZE, CHUNK_ROWS = 32, 64
MB = 2**20


def train(
    *, num_tokens: int, recompute: bool, vocab_size: int = 4_096, counts_every: int = 16, counts_from: int = 0
) -> tuple[float, float]:
    """Megabytes held at the fullest moment of one step, and the gradient's norm."""
    sizes = StepSizes(
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        hidden_size=SIZE,
        intermediate_size=4 * SIZE,
        num_heads=2,
        num_kv_heads=1,
        counts_every=counts_every,
        counts_from=counts_from,
        draft_steps=1,
        chunk_rows=CHUNK_ROWS,
        precision="bf16",
        recompute=recompute,
    )
    step = RandomStep(sizes, device=torch.device("cpu"))
    most = peak_bytes(step, device=torch.device("cpu"))
    return most / MB, float(torch.nn.utils.get_total_norm([parameter.grad for parameter in step.head.parameters()]))


def test_32k_tokens_take_four_times_the_memory_of_8k() -> None:
    short, _ = train(num_tokens=8_192, recompute=True)
    long, _ = train(num_tokens=32_768, recompute=True)
    assert long < 4.2 * short
    assert long < 80  # the scores of all pairs of tokens would be 2048 MB in bfloat16


def test_activations_computed_again_take_less_memory_and_give_the_same() -> None:
    plain, plain_norm = train(num_tokens=8_192, recompute=False)
    again, again_norm = train(num_tokens=8_192, recompute=True)
    assert again_norm == pytest.approx(plain_norm, rel=1e-3)
    assert again < 0.75 * plain  # a stretch of 2048 rows and a chunk's logits are a good part here


def test_memory_holds_a_chunk_s_logits_and_not_all() -> None:
    """Every token counts: all logits would be 256 MB on either side."""
    small, _ = train(num_tokens=8_192, vocab_size=1_024, recompute=True, counts_every=1)
    large, _ = train(num_tokens=8_192, vocab_size=8_192, recompute=True, counts_every=1)
    assert large - small < 8 * CHUNK_ROWS * 7_168 * 4 / MB


def test_a_long_prompt_asks_nothing_and_the_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows give keys and values alone: less is kept, and the gradient is that of a step in which they ask, to bf16's rounding."""
    asks, asks_norm = train(num_tokens=8_192, recompute=False, counts_from=7_900)
    monkeypatch.setattr(PackedAttention, "ask", lambda self, wanted: None)
    whole, whole_norm = train(num_tokens=8_192, recompute=False, counts_from=7_900)
    assert asks_norm == pytest.approx(whole_norm, rel=2e-3) and asks_norm != whole_norm
    assert asks < whole
