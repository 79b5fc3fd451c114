"""How tokens were decoded, in words: what must stand beside every acceptance figure."""

from __future__ import annotations

from typing import NamedTuple

from mtp_train.records import Acceptance

# Schemes whose drafts come from the text or from the target itself.
NO_HEAD = ("prompt_lookup", "lookahead")


class Way(NamedTuple):
    """How tokens were decoded: all that must stand beside an acceptance figure, but the engine."""

    scheme: str
    num_speculative_tokens: int
    temperature: float
    draft_sampling: str
    decoding: str
    num_nodes: int

    @property
    def text(self) -> str:
        how = "greedy decoding (temperature 0)" if self.temperature == 0 else f"sampled at temperature {self.temperature:g}"
        if self.decoding in NO_HEAD:
            drafts = "drafts chosen without a head"
        elif self.draft_sampling == "probabilistic":
            drafts = "drafts probabilistic (drawn from q)"
        else:
            drafts = f"drafts greedy (the draft's {'argmax' if self.scheme == 'chain' else 'most probable tokens'})"
        return f"{self.drafted}, {how}, {drafts}"

    @property
    def drafted(self) -> str:
        """The shape of the drafts: ``chain, K = 5``, ``tree (dynamic_tree), depth 6, 60 nodes``."""
        if self.scheme == "chain":
            return f"chain{'' if self.decoding == 'chain' else f' ({self.decoding})'}, K = {self.num_speculative_tokens}"
        return f"tree ({self.decoding}), depth {self.num_speculative_tokens}, {self.num_nodes} nodes"


def way_of(acceptance: Acceptance) -> Way:
    """The way of decoding that an acceptance was counted under."""
    return Way(
        scheme=acceptance.scheme,
        num_speculative_tokens=acceptance.num_speculative_tokens,
        temperature=acceptance.temperature,
        draft_sampling=acceptance.draft_sampling,
        decoding=acceptance.decoding,
        num_nodes=acceptance.num_speculative_tokens if acceptance.num_nodes is None else acceptance.num_nodes,
    )
