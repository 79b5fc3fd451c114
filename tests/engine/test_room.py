"""Requests are grouped by the room they need, so that the KV cache stays within its bound."""

from __future__ import annotations

from pathlib import Path

from mtp_train.engine.base import GenerateRequest, Sampling
from mtp_train.engine.room import by_room


def test_long_requests_get_fewer_slots() -> None:
    groups = list(by_room(["a", "b", "c", "d"], [100, 3000, 256, 257], batch_size=8, max_cache_tokens=8192))
    assert [(group.requests, group.num_slots) for group in groups] == [(["a", "c"], 2), (["d"], 1), (["b"], 1)]
    many = list(by_room(list(range(50)), [4000] * 50, batch_size=32, max_cache_tokens=16384))
    assert [group.num_slots for group in many] == [4]


def test_one_slot_at_the_least() -> None:
    assert [group.num_slots for group in by_room(["x"], [10_000], batch_size=4, max_cache_tokens=1)] == [1]


def test_answers_do_not_depend_on_the_bound(make_engine, tiny_target: Path) -> None:
    requests = [
        GenerateRequest(request_id=str(n), token_ids=tuple(3 + i % 40 for i in range(1 + 40 * n)), max_new_tokens=20) for n in range(8)
    ]
    sampling = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=12, seed=0)
    wide, narrow = (
        {a.request_id: a.token_ids for a in make_engine(tiny_target, batch_size=8, max_cache_tokens=bound).generate(requests, sampling)}
        for bound in (1 << 16, 300)
    )
    assert wide == narrow and set(wide) == {str(n) for n in range(8)}
