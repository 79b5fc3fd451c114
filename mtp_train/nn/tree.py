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
