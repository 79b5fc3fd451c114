"""Whole responses through vLLM: what its workers' probe filed, as samples in the order of the responses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch

from mtp_train.batch.shift import teacher_rows
from mtp_train.engine.base import PrefillSettings
from mtp_train.engine.vllm_process import VllmPool
from mtp_train.records import Response, Sample, Teacher

# A process reads one batch while we read what the last one left: two hide the way between, more would only take room.
_MAX_BATCHES = 2


def prefill_groups(
    pool: VllmPool, groups: Iterable[Sequence[Response] | None], settings: PrefillSettings, *, batch_tokens: int
) -> Iterator[Iterator[Sample]]:
    """Yield each group's samples, in order; a group must be read to its end before the next is asked for.

    A group is read in batches of up to ``batch_tokens`` tokens, or of one longer response, and none reaches over its end:
    what is computed for a group does not depend on the others. Hidden states pass through files that are removed as they
    are read; two batches' of each process are on the disk at most, and one sample in our memory.
    """
    samples = _samples(pool, groups, settings, batch_tokens=batch_tokens)
    for first in samples:
        yield iter(()) if first is None else chain((first,), takewhile(_is_sample, samples))  # type: ignore[arg-type]


def _is_sample(sample: Sample | None) -> bool:
    return sample is not None


def _samples(
    pool: VllmPool, groups: Iterable[Sequence[Response] | None], settings: PrefillSettings, *, batch_tokens: int
) -> Iterator[Sample | None]:
    """All samples in order, and None behind the last one of each group."""
    asked: deque[tuple[Response, torch.Tensor] | None] = deque()

    def batches() -> Iterator[list[dict[str, Any]]]:
        number = 0
        for group in groups:
            if group is None:  # nothing at the moment
                yield []
                continue
            batch: list[dict[str, Any]] = []
            num_tokens = 0
            for response in group:
                if batch and num_tokens + len(response.token_ids) > batch_tokens:
                    yield batch
                    batch, num_tokens = [], 0
                row_M = teacher_rows(torch.tensor(response.loss_mask))
                asked.append((response, row_M))
                batch.append(_message(response, row_M, settings, path=pool.folder / f"{number}.safetensors"))
                num_tokens += len(response.token_ids)
                number += 1
            asked.append(None)  # before the last batch is run, so that nothing waits for the next group to see this one's end
            if batch:
                yield batch

    for answer in pool.run_apart(batches(), max_batches=_MAX_BATCHES):
        while (following := asked.popleft()) is None:  # a group without responses
            yield None
        yield _sample(*following, Path(answer["path"]), settings)
        while asked and asked[0] is None:
            asked.popleft()
            yield None
    for following in asked:
        assert following is None, f"response {following[0].prompt_id} was not answered"
        yield None


def _message(response: Response, row_M: torch.Tensor, settings: PrefillSettings, *, path: Path) -> dict[str, Any]:
    return {
        "request_id": path.stem,
        "token_ids": list(response.token_ids),
        "sampling": {"temperature": 0.0, "max_tokens": 1},  # vLLM generates at least one token; it is not used
        "take": {"rows": row_M.tolist(), "top_k": settings.top_k, "path": str(path)},
        "by_step": False,
    }


def _sample(response: Response, row_M: torch.Tensor, path: Path, settings: PrefillSettings) -> Sample:
    from safetensors.torch import load

    tensors = load(path.read_bytes())
    path.unlink()
    teacher = None
    if settings.top_k is not None:
        teacher = Teacher(
            row_M=row_M,
            ids_MC=tensors["teacher_ids"],
            log_probs_MC=tensors["teacher_log_probs"],
            log_sum_exp_M=tensors["teacher_log_sum_exp"],
        )
    return Sample(
        sample_id=response.prompt_id,
        token_ids_T=torch.tensor(response.token_ids),
        loss_mask_T=torch.tensor(response.loss_mask),
        hidden_TD=tensors["hidden"],
        taps_TLD=tensors.get("taps"),
        teacher=teacher,
        category=response.category,
    )


def with_a_token_behind(name: str, token_ids: Sequence[int]) -> Response:
    """A response whose prefill gives the distribution behind ``token_ids``: one more token, whichever, as its answer."""
    return Response(
        prompt_id=name,
        token_ids=(*token_ids, token_ids[-1]),
        loss_mask=(*[False] * len(token_ids), True),
        messages=(),
        finish_reason="given",
        category="",
        source="",
    )
