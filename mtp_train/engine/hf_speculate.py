"""Speculative decoding in the open: the target verifies drafts of many sequences at once, chains and trees, nothing padded.

A round is one forward of the target over each sequence's last token and its drafted tokens (or a piece of a prompt that is
still being read), the exact rule, and one call of the drafter. Behind a draft that is a tree, the KV cache is brought
together to the accepted path. Drafts are as long where the answer ends before, as in vLLM; how those are counted says
``acceptance/tally.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mtp_train.acceptance.draft import Draft, Judged
from mtp_train.acceptance.tally import Tally, keep
from mtp_train.acceptance.verify import request_generator
from mtp_train.decoding.base import NewBases
from mtp_train.engine.base import SpeculateRequest, SpeculateSettings
from mtp_train.engine.hf_generate import Watch, check_tokens, share_rows
from mtp_train.engine.hf_model import TargetModel
from mtp_train.engine.hf_verify import judge
from mtp_train.head.base import Head
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.nn.tree import Tree
from mtp_train.records import PromptAcceptance

_NO_DRAFT = Draft(token_ids=[], parents=[])


class Measured(NamedTuple):
    """Answers in the order of the requests; ``beyond_end`` are the counts with the tokens beyond answers' ends, as
    vLLM counts them (drafted, accepted, each per position); ``num_nodes`` the drafted tokens that were judged in all,
    ``num_forwards`` the target's."""

    prompts: list[PromptAcceptance]
    drafted_beyond_end: list[int]
    accepted_beyond_end: list[int]
    num_nodes: int
    wall_s: float
    num_forwards: int


@dataclass(kw_only=True)
class _Sequence:
    """``pending`` are tokens not read by the target: a prompt's rest, or the last token, behind which ``draft`` stands."""

    request: SpeculateRequest
    generator: torch.Generator
    tally: Tally
    pending: list[int]
    new_tokens: list[int] = field(default_factory=list)
    draft: Draft | None = None

    @property
    def drafted(self) -> Draft:
        return _NO_DRAFT if self.draft is None else self.draft


class _Piece(NamedTuple):
    """One sequence's part of a round: its rows, those of its ``share`` pending tokens and of its draft, as the target gives them
    and as the head reads them."""

    slot: int
    sequence: _Sequence
    share: int
    hidden_RD: torch.Tensor
    read_RD: torch.Tensor


def merge(parts: Sequence[Measured], *, order: Sequence[str]) -> Measured:
    """Runs over parts of a prompt set as one, the answers in ``order``."""
    prompts = {prompt.prompt_id: prompt for part in parts for prompt in part.prompts}
    return Measured(
        prompts=[prompts[prompt_id] for prompt_id in order],
        drafted_beyond_end=[sum(counts) for counts in zip(*(part.drafted_beyond_end for part in parts), strict=True)],
        accepted_beyond_end=[sum(counts) for counts in zip(*(part.accepted_beyond_end for part in parts), strict=True)],
        num_nodes=sum(part.num_nodes for part in parts),
        wall_s=sum(part.wall_s for part in parts),
        num_forwards=sum(part.num_forwards for part in parts),
    )


