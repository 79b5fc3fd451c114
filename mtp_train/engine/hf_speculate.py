"""Speculative decoding in the open: the target verifies chains of a head for many sequences at once, nothing padded.

A round is one forward of the target over each sequence's last token and its K drafted tokens (or a piece of a prompt
that is still being read), the exact rule, and one call of the drafter. As in vLLM every verification has K drafted
tokens, also where the answer ends before; how those are counted says ``acceptance/tally.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mtp_train.acceptance.tally import Tally, keep
from mtp_train.acceptance.verify import probabilities, request_generator, uniforms, verify_greedy, verify_sampled
from mtp_train.decoding.chain import Chain, ChainDrafter, NewBases
from mtp_train.engine.base import SpeculateRequest, SpeculateSettings
from mtp_train.engine.hf_generate import choose, share_rows
from mtp_train.engine.hf_model import TargetModel
from mtp_train.head.base import Head
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.records import PromptAcceptance


class Measured(NamedTuple):
    """Answers in the order of the requests; ``beyond_end`` are the counts with the tokens beyond answers' ends, as
    vLLM counts them (drafted, accepted, each per position); ``num_forwards`` the target's."""

    prompts: list[PromptAcceptance]
    drafted_beyond_end: list[int]
    accepted_beyond_end: list[int]
    wall_s: float
    num_forwards: int


@dataclass(kw_only=True)
class _Sequence:
    """``pending`` are tokens not read by the target: a prompt's rest, or the last token, behind which ``chain`` stands."""

    request: SpeculateRequest
    generator: torch.Generator
    tally: Tally
    pending: list[int]
    new_tokens: list[int] = field(default_factory=list)
    chain: Chain | None = None

    @property
    def drafted(self) -> list[int]:
        return [] if self.chain is None else self.chain.token_ids


class _Piece(NamedTuple):
    """One sequence's part of a round: its rows of hidden states, and what of them is settled for the head."""

    slot: int
    sequence: _Sequence
    share: int
    hidden_RD: torch.Tensor


def merge(parts: Sequence[Measured], *, order: Sequence[str]) -> Measured:
    """Runs over parts of a prompt set as one, the answers in ``order``."""
    prompts = {prompt.prompt_id: prompt for part in parts for prompt in part.prompts}
    return Measured(
        prompts=[prompts[prompt_id] for prompt_id in order],
        drafted_beyond_end=[sum(counts) for counts in zip(*(part.drafted_beyond_end for part in parts), strict=True)],
        accepted_beyond_end=[sum(counts) for counts in zip(*(part.accepted_beyond_end for part in parts), strict=True)],
        wall_s=sum(part.wall_s for part in parts),
        num_forwards=sum(part.num_forwards for part in parts),
    )


