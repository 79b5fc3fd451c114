"""Measures one head on one prompt set in one way, piece by piece, each kept on disk so that nothing is measured twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mtp_train.acceptance.alike import limit_of
from mtp_train.acceptance.identity import Identity, compare, parting
from mtp_train.acceptance.report_data import Measurement, Plain, part_from_json
from mtp_train.decoding.base import Decoding
from mtp_train.engine.base import Baseline, Engine, PrefillSettings, Sampling, SpeculateRequest, SpeculateSettings
from mtp_train.engine.estimate_from_cache import estimate
from mtp_train.head.base import Head
from mtp_train.prompt.build import turns_to_answer
from mtp_train.prompt.skips import SkipCounts
from mtp_train.prompt.template import ChatTemplate, TemplateRefusal
from mtp_train.records import Acceptance, Prompt, Response
from mtp_train.runtime import SEAL, atomic_write_json, check_seal, log, read_object, seal

# Tokens packed into one unroll of the estimate; bounds its memory.
_ESTIMATE_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Finished measurements of one head, one JSON file each. ``identity`` is what they depend on: a piece that was
    measured under another is measured again, and the log says so."""

    folder: Path
    identity: dict[str, Any]

    def holds(self, key: str, settings: Any) -> bool:
        """Whether ``get`` would find the piece on disk, but for damage to what was measured."""
        try:
            return bool(read_object(self._path(key), {"depends_on": str}, remedy="")["depends_on"] == self._wanted(settings))
        except ValueError:
            return False

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _wanted(self, settings: Any) -> str:
        stated = json.dumps({"identity": self.identity, "settings": settings}, sort_keys=True, default=str)
        return hashlib.sha256(stated.encode()).hexdigest()

    def get(self, key: str, settings: Any, measure: Callable[[], Measurement]) -> Measurement:
        """The piece ``key`` from disk where it is there and of the same settings, else measured now and kept."""
        path, wanted = self._path(key), self._wanted(settings)
        if path.is_file():
            try:
                found = read_object(path, {"depends_on": str, "measurement": dict}, remedy="it is measured again")
                if found["depends_on"] == wanted:
                    check_seal(found, where=path, remedy="it is measured again")
                    kept = part_from_json(Measurement, found["measurement"])
                    log(f"evaluate: {key} is measured already")
                    return kept
                log(f"evaluate: {key} was measured with other settings or another head{_size(found)}, and is measured again")
            except ValueError as fault:
                log(f"evaluate: {fault}")
        measurement = measure()
        document = {"depends_on": wanted, "measurement": asdict(measurement)}
        atomic_write_json(path, {**document, SEAL: seal(document)})
        return measurement


def _size(piece: dict[str, Any]) -> str:
    """In brackets what a piece of other settings was measured on; empty where it does not say."""
    try:
        acceptance = part_from_json(Measurement, piece["measurement"]).acceptance
    except ValueError:
        return ""
    return f" ({len(acceptance.prompts)} prompts, max_new_tokens {limit_of(acceptance)})"


def requests_of(
    prompts: Sequence[Prompt], template: ChatTemplate, *, max_length_tokens: int, max_new_tokens: int
) -> tuple[list[SpeculateRequest], SkipCounts]:
    """The first turn of each prompt as token ids; what the template refuses, or leaves no room for an answer, is counted."""
    counts = SkipCounts(num_rows=len(prompts))
    requests = []
    for prompt in prompts:
        try:
            encoded = template.encode_prompt(turns_to_answer(prompt)[0])
            if len(encoded) + max_new_tokens > max_length_tokens:
                why = f"{len(encoded)} tokens leave no room for an answer of {max_new_tokens} within {max_length_tokens}"
                raise TemplateRefusal("prompt_too_long", why)
        except TemplateRefusal as refusal:
            counts.skip(refusal.skip, row=prompt.prompt_id)
            continue
        requests.append(SpeculateRequest(prompt_id=prompt.prompt_id, category=prompt.category, token_ids=encoded))
    counts.num_kept = len(requests)
    if not requests:
        raise ValueError(f"prompt set: expected prompts to decode, found none: {counts.summary()}")
    return requests, counts


def decode(
    *,
    head: str,
    prompt_set: str,
    engine: Engine,
    requests: Sequence[SpeculateRequest],
    draft: Path | None,
    settings: SpeculateSettings,
    plain: bool,
) -> Measurement:
    """Speculative decoding of a prompt set, and plain decoding of the same where asked, by the same settings.

    Greedy texts are compared where rounding may make them part (``prove_identity`` does it in float32).
    """
    acceptance = engine.speculate(requests, draft, settings)
    if not plain:
        return Measurement(head=head, prompt_set=prompt_set, acceptance=acceptance, plain=None, identity=None)
    baseline = engine.baseline(requests, settings)
    compared = settings.sampling.temperature == 0 and engine.dtype != "float32"
    identity = _identity(engine, requests, acceptance, baseline) if compared else None
    return Measurement(head=head, prompt_set=prompt_set, acceptance=acceptance, plain=_plain(baseline), identity=identity)