class Speculation:
    """One run over a set of requests. ``head`` is None for schemes that need none."""

    def __init__(
        self, *, target: TargetModel, head: Head | None, settings: SpeculateSettings, max_prefill_tokens: int, num_slots: int
    ) -> None:
        self.target, self.head, self.settings, self.max_prefill_tokens = target, head, settings, max_prefill_tokens
        self.sampling = settings.sampling
        self.stop_ids = frozenset() if settings.ignore_eos else target.stop_ids
        self.cache = RaggedCache(num_slots=num_slots)
        self.drafter = settings.decoding.drafter(
            head=head,
            num_slots=num_slots,
            temperature=self.sampling.temperature if settings.draft_sampling == "probabilistic" else 0.0,
            top_p=self.sampling.top_p,
        )
        self.running: dict[int, _Sequence] = {}
        self.num_forwards = self.num_nodes = 0
        self.drafted_all = [0] * settings.num_speculative_tokens
        self.accepted_all = [0] * settings.num_speculative_tokens

    @torch.inference_mode()
    def run(self, requests: Sequence[SpeculateRequest], watch: Watch) -> Measured:
        """Decode all requests."""
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
            num_read = sum(piece.share for piece in pieces if not piece.sequence.new_tokens)
            num_written, num_spared = -sum(len(piece.sequence.new_tokens) for piece in writing), 0
            new = [self._read(piece) for piece in reading]
            for piece, judged, observed in zip(writing, self._verify(writing), self._observe(writing), strict=True):
                bases = self._write(piece, judged, observed)
                if bases is None:
                    done[piece.sequence.request.prompt_id] = self._finish(piece.slot)
                    num_spared += self.sampling.max_new_tokens - len(piece.sequence.new_tokens)
                else:
                    new.append(bases)
            if new:
                for bases, draft in zip(new, self.drafter.propose(new), strict=True):
                    self.running[bases.slot].draft = draft
            num_written += sum(len(piece.sequence.new_tokens) for piece in writing)
            watch(num_read, num_written, num_spared)
        return Measured(
            prompts=[done[request.prompt_id] for request in requests],
            drafted_beyond_end=self.drafted_all,
            accepted_beyond_end=self.accepted_all,
            num_nodes=self.num_nodes,
            wall_s=time.perf_counter() - started,
            num_forwards=self.num_forwards,
        )

    def _admit(self, slot: int, request: SpeculateRequest) -> None:
        check_tokens(request.token_ids, num_rows=self.target.num_rows, where=f"prompt {request.prompt_id}")
        self.cache.clear(slot)
        self.drafter.begin(slot, request.token_ids)
        self.running[slot] = _Sequence(
            request=request,
            generator=request_generator(seed=self.sampling.seed, request_id=request.prompt_id),
            tally=Tally(num_speculative_tokens=self.settings.num_speculative_tokens),
            pending=list(request.token_ids),
        )

    def _forward(self) -> list[_Piece]:
        """The target over what each sequence brings: a piece of its prompt, or its last token and its draft."""
        shares = share_rows([len(sequence.pending) for sequence in self.running.values()], budget=self.max_prefill_tokens)
        rows_of = zip(self.running.items(), shares, strict=True)
        active = sorted(((slot, sequence, share) for (slot, sequence), share in rows_of if share), key=lambda entry: entry[0])
        counts = [share + len(sequence.drafted.token_ids) for _, sequence, share in active]
        trees = [_tree(sequence.drafted) for _, sequence, _ in active]
        context = RaggedAttention(cache=self.cache, slots=[slot for slot, _, _ in active], counts=counts, trees=trees)
        token_ids = [token for _, sequence, share in active for token in (*sequence.pending[:share], *sequence.drafted.token_ids)]
        device = self.target.device
        layer_ids = () if self.head is None else self.head.target_layer_ids
        token_ids_T = torch.tensor(token_ids, device=device)
        hidden_TD, taps_TLD = self.target.forward_with_taps(token_ids_T, context.positions(device), context, layer_ids)
        read_TD = hidden_TD if self.head is None else self.head.read_target(hidden_TD, taps_TLD)
        context.commit()
        self.num_forwards += 1
        rows = zip(active, hidden_TD.split(counts), read_TD.split(counts), strict=True)
        return [_Piece(*piece, hidden_RD, read_RD) for piece, hidden_RD, read_RD in rows]

    def _read(self, piece: _Piece) -> NewBases:
        """A prompt is not at its end: all its rows are bases, since the token behind each is known."""
        sequence = piece.sequence
        token_ids = sequence.pending[1 : piece.share + 1]
        del sequence.pending[: piece.share]
        return NewBases(slot=piece.slot, token_ids=token_ids, hidden_BD=piece.read_RD, drafts=False)

    def _verify(self, writing: Sequence[_Piece]) -> list[Judged]:
        """What of each draft is accepted, and the target's own token behind it."""
        if not writing:
            return []
        drafts = [piece.sequence.drafted for piece in writing]
        rows = [piece.hidden_RD[piece.share - 1 : piece.share + draft.num_candidates] for piece, draft in zip(writing, drafts, strict=True)]
        return judge(drafts, self.target.logits(torch.cat(rows)), [piece.sequence.generator for piece in writing], self.sampling)

    def _observe(self, writing: Sequence[_Piece]) -> list[list[int]]:
        """The target's argmax behind the nodes that each draft asks for."""
        asked = [[piece.share + node for node in piece.sequence.drafted.observed] for piece in writing]
        if not any(asked):
            return asked
        hidden = [
            piece.hidden_RD[torch.tensor(rows, device=self.target.device)] for piece, rows in zip(writing, asked, strict=True) if rows
        ]
        best = iter(self.target.logits(torch.cat(hidden)).max(-1).indices.tolist())
        return [[next(best) for _ in rows] for rows in asked]

    def _write(self, piece: _Piece, judged: Judged, observed: Sequence[int]) -> NewBases | None:
        """Take the verified tokens; returns the bases that they settle, None where the answer ends."""
        sequence, draft, path = piece.sequence, piece.sequence.drafted, judged.path
        tokens = [*(draft.token_ids[node] for node in path), judged.next_token]
        remaining = self.sampling.max_new_tokens - len(sequence.new_tokens)
        num_kept, reason = keep(tokens, remaining=remaining, stop_ids=self.stop_ids)
        if depth := draft.depth:
            room = min(depth, remaining)
            sequence.tally.verification(num_drafted=room, num_accepted=min(len(path), room), num_kept=num_kept)
            self.num_nodes += draft.num_candidates
            for position in range(depth):
                self.drafted_all[position] += 1
                self.accepted_all[position] += position < len(path)
        else:
            sequence.tally.first_token()
        sequence.new_tokens += tokens[:num_kept]
        if reason is not None:
            return None
        # Of the rows just run, those of the tokens known before and of the accepted nodes are settled.
        self.cache.keep(piece.slot, self.cache.lengths[piece.slot] - len(draft.token_ids), path)
        held = self.drafter.settle(piece.slot, path, observed) if sequence.draft is not None else 0
        settled = [*range(piece.share), *(piece.share + node for node in path)][held:]
        token_ids = [*sequence.pending[1:], *tokens]
        sequence.pending, sequence.draft = [judged.next_token], None
        return NewBases(
            slot=piece.slot,
            token_ids=token_ids[held:],
            hidden_BD=piece.read_RD[torch.tensor(settled, device=piece.read_RD.device)],
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


def _tree(draft: Draft) -> Tree | None:
    """The rows of a sequence's last token and of its draft; None where each follows the one before."""
    return None if draft.is_chain else Tree([-1, *(parent + 1 for parent in draft.parents)])
