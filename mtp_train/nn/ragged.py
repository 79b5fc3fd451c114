"""A KV cache for sequences of different lengths, and attention of new tokens over it, without padding.

Each sequence owns a slot. A forward brings some rows for some slots, all behind one another on one axis; rows are
written behind what the slot holds. Taking back rejected tokens is setting a length (``truncate``); keeping one path of
a tree is moving its rows together (``keep``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

# The cache grows by doubling from this many tokens per slot.
_FIRST_CAPACITY_TOKENS = 256


class RaggedCache:
    """Keys and values per layer: (slots, N of the keys, capacity, H); ``lengths[s]`` tokens of slot s are valid."""

    def __init__(self, *, num_slots: int) -> None:
        self.lengths = [0] * num_slots
        self.capacity = _FIRST_CAPACITY_TOKENS
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

    A row sees all that its slot held before, and of the new rows those up to itself, or, where ``trees[j]`` is given
    (bool, counts[j] x counts[j], True = may see), those that the tree lets it see. Call ``commit`` after the forward to
    count the new rows in.
    """

    def __init__(
        self, *, cache: RaggedCache, slots: Sequence[int], counts: Sequence[int], trees: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        assert len(slots) == len(counts) == len(set(slots)), (slots, counts)
        self.cache, self.slots, self.counts = cache, list(slots), list(counts)
        self.trees = [None] * len(self.slots) if trees is None else list(trees)
        self.starts = [cache.lengths[slot] for slot in self.slots]
        cache.reserve(max((start + count for start, count in zip(self.starts, self.counts, strict=True)), default=0))

    def positions(self, device: torch.device) -> torch.Tensor:
        """Position in its sequence of each new row where rows follow one another, int64 (T,)."""
        return torch.cat([torch.arange(start, start + count, device=device) for start, count in zip(self.starts, self.counts, strict=True)])

    def commit(self) -> None:
        """Count the rows of this forward as held."""
        for slot, start, count in zip(self.slots, self.starts, self.counts, strict=True):
            assert self.cache.lengths[slot] == start, "committed twice, or another forward came between"
            self.cache.lengths[slot] = start + count

    def attend(
        self, layer_index: int, q_NTH: torch.Tensor, k_NTH: torch.Tensor, v_NTH: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        keys, values = self.cache.layer(layer_index, k_NTH, v_NTH)
        outs = []
        first = 0
        for slot, start, count, tree in zip(self.slots, self.starts, self.counts, self.trees, strict=True):
            last, end = first + count, start + count
            keys[slot, :, start:end] = k_NTH[:, first:last]
            values[slot, :, start:end] = v_NTH[:, first:last]
            mask = _mask(start, count, tree, window, q_NTH.device)
            outs.append(
                functional.scaled_dot_product_attention(
                    q_NTH[None, :, first:last],
                    keys[None, slot, :, :end],
                    values[None, slot, :, :end],
                    attn_mask=mask,
                    is_causal=mask is None and count > 1,
                    scale=scale,
                    enable_gqa=q_NTH.shape[0] != k_NTH.shape[0],
                )[0]
            )
            first = last
        return torch.cat(outs, dim=1)


def _mask(start: int, count: int, tree: torch.Tensor | None, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Who sees whom, bool (count, start + count); None where torch's own causal form says the same."""
    end = start + count
    windowed = window is not None and end > window
    if tree is None and not windowed and (start == 0 or count == 1):
        return None
    row = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(end, device=device)[None, :]
    sees = key <= row
    if tree is not None:
        sees[:, start:] = tree.to(device)
    if windowed:
        assert window is not None
        sees = sees & (key > row - window)
    return sees
