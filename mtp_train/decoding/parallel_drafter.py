"""What drafters of parallel heads have in common: they keep nothing between drafts, and ask the head once for all sequences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from mtp_train.acceptance.draft import Draft
from mtp_train.acceptance.verify import check_finite
from mtp_train.decoding.base import Drafter, NewBases
from mtp_train.head.base import ParallelHead


class ParallelDrafter(Drafter):
    """Drafts from the target's hidden state at the last base alone, in whatever form ``_form`` gives what the head says there."""

    def __init__(self, *, head: ParallelHead, temperature: float, top_p: float) -> None:
        self.head, self.temperature, self.top_p = head, temperature, top_p

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        pass

    def settle(self, slot: int, path: Sequence[int], observed: Sequence[int]) -> int:
        return 0

    @torch.inference_mode()
    def propose(self, new: Sequence[NewBases]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(new)
        drafting = [index for index, bases in enumerate(new) if bases.drafts]
        if drafting:
            logits_KBV = self.head.ahead(torch.stack([new[index].hidden_BD[-1] for index in drafting]))
            check_finite(logits_KBV.flatten(0, 1), of=f"head {self.head.word}")
            for index, draft in zip(drafting, self._form(logits_KBV, [new[index] for index in drafting]), strict=True):
                drafts[index] = draft
        return drafts

    @abstractmethod
    def _form(self, logits_KBV: torch.Tensor, new: Sequence[NewBases]) -> list[Draft]:
        """A draft for each of the B sequences that draft."""
