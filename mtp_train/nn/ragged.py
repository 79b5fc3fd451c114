"""A KV cache for sequences of different lengths, and attention of new tokens over it, without padding.

Each sequence owns a slot. A forward brings some rows for some slots, all behind one another on one axis; rows are
written behind what the slot holds. Taking back rejected tokens is setting a length (``truncate``); keeping one path of
a tree is moving its rows together (``keep``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from mtp_train.nn.tree import Tree, sees_keys, sees_keys_of_several, tree_positions

# The cache grows by doubling from this many tokens per slot.
FIRST_CAPACITY_TOKENS = 256
# Rows per sequence that are few: those of decoding, verification and trees, not of prompts.
_FEW_ROWS = 32
# Sequences attend together while reading all of them to the longest one's end reads at most this many times what they hold.
_MOST_PADDING = 2.0


class _Block(NamedTuple):
    """A forward's attention as one of a head's blocks uses it (``nn.attention.DraftContext``)."""

    forward: RaggedAttention
    number: int

    def attend(
        self, layer_index: int, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        return self.forward.attend_from(self.number, self.number, q_NTH, k_NTH, v_NTH, scale=scale, window=window)


class _Group(NamedTuple):
    """Sequences that attend in one call: entries ``first`` to before ``last`` of ``slots``; ``mask`` is added to the scores
    (None: torch's own causal form): (rows, keys) of one sequence, or (sequences, 1, rows, keys) of several."""

    first: int
    last: int
    mask: torch.Tensor | None


class RaggedCache:
    """Keys and values per layer: (slots, N of the keys, capacity, H); ``lengths[s]`` tokens of slot s are valid."""

    def __init__(self, *, num_slots: int) -> None:
        self.lengths = [0] * num_slots
        self.capacity = FIRST_CAPACITY_TOKENS
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_slots(self) -> int:
        return len(self.lengths)

    def reserve(self, num_tokens: int) -> None:
        """Make room for slots of ``num_tokens``; what is held stays."""
        if num_tokens <= self.capacity:
            return
        while self.capacity < num_tokens:
            self.capacity *= 2
        for index, pair in self._layers.items():
            grown = []
            for old in pair:
                new = old.new_zeros((old.shape[0], old.shape[1], self.capacity, old.shape[3]))
                new[:, :, : old.shape[2]] = old
                grown.append(new)
            self._layers[index] = (grown[0], grown[1])

    def layer(self, index: int, k_NTH: torch.Tensor, v_NTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's storage, made on first use in the shape and dtype of the rows that come."""
        if index not in self._layers:
            self._layers[index] = (
                k_NTH.new_zeros((self.num_slots, k_NTH.shape[0], self.capacity, k_NTH.shape[2])),
                v_NTH.new_zeros((self.num_slots, v_NTH.shape[0], self.capacity, v_NTH.shape[2])),
            )
        return self._layers[index]

    def truncate(self, slot: int, length: int) -> None:
        """Forget what slot ``slot`` holds beyond ``length`` tokens."""
        assert 0 <= length <= self.lengths[slot], (slot, length, self.lengths[slot])
        self.lengths[slot] = length

    def keep(self, slot: int, first: int, offsets: Sequence[int]) -> None:
        """Keep of the tokens from ``first`` on only those at ``first + offset``, moved together in that order."""
        assert all(0 <= offset and first + offset < self.lengths[slot] for offset in offsets), (slot, first, offsets, self.lengths[slot])
        if list(offsets) != list(range(len(offsets))):
            for keys, values in self._layers.values():
                rows = torch.tensor([first + offset for offset in offsets], device=keys.device)
                keys[slot, :, first : first + len(offsets)] = keys[slot, :, rows].clone()
                values[slot, :, first : first + len(offsets)] = values[slot, :, rows].clone()
        self.lengths[slot] = first + len(offsets)

    def clear(self, slot: int) -> None:
        """Free the slot for another sequence."""
        self.lengths[slot] = 0


class RaggedAttention:
    """One forward's attention: ``counts[j]`` new rows for slot ``slots[j]``, each slot at most once.

    A row sees all that its slot held before, and of the new rows those up to itself. Where ``trees[j]`` is given, the new
    rows are its last ones, and its earlier ones are the last that the slot holds: a row sees its ancestors in the tree and
    all that stood before the tree. Call ``commit`` after the forward to count the new rows in.

    ``depth``: of a head's rows, how many of its own states lie between them and the target's (``nn.attention.DraftContext``).
    """

    def __init__(
        self,
        *,
        cache: RaggedCache,
        slots: Sequence[int],
        counts: Sequence[int],
        trees: Sequence[Tree | None] | None = None,
        depth: int = 0,
    ) -> None:
        assert len(slots) == len(counts) == len(set(slots)), (slots, counts)
        self.cache, self.slots, self.counts, self.depth = cache, list(slots), list(counts), depth
        self.trees: list[Tree | None] = [None] * len(self.slots) if trees is None else list(trees)
        self.starts = [cache.lengths[slot] for slot in self.slots]
        cache.reserve(max((start + count for start, count in zip(self.starts, self.counts, strict=True)), default=0))
        self._slot_T: torch.Tensor | None = None
        self._row_T: torch.Tensor | None = None
        self._position_T: torch.Tensor | None = None
        self._groups: dict[tuple[int | None, int], list[_Group]] = {}

    def positions(self, device: torch.device) -> torch.Tensor:
        """Position in its sequence of each new row, int64 (T,): where the row is stored, but for trees, in which rows of one
        depth have one position."""
        if all(tree is None for tree in self.trees):
            return self._rows(device)
        if self._position_T is None or self._position_T.device != device:
            found: list[int] = []
            for start, count, tree in zip(self.starts, self.counts, self.trees, strict=True):
                found += range(start, start + count) if tree is None else tree_positions(start + count, tree)[-count:]
            self._position_T = torch.tensor(found, dtype=torch.int64, device=device)
        return self._position_T

    def _rows(self, device: torch.device) -> torch.Tensor:
        """Where each new row is stored in its slot, int64 (T,)."""
        if self._row_T is None or self._row_T.device != device:
            rows = [range(start, start + count) for start, count in zip(self.starts, self.counts, strict=True)]
            self._row_T = torch.tensor([row for span in rows for row in span], dtype=torch.int64, device=device)
        return self._row_T

    def commit(self) -> None:
        """Count the rows of this forward as held."""
        for slot, start, count in zip(self.slots, self.starts, self.counts, strict=True):
            assert self.cache.lengths[slot] == start, "committed twice, or another forward came between"
            self.cache.lengths[slot] = start + count

    def attend(
        self, layer_index: int, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        return self.attend_from(0, layer_index, q_NTH, k_NTH, v_NTH, scale=scale, window=window)

    def block(self, number: int) -> _Block:
        """A row of block b stands with the token that it reads, b places behind its base: those at its first b positions have none."""
        return _Block(self, number)

    def states_before(self, number: int, state_TD: torch.Tensor) -> torch.Tensor:
        """Keep what block ``number`` made of these rows, and return what it made of the row that each follows; zeros where a
        sequence begins."""
        state_1TD, device = state_TD[None], state_TD.device
        states, nothing = self.cache.layer(-1 - number, state_1TD, state_1TD[..., :0])
        self._write(states, nothing, state_1TD, state_1TD[..., :0])
        before: list[int] = []
        for start, count, tree in zip(self.starts, self.counts, self.trees, strict=True):
            if tree is None:
                before += range(start - 1, start + count - 1)
            else:  # parent -1 is what stood before the tree
                before += [start + count - len(tree) + parent for parent in tree.parents[-count:]]
        row_T = torch.tensor(before, dtype=torch.int64, device=device)
        return states[self._slot_of_each(device), 0, row_T.clamp_min(0)].masked_fill((row_T < 0)[:, None], 0.0)

    def attend_from(
        self,
        first_position: int,
        layer_index: int,
        q_NTH: torch.Tensor,
        k_NTH: torch.Tensor,
        v_NTH: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """``attend`` where no row sees one at a position before ``first_position``, but for itself."""
        keys, values = self.cache.layer(layer_index, k_NTH, v_NTH)
        self._write(keys, values, k_NTH, v_NTH)
        outs = []
        row = 0
        for group in self._groups_within(window, first_position, q_NTH, heads_per_key=q_NTH.shape[0] // k_NTH.shape[0]):
            slot, rows = self.slots[group.first], sum(self.counts[group.first : group.last])
            end = max(start + count for start, count in self._spans(group.first, group.last))
            mine_NRH = q_NTH[:, row : row + rows]
            row += rows
            if group.last == group.first + 1:
                outs.append(_attend_one(mine_NRH, keys[slot, :, :end], values[slot, :, :end], group.mask, scale))
            else:
                assert group.mask is not None
                several = slice(slot, slot + group.last - group.first)
                outs.append(_attend_several(mine_NRH, keys[several, :, :end], values[several, :, :end], group.mask, scale))
        return torch.cat(outs, dim=1)

    def _spans(self, first: int, last: int) -> list[tuple[int, int]]:
        return list(zip(self.starts[first:last], self.counts[first:last], strict=True))

    def _write(self, keys: torch.Tensor, values: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor) -> None:
        """Put the new rows behind what their slots hold: for many slots with few rows by one indexed copy, which costs
        less than a copy per slot; for long pieces slot by slot, which costs less per row."""
        if len(self.slots) < 4 or k_NTH.shape[1] > _FEW_ROWS * len(self.slots):
            first = 0
            for slot, start, count in zip(self.slots, self.starts, self.counts, strict=True):
                keys[slot, :, start : start + count] = k_NTH[:, first : first + count]
                values[slot, :, start : start + count] = v_NTH[:, first : first + count]
                first += count
            return
        slot_T, row_T = self._slot_of_each(keys.device), self._rows(keys.device)
        keys[slot_T, :, row_T] = k_NTH.transpose(0, 1)
        values[slot_T, :, row_T] = v_NTH.transpose(0, 1)

    def _slot_of_each(self, device: torch.device) -> torch.Tensor:
        """The slot of each new row, int64 (T,)."""
        if self._slot_T is None or self._slot_T.device != device:
            slots = [slot for slot, count in zip(self.slots, self.counts, strict=True) for _ in range(count)]
            self._slot_T = torch.tensor(slots, dtype=torch.int64, device=device)
        return self._slot_T

    def _groups_within(self, window: int | None, first_position: int, q_NTH: torch.Tensor, *, heads_per_key: int) -> list[_Group]:
        """Who attends together, and what each may see, made once per forward and limit: all layers share it."""
        key = (window, first_position)
        if key not in self._groups:
            self._groups[key] = [
                _Group(first, last, self._mask_of(first, last, window, first_position, q_NTH, heads_per_key=heads_per_key))
                for first, last in self._runs()
            ]
        return self._groups[key]

    def _runs(self) -> list[tuple[int, int]]:
        """Stretches of entries whose slots lie behind one another and bring equally few rows, and whose lengths are so
        alike that one padded call costs less than a call for each (96 short sequences of one row: 4 times less)."""
        runs: list[tuple[int, int]] = []
        first = longest = held = 0
        for index, (slot, start, count) in enumerate(zip(self.slots, self.starts, self.counts, strict=True)):
            end = start + count
            joins = (
                index > first
                and slot == self.slots[index - 1] + 1
                and count == self.counts[index - 1] <= _FEW_ROWS
                and max(longest, end) * (index - first + 1) <= _MOST_PADDING * (held + end)
            )
            if not joins:
                if index > first:
                    runs.append((first, index))
                first, longest, held = index, 0, 0
            longest, held = max(longest, end), held + end
        if self.slots:
            runs.append((first, len(self.slots)))
        return runs

    def _mask_of(
        self, first: int, last: int, window: int | None, first_position: int, q_NTH: torch.Tensor, *, heads_per_key: int
    ) -> torch.Tensor | None:
        """A group's mask as what is added to the scores. For few rows it is repeated for each query head that shares a key."""
        spans, device = self._spans(first, last), q_NTH.device
        if last == first + 1:
            start, count = spans[0]
            sees = sees_keys(start, count, self.trees[first], window, first_position, device)
        else:
            count, end = spans[0][1], max(start + count for start, count in spans)
            starts = [start for start, _ in spans]
            sees = sees_keys_of_several(starts, count, end, self.trees[first:last], window, first_position, device)
        if sees is None:
            return None
        added = torch.zeros(sees.shape, dtype=q_NTH.dtype, device=device).masked_fill_(~sees, float("-inf"))
        if count <= _FEW_ROWS:
            added = added.repeat(*[1] * (added.ndim - 2), heads_per_key, 1)
        return added if added.ndim == 2 else added[:, None]


def _attend_one(
    q_NRH: torch.Tensor, keys_NTH: torch.Tensor, values_NTH: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of one sequence's new rows over its keys. Where query heads share keys, a few masked rows of the heads
    that share one are laid behind one another, so that its keys are read once: 1.3 to 1.6 times as fast, the same bits."""
    num_heads, count, _ = q_NRH.shape
    num_kv_heads = keys_NTH.shape[0]
    if mask is not None and mask.shape[0] > count:
        q_NRH = q_NRH.reshape(num_kv_heads, mask.shape[0], -1)
    out = functional.scaled_dot_product_attention(
        q_NRH[None],
        keys_NTH[None],
        values_NTH[None],
        attn_mask=mask,
        is_causal=mask is None and count > 1,
        scale=scale,
        enable_gqa=q_NRH.shape[0] != num_kv_heads,
    )[0]
    return out.reshape(num_heads, count, -1)


def _attend_several(
    q_NTH: torch.Tensor, keys_SNEH: torch.Tensor, values_SNEH: torch.Tensor, mask_S1RE: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of S sequences' few rows in one call, keys padded to the longest one's; heads that share a key as in
    ``_attend_one``."""
    num_heads, num_rows, size = q_NTH.shape
    num_seqs, num_kv_heads = keys_SNEH.shape[:2]
    split = (num_kv_heads, num_heads // num_kv_heads, num_seqs, num_rows // num_seqs, size)
    q_SNRH = q_NTH.reshape(split).permute(2, 0, 1, 3, 4).reshape(num_seqs, num_kv_heads, -1, size)
    out_SNRH = functional.scaled_dot_product_attention(q_SNRH, keys_SNEH, values_SNEH, attn_mask=mask_S1RE, scale=scale)
    out = out_SNRH.reshape(num_seqs, num_kv_heads, split[1], split[3], -1).permute(1, 2, 0, 3, 4)
    return out.reshape(num_heads, num_rows, -1)
