"""What a head has before its first step: weights of one that exists, or from the data a draft vocabulary and a start in closed form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mtp_train.batch.packing import pack
from mtp_train.cache.growing import GrowingCache
from mtp_train.head.base import Head
from mtp_train.published.read import open_published, sha256_of
from mtp_train.records import Batch
from mtp_train.runtime import log, progress
from mtp_train.target.draft_vocabulary import count_answer_tokens, most_frequent
from mtp_train.trainer.data import Subset

if TYPE_CHECKING:
    from accelerate import Accelerator

# Tokens read at most: a hundred for each column of the widest projection here, Llama-70B's with 16,384.
MAX_TOKENS = 1_600_000


def count_answers(train: Subset, *, vocab_size: int, accelerator: Accelerator) -> torch.Tensor:
    """How often each token stands in the answers to train on, int64 (V,), on the CPU; every process counts its share of the samples.

    For a cache that is still made, precompute has counted.
    """
    if isinstance(train.cache, GrowingCache):
        return train.cache.answer_counts()
    rank, world = accelerator.process_index, accelerator.num_processes
    own = range(len(train) * rank // world, len(train) * (rank + 1) // world)  # consecutive: each reads its own shards
    counts_V = count_answer_tokens((train[number] for number in own), vocab_size=vocab_size)
    return accelerator.reduce(counts_V.to(accelerator.device), "sum").cpu()


def choose_draft_vocabulary(head: Head, train: Subset, *, vocab_size: int, accelerator: Accelerator) -> None:
    """Let the head draft from the tokens that are most frequent in the answers to train on, as many as it asks for."""
    assert head.draft_vocab_size is not None
    counts_V = count_answers(train, vocab_size=vocab_size, accelerator=accelerator)
    ids_U = most_frequent(counts_V, size=head.draft_vocab_size)
    head.use_draft_ids(ids_U)
    covered, total = int(counts_V[ids_U].sum()), int(counts_V.sum())
    log(f"draft vocabulary: {len(ids_U)} of {len(counts_V)} tokens, {covered} of {total} answer tokens ({covered / total:.2%})")


def start_from_published(word: str, head: Head, *, target_path: Path) -> dict[str, str]:
    """Give the head the weights of one that exists, in a folder or (``target``) in the target's own checkpoint, and say which."""
    found = open_published(target_path if word == "target" else Path(word).expanduser(), target_path=target_path)
    settings = {"num_blocks": 1, "projection_bias": False, **head.settings()}
    found.check(head=head.word, settings=settings)
    tensors = found.tensors(head.state_dict(), column_order=settings.get("column_order"), shared=head.shared)
    head.load_state_dict(tensors)
    log(
        f"starts from {found.path} ({found.word}): {sum(tensor.numel() for tensor in tensors.values()):,} numbers in {len(tensors)} tensors"
    )
    return {"layout": found.word, "sha256": sha256_of(tensors)}


def start_from_data(head: Head, train: Subset, numbers: Sequence[int], *, device: torch.device) -> None:
    """Let the head fit itself to these training samples, evenly spread ones where they have more than ``MAX_TOKENS`` tokens.

    Every process does the same work on the same samples, and so begins with the same weights.
    """
    if not head.starts_from_data:
        return
    head.to(device)
    with torch.no_grad():
        head.start(_Batches(train, numbers, device))


class _Batches:
    """The samples that a head is fitted to, one by one, as often as they are asked for."""

    def __init__(self, train: Subset, numbers: Sequence[int], device: torch.device) -> None:
        self._train, self._device = train, device
        self._numbers = numbers[:: 1 + sum(train.lengths[number] for number in numbers) // MAX_TOKENS]

    def __iter__(self) -> Iterator[Batch]:
        total = sum(self._train.lengths[number] for number in self._numbers)
        with progress(desc="start from data", unit="tok", total=total) as bar:
            for number in self._numbers:
                yield pack([self._train[number]]).to(self._device)
                bar.update(self._train.lengths[number])
