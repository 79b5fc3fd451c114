"""How vLLM is told to draft, and what it counted per request and step as acceptance records, checked against its own totals."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.acceptance.tally import Tally
from mtp_train.decoding.base import Decoding
from mtp_train.decoding.chain import Chain
from mtp_train.decoding.prompt_lookup import PromptLookup
from mtp_train.engine.base import SpeculateRequest, SpeculateSettings
from mtp_train.exporter.served import Served, read_served
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
        scheme=settings.decoding.shape,
        decoding=settings.decoding.word,
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


def served_for(decoding: Decoding, draft: Path | None, *, target_path: Path) -> Served:
    """How vLLM runs a scheme: chains with a head from its served folder, prompt lookup by its own method ngram.

    Errors: NotImplementedError for schemes that vLLM does not serve; ValueError where ``draft`` is no served folder, or can give
    fewer drafts than are asked for.
    """
    if isinstance(decoding, PromptLookup):
        config = {"method": "ngram", "prompt_lookup_min": decoding.min_ngram, "prompt_lookup_max": decoding.max_ngram}
        return Served(class_name="ngram", speculative_config=config, hf_overrides=None, plugin=None, target_path=str(target_path))
    if not isinstance(decoding, Chain):
        raise NotImplementedError(f"engine=vllm drafts chains; decoding={decoding.word} is measured by engine=hf")
    if not decoding.refresh:
        raise NotImplementedError("engine=vllm always runs the head again over accepted tokens; refresh=false is measured by engine=hf")
    assert draft is not None, "chains need a head"
    served = read_served(draft)
    if served.max_speculative_tokens is not None and decoding.depth > served.max_speculative_tokens:
        raise ValueError(
            f"decoding.num_speculative_tokens: expected at most {served.max_speculative_tokens}, for which {draft} has heads, "
            f"found {decoding.depth}"
        )
    return served


def prompt_acceptance(request: SpeculateRequest, answer: Mapping[str, Any], settings: SpeculateSettings) -> PromptAcceptance:
    """Count one answer's verifications by the rules that the reference decoder and the estimate use.

    ``emitted_per_step`` are all steps and ``verifications_up_to_step`` the verifications until then, since a method may draft
    nothing at a step (ngram without a match); ``drafted_per_step`` and ``accepted_per_step`` are of the verifications alone.
    """
    tally = Tally(num_speculative_tokens=settings.num_speculative_tokens)
    records = deque(zip(answer["drafted_per_step"], answer["accepted_per_step"], strict=True))
    emitted, verified = 0, 0
    for num_kept, num_verifications in zip(answer["emitted_per_step"], answer["verifications_up_to_step"], strict=True):
        assert num_verifications - verified <= 1, f"{request.prompt_id}: one verification a step"
        if num_verifications > verified:
            num_drafted, num_accepted = records.popleft()
            num_drafted = min(num_drafted, settings.sampling.max_new_tokens - emitted)
            tally.verification(num_drafted=num_drafted, num_accepted=min(num_accepted, num_drafted), num_kept=num_kept)
        else:
            assert num_kept == 1, f"{request.prompt_id}: {num_kept} tokens of a step that verified nothing"
            tally.first_token()
        emitted, verified = emitted + num_kept, num_verifications
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
