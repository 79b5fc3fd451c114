"""Continuous batching: sequences of any length share a ragged KV cache; whoever ends makes room for the next request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from mtp_train.acceptance.tally import keep
from mtp_train.acceptance.verify import check_finite, draw, probabilities, request_generator, uniforms
from mtp_train.engine.base import Generated, GenerateRequest, Sampling
from mtp_train.engine.hf_model import TargetModel
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.runtime import progress

# Told of each forward: prompt tokens read, tokens written, and tokens that answers which ended had still been allowed.
Watch = Callable[[int, int, int], None]


@dataclass(kw_only=True)
class _Sequence:
    """A request being answered; ``pending`` are the tokens that the target has not read yet."""

    request: GenerateRequest
    limit: int
    generator: torch.Generator
    pending: list[int]
    new_tokens: list[int] = field(default_factory=list)


def share_rows(num_pending: Sequence[int], *, budget: int) -> list[int]:
    """How many pending tokens each sequence brings to the next forward, in order, ``budget`` in all.

    Those with one row (they decode) always come; prompts share what is left, first come first served.
    """
    left = max(budget - sum(1 for count in num_pending if count == 1), 1)
    shares = []
    for count in num_pending:
        share = 1 if count == 1 else min(count, left)
        left -= share if count > 1 else 0
        shares.append(share)
    return shares


def check_tokens(token_ids: Sequence[int], *, num_rows: int, where: str) -> None:
    """ValueError for a prompt without tokens, or with one that the target's embedding of ``num_rows`` rows does not have."""
    if not token_ids:
        raise ValueError(f"{where}: expected at least one token to continue, found none")
    if (least := min(token_ids)) < 0 or max(token_ids) >= num_rows:
        raise ValueError(
            f"{where}: expected token ids from 0 to {num_rows - 1}, which the target has, found {least if least < 0 else max(token_ids)}; "
            "encode the prompt with the target's own tokenizer"
        )


def choose(logits_MV: torch.Tensor, generators: Sequence[torch.Generator], *, temperature: float, top_p: float) -> list[int]:
    """The next token of each row: the argmax, or drawn by the row's own generator."""
    if temperature == 0:
        return logits_MV.max(-1).indices.tolist()
    return draw(probabilities(logits_MV, temperature=temperature, top_p=top_p), uniforms(generators, [1] * len(generators))).tolist()


@torch.inference_mode()
def generate(
    target: TargetModel,
    requests: Sequence[GenerateRequest],
    sampling: Sampling,
    *,
    batch_size: int,
    max_prefill_tokens: int,
    ignore_eos: bool = False,
    watch: Watch = lambda read, written, spared: None,
) -> Iterator[Generated]:
    """Continue every request, at most ``batch_size`` at a time; yields each as it ends."""
    stop_ids = frozenset() if ignore_eos else target.stop_ids
    waiting = deque(requests)
    cache = RaggedCache(num_slots=min(batch_size, len(requests)))
    running: dict[int, _Sequence] = {}
    while waiting or running:
        for slot in range(cache.num_slots):
            if slot not in running and waiting:
                cache.clear(slot)
                running[slot] = _start(waiting.popleft(), sampling, num_rows=target.num_rows)
        # By slot: neighbours attend together.
        active = sorted((entry for entry in _shares(running, max_prefill_tokens) if entry[2]), key=lambda entry: entry[0])
        slots, counts = [slot for slot, _, _ in active], [share for _, _, share in active]
        context = RaggedAttention(cache=cache, slots=slots, counts=counts)
        token_ids = [token for _, sequence, share in active for token in sequence.pending[:share]]
        hidden_TD = target.forward(torch.tensor(token_ids, device=target.device), context.positions(target.device), context)
        context.commit()

        num_read = sum(share for _, sequence, share in active if not sequence.new_tokens)
        ready, rows, row = [], [], -1
        for slot, sequence, share in active:
            row += share
            del sequence.pending[:share]
            if not sequence.pending:
                ready.append((slot, sequence))
                rows.append(row)
        if not ready:
            watch(num_read, 0, 0)
            continue
        logits_MV = target.logits(hidden_TD[torch.tensor(rows, device=target.device)])
        check_finite(logits_MV, of="target")
        tokens = choose(logits_MV, [sequence.generator for _, sequence in ready], temperature=sampling.temperature, top_p=sampling.top_p)
        ended: list[Generated] = []
        num_spared = 0
        for (slot, sequence), token in zip(ready, tokens, strict=True):
            _, reason = keep([token], remaining=sequence.limit - len(sequence.new_tokens), stop_ids=stop_ids)
            sequence.new_tokens.append(token)
            sequence.pending.append(token)
            if reason is not None:
                del running[slot]
                num_spared += sequence.limit - len(sequence.new_tokens)
                written = tuple(sequence.new_tokens)
                ended.append(Generated(request_id=sequence.request.request_id, token_ids=written, finish_reason=reason))
        watch(num_read, len(ready), num_spared)
        yield from ended


@contextmanager
def watched(*, num_prompt_tokens: int, most_new_tokens: int, desc: str) -> Iterator[Watch]:
    """A bar over the tokens that prompts may be answered with, which are fewer with every answer that ends early; before the first
    is written it says how much of the prompts is read."""
    num_read = 0
    with progress(desc=desc, unit="tok", total=most_new_tokens) as bar:

        def watch(read: int, written: int, spared: int) -> None:
            nonlocal num_read
            num_read += read
            bar.total -= spared
            if read:
                bar.set_postfix_str(f"prompts read: {num_read / num_prompt_tokens:.0%}", refresh=False)
            bar.update(written)

        yield watch


def _start(request: GenerateRequest, sampling: Sampling, *, num_rows: int) -> _Sequence:
    check_tokens(request.token_ids, num_rows=num_rows, where=f"request {request.request_id}")
    limit = min(request.max_new_tokens, sampling.max_new_tokens)
    if limit < 1:
        raise ValueError(
            f"request {request.request_id}: expected room for at least one new token, found max_new_tokens={request.max_new_tokens}"
        )
    generator = request_generator(seed=sampling.seed, request_id=request.request_id)
    return _Sequence(request=request, limit=limit, generator=generator, pending=list(request.token_ids))


def _shares(running: dict[int, _Sequence], budget: int) -> Iterator[tuple[int, _Sequence, int]]:
    shares = share_rows([len(sequence.pending) for sequence in running.values()], budget=budget)
    for (slot, sequence), share in zip(running.items(), shares, strict=True):
        yield slot, sequence, share
