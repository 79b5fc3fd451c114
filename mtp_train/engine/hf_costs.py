"""Times what a step of the reference engine is made of: the target's forward over a few tokens of many sequences, and drafting.

The pieces are those that ``hf_speculate`` runs, over caches that hold real keys and values; a forward that is timed is not
counted into the cache, so that each repeat meets the same. Times are on the wall's clock, and the last thing in each is a copy to
the host, which waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from mtp_train.acceptance.costs import Timing, timing
from mtp_train.acceptance.draft import chain
from mtp_train.decoding.base import Drafter, NewBases
from mtp_train.decoding.chain import Chain
from mtp_train.engine.base import CostsAsked, Sampling, StepTimes
from mtp_train.engine.hf_model import TargetModel, device_name
from mtp_train.engine.hf_verify import judge
from mtp_train.head.base import Head
from mtp_train.nn.ragged import RaggedAttention, RaggedCache
from mtp_train.runtime import progress

# Bases that a verification settles for a head to read before it drafts: one accepted token and the target's own.
_BASES = 2
_GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=1, seed=0)


class _Cell(NamedTuple):
    kind: str
    batch_size: int
    num_tokens: int


@torch.inference_mode()
def time_steps(target: TargetModel, head: Head | None, asked: CostsAsked, *, max_prefill_tokens: int) -> StepTimes:
    """All cells, ``num_repeats`` rounds over all of them after one that is thrown away. Parallel heads say all tokens at once: of
    theirs what comes once a step is all but everything, and a further token next to nothing."""
    bench = _Bench(target, head, asked, max_prefill_tokens=max_prefill_tokens)
    cells = [_Cell("verify", batch, tokens) for batch in asked.batch_sizes for tokens in asked.num_tokens]
    if head is not None:
        cells += [_Cell("drafting", batch, length) for batch in asked.batch_sizes for length in asked.draft_lengths]
    seconds: dict[_Cell, list[float]] = {cell: [] for cell in cells}
    with progress(range(asked.num_repeats + 1), desc="time steps", unit="round") as rounds:
        for number in rounds:
            for cell in cells:
                run = bench.prepare(cell)
                run()  # as in decoding, where every step follows others of its own shape
                started = time.perf_counter()
                run()
                if number:
                    seconds[cell].append(time.perf_counter() - started)

    def found(kind: str) -> tuple[Timing, ...]:
        return tuple(timing(cell.batch_size, cell.num_tokens, times) for cell, times in seconds.items() if cell.kind == kind)

    notes = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rule": "greedy", "bases read before a draft": _BASES}
    return StepTimes(found("verify"), found("drafting"), device_name(target.device), notes)


class _Bench:
    """Sequences of random tokens, read by the target and by the head's drafters (one per draft length)."""

    def __init__(self, target: TargetModel, head: Head | None, asked: CostsAsked, *, max_prefill_tokens: int) -> None:
        self.target, self.head = target, head
        self.generator = torch.Generator().manual_seed(asked.seed)
        num_slots = asked.batch_sizes[-1]
        self.cache = RaggedCache(num_slots=num_slots)
        self.drafters: dict[int, Drafter] = {}
        self.drafted: set[tuple[int, int]] = set()
        for length in asked.draft_lengths if head is not None else ():
            scheme = Chain(num_speculative_tokens=length, refresh=True)
            self.drafters[length] = scheme.drafter(head=head, num_slots=num_slots, temperature=0.0, top_p=1.0)
        self.last_RD = [self._fill(slot, asked.context_tokens, max_prefill_tokens) for slot in range(num_slots)]

    def _ids(self, count: int) -> list[int]:
        return torch.randint(self.target.lm_head.weight.shape[0], (count,), generator=self.generator).tolist()

    def _run(self, slots: range, counts: list[int], token_ids: list[int], *, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """A forward of the target as speculation runs it: its hidden states, and what the head reads of them."""
        device, layer_ids = self.target.device, () if self.head is None else self.head.target_layer_ids
        context = RaggedAttention(cache=self.cache, slots=list(slots), counts=counts)
        ids_T = torch.tensor(token_ids, device=device)
        hidden_TD, taps_TLD = self.target.forward_with_taps(ids_T, context.positions(device), context, layer_ids)
        if keep:
            context.commit()
        return hidden_TD, hidden_TD if self.head is None else self.head.read_target(hidden_TD, taps_TLD)

    def _fill(self, slot: int, num_tokens: int, piece: int) -> torch.Tensor:
        """Read a sequence piece by piece; returns the last rows that the head reads."""
        token_ids = self._ids(num_tokens + 1)
        for drafter in self.drafters.values():
            drafter.begin(slot, token_ids[:num_tokens])
        for first in range(0, num_tokens, piece):
            last = min(first + piece, num_tokens)
            _, read_TD = self._run(range(slot, slot + 1), [last - first], token_ids[first:last], keep=True)
            for drafter in self.drafters.values():
                drafter.propose([NewBases(slot=slot, token_ids=token_ids[first + 1 : last + 1], hidden_BD=read_TD, drafts=False)])
        return read_TD[-1:].expand(_BASES, -1)

    def prepare(self, cell: _Cell) -> Callable[[], object]:
        """All that does not belong to the cell, done; what is returned is timed."""
        slots, count = range(cell.batch_size), cell.num_tokens
        if cell.kind == "verify":
            token_ids = self._ids(cell.batch_size * count)
            drafts = [chain(token_ids[slot * count + 1 : (slot + 1) * count]) for slot in slots]

            def verify() -> object:
                hidden_TD, _ = self._run(slots, [count] * cell.batch_size, token_ids, keep=False)
                return judge(drafts, self.target.logits(hidden_TD), [], _GREEDY)

            return verify
        drafter = self.drafters[count]
        new = [NewBases(slot=slot, token_ids=self._ids(_BASES), hidden_BD=self.last_RD[slot], drafts=True) for slot in slots]

        def draft() -> object:
            for slot in slots:
                if (count, slot) in self.drafted:
                    drafter.settle(slot, [], [])
                self.drafted.add((count, slot))
            return drafter.propose(new)

        return draft