def prove_identity(
    *,
    head: str,
    prompt_set: str,
    engine: Engine,
    requests: Sequence[SpeculateRequest],
    draft: Path | None,
    settings: SpeculateSettings,
    baseline: Baseline | None = None,
) -> Measurement:
    """Greedy decoding with and without drafts on the same prompts, compared token for token; ``baseline``: the latter, where it is done."""
    acceptance = engine.speculate(requests, draft, settings)
    if baseline is None:
        baseline = engine.baseline(requests, settings)
    identity = _identity(engine, requests, acceptance, baseline)
    return Measurement(head=head, prompt_set=prompt_set, acceptance=acceptance, plain=_plain(baseline), identity=identity)


def _identity(engine: Engine, requests: Sequence[SpeculateRequest], acceptance: Acceptance, baseline: Baseline) -> Identity:
    """Whether both runs wrote the same; the engine is asked for all logit gaps together, since it may start for them."""
    prompts = {request.prompt_id: request.token_ids for request in requests}
    texts = {"plain": baseline.token_ids, "speculated": {prompt.prompt_id: prompt.token_ids for prompt in acceptance.prompts}}
    prefixes = [(*prompts[name], *baseline.token_ids[name][:index]) for name, index in parting(**texts).items()]
    gaps = dict(zip(prefixes, engine.logit_gaps(prefixes), strict=True))
    return compare(prompts=prompts, **texts, logit_gap=lambda token_ids: gaps[tuple(token_ids)])


def _plain(baseline: Baseline) -> Plain:
    return Plain(num_tokens=sum(len(ids) for ids in baseline.token_ids.values()), wall_s=baseline.wall_s)


def estimate_from_answers(
    *,
    head: str,
    prompt_set: str,
    engine: Engine,
    load: Callable[[Path], Head],
    draft: Path,
    requests: Sequence[SpeculateRequest],
    answers: Acceptance,
    settings: SpeculateSettings,
) -> Measurement:
    """The acceptance estimate on the answers that speculation wrote, which are the target's own: prefilled, unrolled, walked."""
    trained = load(draft)
    asked = {request.prompt_id: request for request in requests}
    responses = [
        Response(
            prompt_id=prompt.prompt_id,
            token_ids=asked[prompt.prompt_id].token_ids + prompt.token_ids,
            loss_mask=(False,) * len(asked[prompt.prompt_id].token_ids) + (True,) * len(prompt.token_ids),
            messages=(),
            finish_reason="stop",
            category=prompt.category,
            source=prompt_set,
        )
        for prompt in answers.prompts
    ]
    acceptance = estimate(
        trained,
        engine.prefill(responses, PrefillSettings(target_layer_ids=trained.target_layer_ids, top_k=None)),
        num_speculative_tokens=settings.num_speculative_tokens,
        draft_sampling=settings.draft_sampling,
        sampling=settings.sampling,
        max_batch_tokens=_ESTIMATE_TOKENS,
        device=next(trained.parameters()).device,
    )
    return Measurement(head=head, prompt_set=prompt_set, acceptance=acceptance, plain=None, identity=None)


@cache
def _say_chosen_by_rule(word: str) -> None:
    """Once, however many ways of one run ask for drawn drafts."""
    log(f"decoding={word}: drafts are chosen by a rule here: draft_sampling is greedy (q one-hot), not probabilistic")


def speculate_settings(
    *, decoding: Decoding, way: dict[str, Any], max_new_tokens: int, seed: int, batch_size: int, draws: bool
) -> SpeculateSettings:
    """The engine's settings from those of the command line. Where drafts cannot be drawn (``draws`` of the scheme and of whoever
    drafts), drawn ones are not asked for, and the log says so."""
    draft_sampling = way["draft_sampling"]
    if draft_sampling == "probabilistic" and not draws:
        _say_chosen_by_rule(decoding.word)
        draft_sampling = "greedy"
    return SpeculateSettings(
        decoding=decoding,
        draft_sampling=draft_sampling,
        sampling=Sampling(temperature=way["temperature"], top_p=way["top_p"], max_new_tokens=max_new_tokens, seed=seed),
        batch_size=batch_size,
        ignore_eos=False,
    )
