"""Whole responses through vLLM: what its workers' probe filed, as samples in the order of the responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from mtp_train.batch.shift import teacher_rows
from mtp_train.engine.base import PrefillSettings
from mtp_train.engine.vllm_process import VllmPool
from mtp_train.records import Response, Sample, Teacher


def prefill(
    pool: VllmPool, responses: Iterable[Response], settings: PrefillSettings, *, max_in_flight: int, max_prefill_tokens: int
) -> Iterator[Sample]:
    """Yield one sample per response, in order. Hidden states pass through files that are removed as they are read.

    At most ``max_in_flight`` responses and four forwards' tokens are inside a process at once.
    """
    waiting: dict[str, tuple[Response, torch.Tensor]] = {}
    order: list[str] = []
    done: dict[str, Sample] = {}

    def messages() -> Iterator[dict[str, Any]]:
        for number, response in enumerate(responses):
            if not response.token_ids:
                raise ValueError(f"response {response.prompt_id}: expected at least one token, found none")
            key = str(number)
            row_M = teacher_rows(torch.tensor(response.loss_mask))
            waiting[key] = (response, row_M)
            order.append(key)
            take = {"rows": row_M.tolist(), "top_k": settings.top_k, "path": str(pool.folder / f"{key}.safetensors")}
            # One token is generated because vLLM generates at least one; it is not used.
            yield {
                "request_id": key,
                "token_ids": list(response.token_ids),
                "sampling": {"temperature": 0.0, "max_tokens": 1},
                "take": take,
                "by_step": False,
            }

    first = 0
    for answer in pool.run(messages(), max_in_flight=max_in_flight, max_in_flight_tokens=4 * max_prefill_tokens):
        response, row_M = waiting.pop(answer["request_id"])
        done[answer["request_id"]] = _sample(response, row_M, Path(answer["path"]), settings)
        while first < len(order) and order[first] in done:
            yield done.pop(order[first])
            first += 1
    assert first == len(order) and not done and not waiting, (first, len(order))


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
