"""A mixture trains on each cache by its share, refuses what does not belong together, and continues where it stopped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_train.batch.loader import StepBatches, StepLoader
from mtp_train.batch.plan import DataPlan
from mtp_train.cache.reader import CacheReader
from mtp_train.trainer.data import Subset, split
from mtp_train.trainer.mixture import MixedCache
from mtp_train.trainer.supply import make_order


@pytest.fixture(scope="module")
def caches(recipe: Any, recipes: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[CacheReader, CacheReader]:
    """Two caches of one target, of 40 and of 12 samples."""
    texts = recipes.random_texts(num_texts=52, vocab_size=250)[40:]
    small = recipes.write_cache(tmp_path_factory.mktemp("small") / "cache", target=recipe.target, texts=texts, answer_from=4, top_k=8)
    return CacheReader(recipe.cache, verify="none"), CacheReader(small, verify="none")


def mixed(caches: tuple[CacheReader, CacheReader]) -> MixedCache:
    return MixedCache({"large": caches[0], "small": caches[1]})


def load(train: Subset, *, shares: tuple[float, float], start: int, stop: int, rank: int = 0, world_size: int = 1) -> list[StepBatches]:
    plan = DataPlan(
        lengths=train.lengths,
        sample_ids=train.sample_ids,
        seed=0,
        tokens_per_pack=100,
        packs_per_step=2,
        order=make_order(train, window=None, shares=shares, seed=0),
    )
    with StepLoader(reader=train, plan=plan, rank=rank, world_size=world_size, start_step=start, stop_step=stop, max_prefetch=2) as loader:
        return list(loader)


def test_it_holds_the_samples_of_both(caches: tuple[CacheReader, CacheReader]) -> None:
    cache = mixed(caches)
    assert len(cache) == 52 and cache.lengths == caches[0].lengths + caches[1].lengths and cache.parts == [0] * 40 + [1] * 12
    assert cache.shards[40] == len(caches[0].shard_bytes()) and cache.checksums() == caches[0].checksums() + caches[1].checksums()
    assert torch.equal(cache[45].hidden_TD, caches[1][5].hidden_TD) and torch.equal(cache[7].hidden_TD, caches[0][7].hidden_TD)
    assert cache.is_local and cache.is_whole
    with pytest.raises(IndexError):
        cache[52]


def test_tokens_come_in_their_shares_and_a_continued_run_sees_the_rest(caches: tuple[CacheReader, CacheReader]) -> None:
    train, _ = split(mixed(caches), fraction=0.0, seed=0)
    whole = load(train, shares=(1.0, 3.0), start=0, stop=30)
    longest = max(train.lengths)
    tokens = [0, 0]
    hidden = {caches[1][number].hidden_TD.numpy().tobytes() for number in range(12)}
    for step in whole:
        for batch in step.batches:
            for first, last in zip(batch.bounds, batch.bounds[1:], strict=False):
                tokens[batch.hidden_TD[first:last].numpy().tobytes() in hidden] += last - first
    assert abs(tokens[1] - 3 * tokens[0]) <= 4 * longest * 16  # packs that are still open
    rest = load(train, shares=(1.0, 3.0), start=11, stop=30)
    for mine, theirs in zip(rest, whole[11:], strict=True):
        assert all(torch.equal(a.hidden_TD, b.hidden_TD) for a, b in zip(mine.batches, theirs.batches, strict=True))
    halves = [load(train, shares=(1.0, 3.0), start=0, stop=30, rank=rank, world_size=2) for rank in (0, 1)]
    for both, one, two in zip(whole, *halves, strict=True):
        assert [b.sample_ids for b in both.batches] == [b.sample_ids for b in (*one.batches, *two.batches)]
    assert train.fingerprint() != split(caches[0], fraction=0.0, seed=0)[0].fingerprint()


def test_answers_to_one_prompt_fall_on_one_side_in_both_caches(caches: tuple[CacheReader, CacheReader]) -> None:
    train, held_out = split(mixed(caches), fraction=0.3, seed=0)
    alone = [split(cache, fraction=0.3, seed=0)[1].sample_ids for cache in caches]
    assert held_out.sample_ids == alone[0] + alone[1] and not set(held_out.sample_ids) & set(train.sample_ids)


@pytest.mark.parametrize(
    ("field", "value"), [("target_fingerprint", "other"), ("top_k", 4), ("tokenizer_hash", "other"), ("dtype", "bf16")]
)
def test_caches_that_do_not_match_are_refused(caches: tuple[CacheReader, CacheReader], field: str, value: Any) -> None:
    class Other(CacheReader):
        @property
        def identity(self) -> Any:
            return replace(super().identity, **{field: value})

    other = Other(caches[1].path, verify="none")
    with pytest.raises(ValueError, match=rf"(?s)mixture\.small: expected a cache like that of mixture\.large; .*{field}: expected"):
        MixedCache({"large": caches[0], "small": other})


def test_room_is_needed_for_what_is_fetched_alone(caches: tuple[CacheReader, CacheReader]) -> None:
    class Away(CacheReader):
        is_local = False

    small = Away(caches[1].path, verify="none")
    cache = MixedCache({"large": caches[0], "small": small})
    assert cache.shard_bytes() == [0] * len(caches[0].shard_bytes()) + small.shard_bytes() and sum(small.shard_bytes()) > 0


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="mixture: expected caches with their shares, found none"):
        MixedCache({})


def test_a_part_without_samples_is_named(caches: tuple[CacheReader, CacheReader]) -> None:
    cache = mixed(caches)
    with pytest.raises(ValueError, match=r"mixture\.small: expected samples"):
        make_order(Subset(reader=cache, numbers=range(40)), window=None, shares=(0.5, 0.5), seed=0)


def test_a_shuffle_over_some_shards_stays_within_each_part(caches: tuple[CacheReader, CacheReader]) -> None:
    train, _ = split(mixed(caches), fraction=0.0, seed=0)
    order = make_order(train, window=1, shares=(0.5, 0.5), seed=0).epoch(0)
    large = [train.shards[number] for number in order if number < 40]
    assert large == sorted(large, key=large.index)
