"""How many sequences fit into the KV cache at once: requests that need like room are decoded together, long ones fewer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from mtp_train.nn.ragged import FIRST_CAPACITY_TOKENS

Request = TypeVar("Request")


class Group(NamedTuple, Generic[Request]):
    """Requests to be decoded ``num_slots`` at a time."""

    requests: list[Request]
    num_slots: int


def by_room(requests: Sequence[Request], num_tokens: Sequence[int], *, batch_size: int, max_cache_tokens: int) -> Iterator[Group[Request]]:
    """Group requests by the capacity that a slot of the ragged cache grows to for them, shortest first.

    ``num_tokens`` is the room that each needs, prompt and answer. A slot's capacity is a power of two times the first
    one; ``max_cache_tokens`` divided by it is how many slots a group may have, one at the least and ``batch_size`` at
    the most. All slots of a cache have the longest one's capacity, so that mixing lengths would waste the difference.
    """
    classes: dict[int, list[Request]] = {}
    for request, needed in zip(requests, num_tokens, strict=True):
        capacity = FIRST_CAPACITY_TOKENS
        while capacity < needed:
            capacity *= 2
        classes.setdefault(capacity, []).append(request)
    for capacity in sorted(classes):
        found = classes[capacity]
        yield Group(found, max(1, min(batch_size, len(found), max_cache_tokens // capacity)))
