"""What a head takes from the data in closed form before its first step, where its ``init`` asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mtp_train.batch.packing import pack
from mtp_train.head.base import Head
from mtp_train.records import Batch
from mtp_train.runtime import progress
from mtp_train.trainer.data import Subset

# Tokens read at most: a hundred for each column of the widest projection here, Llama-70B's with 16,384.
MAX_TOKENS = 1_600_000


def start_from_data(head: Head, train: Subset, numbers: Sequence[int], *, device: torch.device) -> None:
    """Let the head fit itself to these training samples, evenly spread ones where they have more than ``MAX_TOKENS`` tokens.

    Every process does the same work on the same samples, and so begins with the same weights.
    """
    if not head.starts_from_data:
        return
    stride = 1 + sum(train.lengths[number] for number in numbers) // MAX_TOKENS
    numbers = numbers[::stride]

    def batches() -> Iterator[Batch]:
        with progress(desc="start from data", unit="tok", total=sum(train.lengths[number] for number in numbers)) as bar:
            for number in numbers:
                yield pack([train[number]]).to(device)
                bar.update(train.lengths[number])

    head.to(device)
    with torch.no_grad():
        head.start(batches())
