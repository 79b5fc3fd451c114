"""Whether speculation wrote what plain decoding writes, token for token, and where not, how near the choice was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Two float32 runs over other batch shapes differ by about 1e-5 in their logits; ten times that is a tie.
TIE_LOGIT_GAP = 1e-4


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token at which one answer parts from plain decoding. None stands for an answer that had ended.

    ``logit_gap`` is the distance of the target's two best logits there, computed on the plain answer's own prefix.
    """

    prompt_id: str
    index: int
    plain_token: int | None
    speculated_token: int | None
    logit_gap: float

    @property
    def is_tie(self) -> bool:
        return self.logit_gap <= TIE_LOGIT_GAP


@dataclass(frozen=True, kw_only=True)
class Identity:
    """``num_tokens`` are those compared: of each answer up to its first difference, or all."""

    num_prompts: int
    num_identical: int
    num_tokens: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Every difference is a tie of the target's two best logits."""
        return all(difference.is_tie for difference in self.differences)


def parting(*, plain: Mapping[str, Sequence[int]], speculated: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Of each answer that differs, the first index at which it does (an answer that has ended differs from one that goes on)."""
    found = {}
    for prompt_id, ours in plain.items():
        theirs = speculated[prompt_id]
        length = max(len(ours), len(theirs))
        index = next((i for i in range(length) if tuple(ours[i : i + 1]) != tuple(theirs[i : i + 1])), None)
        if index is not None:
            found[prompt_id] = index
    return found


def compare(
    *,
    prompts: Mapping[str, Sequence[int]],
    plain: Mapping[str, Sequence[int]],
    speculated: Mapping[str, Sequence[int]],
    logit_gap: Callable[[Sequence[int]], float],
) -> Identity:
    """Compare two greedy runs of the same prompts; ``logit_gap(token_ids)`` is asked once per answer that differs.

    Errors: ValueError where the runs are not of the same prompts.
    """
    if set(plain) != set(speculated) or not set(plain) <= set(prompts):
        raise ValueError(
            f"identity: expected two runs of the same prompts, found {len(plain)} plain and {len(speculated)} speculated answers, "
            f"{len(set(plain) ^ set(speculated))} of them in one only"
        )
    differences, num_tokens = [], 0
    parted = parting(plain=plain, speculated=speculated)
    for prompt_id, ours in plain.items():
        theirs, index = speculated[prompt_id], parted.get(prompt_id)
        num_tokens += len(ours) if index is None else index + 1
        if index is not None:
            differences.append(
                Difference(
                    prompt_id=prompt_id,
                    index=index,
                    plain_token=ours[index] if index < len(ours) else None,
                    speculated_token=theirs[index] if index < len(theirs) else None,
                    logit_gap=logit_gap([*prompts[prompt_id], *ours[:index]]),
                )
            )
    return Identity(
        num_prompts=len(plain), num_identical=len(plain) - len(differences), num_tokens=num_tokens, differences=tuple(differences)
    )
