"""A tree of rows behind one another on one axis: who follows whom gives the attention mask and the positions.

The rows are tokens of one sequence. Each follows one earlier row of the tree, its parent, or what stood before the tree
(parent -1); it sees what stood before, its ancestors and itself, and its position counts these. A chain is the tree in
which each row follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch


class Tree:
    """Rows by their parents, parents first. ``depth`` is 0 for rows that follow what stood before the tree."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = tuple(parents)
        self.depth: list[int] = []
        for row, parent in enumerate(self.parents):
            assert -1 <= parent < row, f"row {row} follows row {parent}, which does not stand before it"
            self.depth.append(0 if parent < 0 else self.depth[parent] + 1)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def sees_MM(self) -> torch.Tensor:
        """bool (M, M) on the CPU: row r sees row c, where c is r or an ancestor of it."""
        sees: list[list[bool]] = []
        for row, parent in enumerate(self.parents):
            seen = [False] * len(self.parents) if parent < 0 else list(sees[parent])
            seen[row] = True
            sees.append(seen)
        return torch.tensor(sees, dtype=torch.bool).reshape(len(self.parents), len(self.parents))


def tree_positions(end: int, tree: Tree) -> list[int]:
    """Positions of a tree's rows where the last of them is stored at ``end - 1``."""
    return [end - len(tree) + depth for depth in tree.depth]


def sees_keys(
    start: int, count: int, tree: Tree | None, window: int | None, first_position: int, device: torch.device
) -> torch.Tensor | None:
    """Who of ``count`` new rows sees whom of all, bool (count, start + count); None where torch's own causal form says the same.

    Of those at positions before ``first_position`` a row sees none but itself: a row always sees one, or its softmax had nothing to sum.
    """
    end = start + count
    windowed = window is not None and end > window
    if tree is None and not windowed and not first_position and (start == 0 or count == 1):
        return None
    key = torch.arange(end, device=device)
    sees = key[None, :] <= key[start:, None]
    position = key
    if tree is not None:
        first = end - len(tree)
        assert 0 <= first <= start, (start, count, len(tree))
        sees[:, first:] = tree.sees_MM[-count:].to(device)
        position = torch.cat([key[:first], torch.tensor(tree_positions(end, tree), dtype=torch.int64, device=device)])
    if windowed:
        assert window is not None
        sees = sees & (position[None, :] > position[start:, None] - window)
    if first_position:
        sees = sees & ((position[None, :] >= first_position) | (key[None, :] == key[start:, None]))
    return sees


def sees_keys_of_several(
    starts: Sequence[int],
    count: int,
    end: int,
    trees: Sequence[Tree | None],
    window: int | None,
    first_position: int,
    device: torch.device,
) -> torch.Tensor:
    """``sees_keys`` of sequences of ``count`` new rows each, bool (sequences, count, end)."""
    start_S11 = torch.tensor(starts, device=device)[:, None, None]
    row_SR1 = start_S11 + torch.arange(count, device=device)[None, :, None]
    key_11E = torch.arange(end, device=device)[None, None, :]
    sees = key_11E <= row_SR1
    if window is not None:
        sees &= key_11E > row_SR1 - window
    if first_position:
        sees &= (key_11E >= first_position) | (key_11E == row_SR1)
    for index, (start, tree) in enumerate(zip(starts, trees, strict=True)):
        mask = None if tree is None else sees_keys(start, count, tree, window, first_position, device)
        if mask is not None:
            sees[index] = False
            sees[index, :, : start + count] = mask
    return sees
