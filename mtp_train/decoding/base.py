"""The contract of a decoding scheme: its settings, and the drafter that proposes tokens for many sequences at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch

from mtp_train.acceptance.draft import Draft
from mtp_train.head.base import Head


@dataclass(frozen=True, kw_only=True)
class NewBases:
    """Positions of one slot that a verification settled: ``hidden_BD`` the target's h_i, ``token_ids`` the x_{i+1} behind each.

    ``drafts``: propose tokens behind the last of them (False while a long prompt is still being read).
    ``generator``: the request's own, for drafts that are drawn.
    """

    slot: int
    token_ids: Sequence[int]
    hidden_BD: torch.Tensor
    drafts: bool
    generator: torch.Generator | None = None


class Drafter(ABC):
    """Proposes tokens for the sequences of its slots: ``begin``, then ``propose`` and ``settle`` in turn."""

    @abstractmethod
    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """Give the slot to a sequence with this prompt; what it held is forgotten."""

    @abstractmethod
    def propose(self, new: Sequence[NewBases]) -> list[Draft | None]:
        """Take what was settled and draft; None for those that asked for no drafts, or where there is nothing to propose."""

    @abstractmethod
    def settle(self, slot: int, path: Sequence[int], observed: Sequence[int]) -> int:
        """The draft of the slot was judged: its nodes ``path`` are accepted, ``observed`` is the target's argmax behind the
        nodes that the draft asked for. Returns how many of the bases that the accepted tokens make are held already and
        so must not be given again, counted from the first."""


@dataclass(frozen=True, kw_only=True)
class Decoding(ABC):
    """A scheme's settings (``conf/decoding/<word>.yaml``), which check themselves."""

    word: ClassVar[str]  # its name in conf/decoding, on the command line and in the report
    shape: ClassVar[Literal["chain", "tree"]]
    needs_head: ClassVar[bool]
    draws: ClassVar[bool]  # whether drafts can be drawn from q; else they are always chosen by a rule (q one-hot)

    @property
    @abstractmethod
    def depth(self) -> int:
        """Drafted tokens that one verification can accept at the most: K of a chain, the longest path of a tree."""

    @property
    @abstractmethod
    def num_nodes(self) -> int:
        """Drafted tokens that one verification judges at the most; K for a chain."""

    @property
    def num_rows(self) -> int:
        """Tokens that the target reads for a verification at the most, beside the sequence's own."""
        return self.num_nodes

    def stated(self) -> dict[str, Any]:
        """The settings as plain JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @abstractmethod
    def drafter(self, *, head: Head | None, num_slots: int, temperature: float, top_p: float) -> Drafter:
        """A drafter for ``num_slots`` sequences. ``temperature`` above 0 draws drafts from q at this temperature and
        ``top_p``; 0 takes the most probable tokens."""


def check_at_least(least: int, settings: Mapping[str, int]) -> None:
    """ValueError for a setting that is less than ``least``."""
    for name, value in settings.items():
        if value < least:
            raise ValueError(f"decoding.{name}: expected at least {least}, found {value}")