class Speculation:
    """One run over a set of requests."""

    def __init__(self, *, target: TargetModel, head: Head, settings: SpeculateSettings, max_prefill_tokens: int, num_slots: int) -> None:
        self.target, self.settings, self.max_prefill_tokens = target, settings, max_prefill_tokens
        self.sampling = settings.sampling
        self.stop_ids = frozenset() if settings.ignore_eos else target.stop_ids
        self.cache = RaggedCache(num_slots=num_slots)
        self.drafter = ChainDrafter(
            head=head,
            num_slots=num_slots,
            num_speculative_tokens=settings.num_speculative_tokens,
            temperature=self.sampling.temperature if settings.draft_sampling == "probabilistic" else 0.0,
            top_p=self.sampling.top_p,
            refresh=settings.refresh,
        )
        self.running: dict[int, _Sequence] = {}
        self.num_forwards = 0
        self.drafted_all = [0] * settings.num_speculative_tokens
        self.accepted_all = [0] * settings.num_speculative_tokens

    @torch.inference_mode()
    def run(self, requests: Sequence[SpeculateRequest], on_answer: Callable[[], object]) -> Measured:
        """Decode all requests; ``on_answer`` is called as each ends."""
        started = time.perf_counter()
        waiting = deque(requests)
        done: dict[str, PromptAcceptance] = {}
        while waiting or self.running:
            for slot in range(self.cache.num_slots):
                if slot not in self.running and waiting:
                    self._admit(slot, waiting.popleft())
            pieces = self._forward()
            reading = [piece for piece in pieces if len(piece.sequence.pending) > piece.share]
            writing = [piece for piece in pieces if len(piece.sequence.pending) == piece.share]
            new = [self._read(piece) for piece in reading]
            for piece, verified in zip(writing, self._verify(writing), strict=True):
                bases = self._write(piece, *verified)
                if bases is None:
                    done[piece.sequence.request.prompt_id] = self._finish(piece.slot)
                    on_answer()
                else:
                    new.append(bases)
            if new:
                for bases, chain in zip(new, self.drafter.propose(new), strict=True):
                    self.running[bases.slot].chain = chain
        return Measured(
            prompts=[done[request.prompt_id] for request in requests],
            drafted_beyond_end=self.drafted_all,
            accepted_beyond_end=self.accepted_all,
            wall_s=time.perf_counter() - started,
            num_forwards=self.num_forwards,
        )

    def _admit(self, slot: int, request: SpeculateRequest) -> None:
        if not request.token_ids:
            raise ValueError(f"prompt {request.prompt_id}: expected at least one token to continue, found none")
        self.cache.clear(slot)
        self.drafter.clear(slot)
        self.running[slot] = _Sequence(
            request=request,
            generator=request_generator(seed=self.sampling.seed, request_id=request.prompt_id),
            tally=Tally(num_speculative_tokens=self.settings.num_speculative_tokens),
            pending=list(request.token_ids),
        )

    def _forward(self) -> list[_Piece]:
        """The target over what each sequence brings: a piece of its prompt, or its last token and its drafts."""
        shares = share_rows([len(sequence.pending) for sequence in self.running.values()], budget=self.max_prefill_tokens)
        rows_of = zip(self.running.items(), shares, strict=True)
        active = sorted(((slot, sequence, share) for (slot, sequence), share in rows_of if share), key=lambda entry: entry[0])
        counts = [share + len(sequence.drafted) for _, sequence, share in active]
        context = RaggedAttention(cache=self.cache, slots=[slot for slot, _, _ in active], counts=counts)
        token_ids = [token for _, sequence, share in active for token in (*sequence.pending[:share], *sequence.drafted)]
        device = self.target.device
        hidden_TD = self.target.forward(torch.tensor(token_ids, device=device), context.positions(device), context)
        context.commit()
        self.num_forwards += 1
        rows = hidden_TD.split(counts)
        return [_Piece(slot, sequence, share, hidden_RD) for (slot, sequence, share), hidden_RD in zip(active, rows, strict=True)]

    def _read(self, piece: _Piece) -> NewBases:
        """A prompt is not at its end: all its rows are bases, since the token behind each is known."""
        sequence = piece.sequence
        token_ids = sequence.pending[1 : piece.share + 1]
        del sequence.pending[: piece.share]
        return NewBases(slot=piece.slot, token_ids=token_ids, hidden_BD=piece.hidden_RD, drafts=False)

    def _verify(self, writing: Sequence[_Piece]) -> list[tuple[int, int]]:
        """How many drafts of each are accepted, and the target's own token behind them."""
        if not writing:
            return []
        drafts = [piece.sequence.drafted for piece in writing]
        logits_RV = self.target.logits(torch.cat([piece.hidden_RD[piece.share - 1 :] for piece in writing]))
        generators = [piece.sequence.generator for piece in writing]
        if self.sampling.temperature == 0:
            verified = verify_greedy(best_R=choose(logits_RV, generators, temperature=0.0, top_p=1.0), drafts=drafts)
        else:
            q_rows = [piece.sequence.chain.q_KV for piece in writing if piece.sequence.chain is not None]
            one_hot = self.settings.draft_sampling == "greedy"
            verified = verify_sampled(
                p_RV=probabilities(logits_RV, temperature=self.sampling.temperature, top_p=self.sampling.top_p),
                q_QV=None if one_hot else _stack(q_rows, logits_RV.shape[1], logits_RV.device),
                drafts=drafts,
                uniform_R=uniforms(generators, [len(tokens) + 1 for tokens in drafts]),
            )
        return list(zip(*verified, strict=True))

    def _write(self, piece: _Piece, num_accepted: int, next_token: int) -> NewBases | None:
        """Take the verified tokens; returns the bases that they settle, None where the answer ends."""
        sequence, drafted = piece.sequence, piece.sequence.drafted
        tokens = [*drafted[:num_accepted], next_token]
        remaining = self.sampling.max_new_tokens - len(sequence.new_tokens)
        num_kept, reason = keep(tokens, remaining=remaining, stop_ids=self.stop_ids)
        if drafted:
            room = min(len(drafted), remaining)
            sequence.tally.verification(num_drafted=room, num_accepted=min(num_accepted, room), num_kept=num_kept)
            for position in range(len(drafted)):
                self.drafted_all[position] += 1
                self.accepted_all[position] += position < num_accepted
        else:
            sequence.tally.first_token()
        sequence.new_tokens += tokens[:num_kept]
        if reason is not None:
            return None
        # Of the rows just run, those of the tokens known before and of the accepted drafts are settled.
        num_settled = piece.share + num_accepted
        self.cache.truncate(piece.slot, self.cache.lengths[piece.slot] - (len(drafted) - num_accepted))
        held = self.drafter.settle(piece.slot, num_accepted) if drafted else 0
        token_ids = [*sequence.pending[1:], *tokens]
        sequence.pending, sequence.chain = [next_token], None
        return NewBases(
            slot=piece.slot,
            token_ids=token_ids[held:],
            hidden_BD=piece.hidden_RD[held:num_settled],
            drafts=True,
            generator=sequence.generator,
        )

    def _finish(self, slot: int) -> PromptAcceptance:
        sequence = self.running.pop(slot)
        request = sequence.request
        return sequence.tally.result(
            prompt_id=request.prompt_id,
            category=request.category,
            num_prompt_tokens=len(request.token_ids),
            token_ids=sequence.new_tokens,
        )


def _stack(q_rows: Sequence[torch.Tensor | None], vocabulary: int, device: torch.device) -> torch.Tensor:
    kept = [q_KV for q_KV in q_rows if q_KV is not None]
    assert len(kept) == len(q_rows), "probabilistic drafts carry their q"
    return torch.cat(kept) if kept else torch.zeros((0, vocabulary), device=device)
