"""``decoding=chain``: a head proposes K tokens one after the other, for several sequences at once.

A round brings the bases that the last verification settled; the last of them gives the first draft, and each further one is
drafted from the head's own hidden state and last draft (``head_rows.py``). Parallel heads say all tokens at once; a chain of
theirs takes one of each, as vLLM's ``medusa`` method does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_train.acceptance.draft import ROOT, Draft, chain
from mtp_train.acceptance.verify import draw, probabilities, uniforms
from mtp_train.decoding.base import Decoding, Drafter, NewBases, check_at_least
from mtp_train.decoding.head_rows import HeadRows, Reading
from mtp_train.decoding.parallel_drafter import ParallelDrafter
from mtp_train.head.base import Head, ParallelHead
from mtp_train.nn.ragged import RaggedCache


@dataclass(frozen=True, kw_only=True)
class Chain(Decoding):
    """Chains of ``num_speculative_tokens`` from a head. ``refresh``: after a verification the head reads the accepted tokens
    again with the target's hidden states, as engines do; False measures what that is worth."""

    word = "chain"
    shape = "chain"
    needs_head = True
    draws = True

    num_speculative_tokens: int
    refresh: bool

    def __post_init__(self) -> None:
        check_at_least(1, {"num_speculative_tokens": self.num_speculative_tokens})

    @property
    def depth(self) -> int:
        return self.num_speculative_tokens

    @property
    def num_nodes(self) -> int:
        return self.num_speculative_tokens

    def drafter(self, *, head: Head | None, num_slots: int, temperature: float, top_p: float) -> Drafter:
        assert head is not None
        if isinstance(head, ParallelHead):
            return ParallelChainDrafter(settings=self, head=head, temperature=temperature, top_p=top_p)
        return ChainDrafter(
            head=head,
            num_slots=num_slots,
            num_speculative_tokens=self.num_speculative_tokens,
            temperature=temperature,
            top_p=top_p,
            refresh=self.refresh,
        )


class ChainDrafter(Drafter):
    """Drafts chains for up to ``num_slots`` sequences."""

    def __init__(self, *, head: Head, num_slots: int, num_speculative_tokens: int, temperature: float, top_p: float, refresh: bool) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.temperature, self.top_p = temperature, top_p
        self.rows = HeadRows(head=head, num_slots=num_slots, refresh=refresh)

    @property
    def cache(self) -> RaggedCache:
        return self.rows.cache

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self.rows.begin(slot, token_ids)

    def settle(self, slot: int, path: Sequence[int], observed: Sequence[int]) -> int:
        return self.rows.settle(slot, path)

    @torch.inference_mode()
    def propose(self, new: Sequence[NewBases]) -> list[Draft | None]:
        drafting, hidden_BD, feedback_BD = self.rows.enter(new)
        drafts: list[Draft | None] = [None] * len(new)
        if not drafting:
            return drafts
        slots = [new[index].slot for index in drafting]
        generators = [new[index].generator for index in drafting]
        steps: list[_Step] = []
        for depth in range(self.num_speculative_tokens):
            if depth:
                parent = depth - 2 if depth > 1 else ROOT
                readings = [Reading(slot, [depth - 1], [parent], [token]) for slot, token in zip(slots, steps[-1][0], strict=True)]
                hidden_BD, feedback_BD = self.rows.read(readings, feedback_BD)
            steps.append(_choose(self.rows.logits(hidden_BD), generators, temperature=self.temperature, top_p=self.top_p))
        for index, draft in zip(drafting, _chains(steps), strict=True):
            drafts[index] = draft
        return drafts


class ParallelChainDrafter(ParallelDrafter):
    """Takes one token of each parallel head: its most probable one, or drawn from its q, which hangs on no other draft."""

    def __init__(self, *, settings: Chain, head: ParallelHead, temperature: float, top_p: float) -> None:
        if settings.depth > head.num_ahead:
            raise ValueError(
                f"decoding.num_speculative_tokens: expected at most {head.num_ahead}, which this head speaks about at once, "
                f"found {settings.depth}"
            )
        super().__init__(head=head, temperature=temperature, top_p=top_p)
        self.depth = settings.depth

    def _form(self, logits_KBV: torch.Tensor, new: Sequence[NewBases]) -> list[Draft]:
        generators = [bases.generator for bases in new]
        steps = [_choose(logits, generators, temperature=self.temperature, top_p=self.top_p) for logits in logits_KBV[: self.depth]]
        return _chains(steps)


# Of one depth: a token for each sequence, and what they were drawn from (None: chosen).
_Step = tuple[list[int], torch.Tensor | None]


def _choose(logits_BV: torch.Tensor, generators: Sequence[torch.Generator | None], *, temperature: float, top_p: float) -> _Step:
    if temperature == 0:
        return logits_BV.max(-1).indices.tolist(), None
    q_BV = probabilities(logits_BV, temperature=temperature, top_p=top_p)
    own = [generator for generator in generators if generator is not None]
    assert len(own) == len(generators), "drafts that are drawn need each request's generator"
    return draw(q_BV, uniforms(own, [1] * len(own))).tolist(), q_BV


def _chains(steps: Sequence[_Step]) -> list[Draft]:
    """The tokens of all depths as a chain for each sequence."""
    drafts = []
    for row in range(len(steps[0][0])):
        q_rows = [q_BV[row] for _, q_BV in steps if q_BV is not None]
        drafts.append(chain([tokens[row] for tokens, _ in steps], torch.stack(q_rows) if q_rows else None))
    return drafts
