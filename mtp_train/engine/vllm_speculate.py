"""Turns what vLLM counted per request and step into acceptance records, and checks it against vLLM's own totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_train.acceptance.tally import Tally
from mtp_train.engine.base import SpeculateRequest, SpeculateSettings
from mtp_train.records import Acceptance, PromptAcceptance


def acceptance(
    requests: Sequence[SpeculateRequest],
    answers: Sequence[Mapping[str, Any]],
    counters: Mapping[str, Any],
    settings: SpeculateSettings,
    *,
    engine_version: str,
    dtype: str,
    wall_s: float,
    notes: Mapping[str, Any],
) -> Acceptance:
    """The record of one run. vLLM's raw totals stand in the notes under ``counters``.

    Per-request counts come from ``per_request_spec_decode_metrics=detailed``. At an answer's end they are cut to what the
    answer holds (``acceptance/tally.py``), so the raw totals can be larger at that one step of each answer.
    Errors: ValueError where the requests' raw counts don't add up to vLLM's own counters.
    """
    by_id = {answer["request_id"]: answer for answer in answers}
    _check(by_id, counters)
    return Acceptance(
        prompts=tuple(prompt_acceptance(request, by_id[request.prompt_id], settings) for request in requests),
        scheme="chain",
        num_speculative_tokens=settings.num_speculative_tokens,
        temperature=settings.sampling.temperature,
        draft_sampling=settings.draft_sampling,
        measured_by="vllm",
        engine_version=engine_version,
        dtype=dtype,
        wall_s=wall_s,
        notes={**notes, "counters": dict(counters)},
    )


def prompt_acceptance(request: SpeculateRequest, answer: Mapping[str, Any], settings: SpeculateSettings) -> PromptAcceptance:
    """Count one answer's verifications by the rules that the reference decoder and the estimate use."""
    tally = Tally(num_speculative_tokens=settings.num_speculative_tokens)
    tally.first_token()
    num_tokens, emitted = len(answer["token_ids"]), 1
    for num_accepted in answer["accepted_per_step"]:
        left = num_tokens - emitted
        assert left > 0, f"{request.prompt_id}: a verification after the answer's end"
        num_drafted = min(settings.num_speculative_tokens, settings.sampling.max_new_tokens - emitted)
        num_kept = min(num_accepted + 1, left)
        tally.verification(num_drafted=num_drafted, num_accepted=min(num_accepted, num_drafted), num_kept=num_kept)
        emitted += num_kept
    # Where the engine had no room left to draft (at the longest sequence it allows), tokens come one by one.
    tally.accepted_flags += [False] * (num_tokens - emitted)
    return tally.result(
        prompt_id=request.prompt_id, category=request.category, num_prompt_tokens=len(request.token_ids), token_ids=answer["token_ids"]
    )


def _check(by_id: Mapping[str, Mapping[str, Any]], counters: Mapping[str, Any]) -> None:
    steps = [step for answer in by_id.values() for step in answer["accepted_per_step"]]
    per_position = [sum(step > position for step in steps) for position in range(len(counters["accepted_per_position"]))]
    if len(steps) != counters["drafts"] or per_position != counters["accepted_per_position"]:
        raise ValueError(
            f"engine=vllm: expected the requests' counts to add up to vLLM's counters ({counters['drafts']} drafts, "
            f"{counters['accepted_per_position']} accepted by position), found {len(steps)} and {per_position}; "
            "this version of vLLM counts otherwise"
        )
