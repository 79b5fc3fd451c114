"""Chain drafting: a head proposes K tokens one after the other, for several sequences at once, over a ragged KV cache.

The head's cache of a sequence holds one entry per base: entry i is (h_i, x_{i+1}) at rotary position i (DESIGN.md,
section 4). A round brings the bases that the last verification settled, with the *target's* hidden states; the last of
them gives the first draft, and each further one is drafted from the head's own hidden state and last draft. These own
entries lie behind the bases at positions i + 1, i + 2, ... and are forgotten once the target has judged (``settle``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_train.acceptance.verify import draw, probabilities, uniforms
from mtp_train.head.base import Head
from mtp_train.nn.ragged import RaggedAttention, RaggedCache


@dataclass(frozen=True, kw_only=True)
class NewBases:
    """Bases to be entered for one slot: ``hidden_BD`` the target's h_i, ``token_ids`` the x_{i+1} each reads.

    ``drafts``: propose tokens behind the last of them (False while a long prompt is still being read).
    ``generator``: the request's own, for probabilistic drafts.
    """

    slot: int
    token_ids: Sequence[int]
    hidden_BD: torch.Tensor
    drafts: bool
    generator: torch.Generator | None = None


@dataclass(frozen=True, kw_only=True)
class Chain:
    """K drafted tokens; ``q_KV`` what they were drawn from, None for greedy drafts (q one-hot)."""

    token_ids: list[int]
    q_KV: torch.Tensor | None


class ChainDrafter:
    """Drafts chains of ``num_speculative_tokens`` for up to ``num_slots`` sequences.

    ``temperature`` > 0 draws drafts from q at this temperature and ``top_p``; 0 takes the head's argmax.
    ``refresh=False`` keeps the entries of accepted drafts as the head made them from its own guesses, to measure what
    running it again over the target's hidden states is worth.
    """

    def __init__(self, *, head: Head, num_slots: int, num_speculative_tokens: int, temperature: float, top_p: float, refresh: bool) -> None:
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens: expected at least 1, found {num_speculative_tokens}")
        self.head = head
        self.num_speculative_tokens = num_speculative_tokens
        self.temperature, self.top_p, self.refresh = temperature, top_p, refresh
        self.cache = RaggedCache(num_slots=num_slots)
        self._num_bases = [0] * num_slots

    def clear(self, slot: int) -> None:
        """Free the slot for another sequence."""
        self.cache.clear(slot)
        self._num_bases[slot] = 0

    def settle(self, slot: int, num_accepted: int) -> int:
        """Forget what was drafted beyond the accepted tokens; returns how many of the bases that these tokens made are
        held already, and so must not be entered again: none with ``refresh``."""
        held = 0 if self.refresh else min(num_accepted, self.num_speculative_tokens - 1)
        self._num_bases[slot] += held
        self.cache.truncate(slot, self._num_bases[slot])
        return held

    @torch.inference_mode()
    def propose(self, new: Sequence[NewBases]) -> list[Chain | None]:
        """Enter bases and draft; None for those that asked for no drafts. Slots must be settled."""
        slots = [bases.slot for bases in new]
        counts = [len(bases.token_ids) for bases in new]
        assert all(self.cache.lengths[slot] == self._num_bases[slot] for slot in slots), "propose before settle"
        token_ids = [token for bases in new for token in bases.token_ids]
        hidden_TD, feedback_TD = self._forward(slots, counts, token_ids, torch.cat([bases.hidden_BD for bases in new]))
        for slot, count in zip(slots, counts, strict=True):
            self._num_bases[slot] += count

        drafting = [index for index, bases in enumerate(new) if bases.drafts]
        if not drafting:
            return [None] * len(new)
        ends = torch.tensor(counts).cumsum(0)
        last = (ends[torch.tensor(drafting)] - 1).to(hidden_TD.device)
        hidden_BD, feedback_BD = hidden_TD[last], feedback_TD[last]
        drafting_slots = [slots[index] for index in drafting]
        generators = [new[index].generator for index in drafting]
        steps: list[tuple[list[int], torch.Tensor | None]] = []
        for depth in range(self.num_speculative_tokens):
            if depth:
                hidden_BD, feedback_BD = self._forward(drafting_slots, [1] * len(drafting), steps[-1][0], feedback_BD)
            steps.append(self._choose(hidden_BD, generators))
        chains: list[Chain | None] = [None] * len(new)
        for row, index in enumerate(drafting):
            q_rows = [q_BV[row] for _, q_BV in steps if q_BV is not None]
            chains[index] = Chain(token_ids=[tokens[row] for tokens, _ in steps], q_KV=torch.stack(q_rows) if q_rows else None)
        return chains

    def _forward(
        self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int], hidden_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden_TD.device
        context = RaggedAttention(cache=self.cache, slots=slots, counts=counts)
        position_T = context.positions(device)
        drafted = self.head.draft(
            token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
            hidden_TD=hidden_TD,
            position_T=position_T,
            context=context,
        )
        context.commit()
        return drafted.hidden_TD, drafted.feedback_TD

    def _choose(self, hidden_BD: torch.Tensor, generators: Sequence[torch.Generator | None]) -> tuple[list[int], torch.Tensor | None]:
        logits_BV = self.head.project(hidden_BD)
        if self.temperature == 0:
            return logits_BV.max(-1).indices.tolist(), None
        q_BV = probabilities(logits_BV, temperature=self.temperature, top_p=self.top_p)
        own = [generator for generator in generators if generator is not None]
        assert len(own) == len(generators), "probabilistic drafts need each request's generator"
        return draw(q_BV, uniforms(own, [1] * len(own))).tolist(), q_BV
