"""Turns what vLLM counted per request and step into acceptance records, and checks it against vLLM's own totals."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.acceptance.tally import Tally
from mtp_train.engine.base import SpeculateRequest, SpeculateSettings
from mtp_train.exporter.served import Served, write_served
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
        notes={
            "decoding": settings.decoding.stated(),
            "batch_size": settings.batch_size,
            "top_p": settings.sampling.top_p,
            "seed": settings.sampling.seed,
            "max_new_tokens": settings.sampling.max_new_tokens,
            "ignore_eos": settings.ignore_eos,
            **notes,
            "counters": dict(counters),
        },
    )


def serve_prompt_lookup(folder: Path, *, target_path: Path, shortest_match: int, longest_match: int) -> Path:
    """Write the served folder of a scheme that has no weights: vLLM's ngram, which drafts what followed the last place where
    the text's last ``shortest_match`` to ``longest_match`` tokens stood before. Returns the folder, for ``speculate``."""
    config = {"method": "ngram", "prompt_lookup_min": shortest_match, "prompt_lookup_max": longest_match}
    return _serve(folder, target_path, config)


def serve_draft_model(folder: Path, *, target_path: Path, model_path: Path) -> Path:
    """Write the served folder of a whole small model as the draft; its token ids must be the target's."""
    return _serve(folder, target_path, {"method": "draft_model", "model": str(model_path)})


def _serve(folder: Path, target_path: Path, speculative_config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    served = Served(
        class_name=speculative_config["method"],
        speculative_config=speculative_config,
        hf_overrides=None,
        plugin=None,
        target_path=str(target_path),
    )
    write_served(folder, served)
    return folder


def prompt_acceptance(request: SpeculateRequest, answer: Mapping[str, Any], settings: SpeculateSettings) -> PromptAcceptance:
    """Count one answer's verifications by the rules that the reference decoder and the estimate use.

    ``emitted_per_step`` are all steps, ``drafted_per_step`` and ``accepted_per_step`` those that verified drafts; a method
    may draft nothing at a step (ngram without a match). A step of one token and a verification that accepted nothing
    look alike and count alike, so the next verification of which that may be said is taken to be it.
    """
    tally = Tally(num_speculative_tokens=settings.num_speculative_tokens)
    tally.first_token()
    records = deque(zip(answer["drafted_per_step"], answer["accepted_per_step"], strict=True))
    steps, emitted = answer["emitted_per_step"], answer["emitted_per_step"][0]
    assert emitted == 1, f"{request.prompt_id}: the first step emits the token that the prefill gives"
    for index, num_kept in enumerate(steps[1:], start=1):
        last = index == len(steps) - 1
        if records and (num_kept > 1 or records[0][1] == 0 or last):
            num_drafted, num_accepted = records.popleft()
            num_drafted = min(num_drafted, settings.sampling.max_new_tokens - emitted)
            tally.verification(num_drafted=num_drafted, num_accepted=min(num_accepted, num_drafted), num_kept=num_kept)
        else:
            tally.first_token()
        emitted += num_kept
    assert not records, f"{request.prompt_id}: {len(records)} verifications that no step emitted"
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
