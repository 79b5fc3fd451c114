"""Brings all heads measured into one report folder together: what stands on disk becomes one ``ReportData``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mtp_train.acceptance.alike import unlike
from mtp_train.acceptance.belonging import certificate_of, costs_of
from mtp_train.acceptance.certificate import Certificate
from mtp_train.acceptance.costs import FOLDER, CostTable, read_costs
from mtp_train.acceptance.report import read_certificate
from mtp_train.acceptance.report_data import (
    WEIGHTS_FACT,
    Aim,
    MarkedAnswer,
    Measurement,
    PromptSet,
    ReportData,
    TrainedHead,
    part_from_json,
)
from mtp_train.checkpoint import WEIGHTS, read_head_config
from mtp_train.decoding.base import Decoding
from mtp_train.engine.base import SpeculateRequest
from mtp_train.engine.standing import Standing, set_of, standing
from mtp_train.prompt.template import ChatTemplate
from mtp_train.runtime import SEAL, atomic_write_json, check_seal, log, read_json, read_json_lines, read_object, seal

_HEAD_FILES = ("head.json", "head.*.json")
_METRICS = "metrics.jsonl"
_NO_HEAD = "no head"  # what stands for the architecture of a scheme without one
_STAGES = ("regenerate", "precompute")


def piece_key(key: str, decoding: str) -> str:
    """What is kept under ``key`` for chains, for another scheme beside it (which itself is not named twice)."""
    return key if decoding in ("chain", key) else f"{key}.{decoding}"


def marked_answers(
    head: str, measurement: Measurement, requests: Sequence[SpeculateRequest], template: ChatTemplate, *, num_shown: int
) -> tuple[MarkedAnswer, ...]:
    """Up to ``num_shown`` answers of different categories with their tokens' texts and which were drafted."""
    questions = {request.prompt_id: request.token_ids for request in requests}
    shown: dict[str, MarkedAnswer] = {}
    for prompt in measurement.acceptance.prompts:
        if prompt.category in shown or prompt.prompt_id not in questions:
            continue
        shown[prompt.category] = MarkedAnswer(
            head=head,
            prompt_set=measurement.prompt_set,
            prompt_id=prompt.prompt_id,
            category=prompt.category,
            question=_last_turn(template.decode(questions[prompt.prompt_id])),
            token_texts=tuple(template.decode([token]) for token in prompt.token_ids),
            accepted=prompt.accepted,
        )
    return tuple(list(shown.values())[:num_shown])


def _last_turn(text: str, *, most_chars: int = 600) -> str:
    """The end of a rendered prompt: enough to know the question by."""
    return text if len(text) <= most_chars else "[...] " + text[-most_chars:]


def write_head(
    folder: Path,
    *,
    name: str,
    checkpoint: Path | None,
    decoding: Decoding,
    measured: Sequence[Measurement],
    answers: Sequence[MarkedAnswer],
    prompt_sets: Sequence[PromptSet],
    target: Mapping[str, str],
    provenance: Mapping[str, Any],
) -> None:
    """Keep all that the report says of one head with one scheme in ``folder``, written last of its pieces.

    ``checkpoint`` None: a scheme without a head. What was measured with other schemes stays beside it, unless the head's
    weights are others now; what an earlier evaluate measured and this one did not, as ``standing`` says. Where nothing was measured
    anew, what is there stays, and says when it was.
    """
    head, provenance_of_head = _without_head(name, decoding), dict[str, Any]()
    if checkpoint is not None:
        config = read_head_config(checkpoint)
        metrics = read_json_lines(checkpoint / _METRICS) if (checkpoint / _METRICS).is_file() else []
        provenance_of_head = {f"train {name}": config["made_by"]}
        facts = _facts(config, metrics, num_parameters=_num_parameters(checkpoint))
        head = TrainedHead(name=name, word=config["head"], facts=facts, metrics=tuple(metrics))
    path = folder / (piece_key("head", decoding.word) + ".json")
    there = _document(path, name=name) if path.is_file() else None
    before = standing(folder, there, facts=head.facts, measured=measured) if there is not None else Standing([], [], [])
    sets = {item.name: item for item in prompt_sets}
    sets |= {item.prompt_set: set_of(there, item.prompt_set) for item in before.kept if there is not None and item.prompt_set not in sets}
    document = {
        "head": asdict(head),
        "measurements": [asdict(item) for item in (*measured, *before.kept)],
        "prompt_sets": [asdict(item) for item in sets.values()],
        "stays": before.stays,
        "replaced": before.replaced,
        "answers": [asdict(item) for item in answers],
        "target": dict(target),
        "provenance": provenance_of_head | {f"evaluate {piece_key(name, decoding.word)}": dict(provenance)},
    }
    said = json.loads(json.dumps(document))
    if there is None or any(there.get(key) != said[key] for key in said.keys() - {"provenance"}):
        atomic_write_json(path, {**document, SEAL: seal(document)})
    for other, found in _documents(folder, name=name):
        if other != path and found["head"]["facts"].get(WEIGHTS_FACT) != head.facts.get(WEIGHTS_FACT):
            log(f"evaluate: {other.name} was measured with other weights of {name} and leaves the report; run it again")
            other.unlink()


def _documents(folder: Path, *, name: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What ``write_head`` kept in one head's folder, chains first."""
    for pattern in _HEAD_FILES:
        for path in sorted(folder.glob(pattern)):
            document = _document(path, name=name)
            if document is not None:
                yield path, document


def _document(path: Path, *, name: str | None) -> dict[str, Any] | None:
    """What stands of one head with one scheme; None for a piece of a prompt set that is called head.

    Errors: ValueError where the file is damaged; where it is that of the head ``name``, which is about to be written
    again, it is passed over.
    """
    kinds = {"head": dict, "measurements": list[dict], "answers": list[dict], "target": dict, "provenance": dict}
    remedy = f"delete it, and evaluate name={path.parent.name} again: what was measured is kept"
    try:
        if "depends_on" in read_object(path, {}, remedy=remedy):
            return None
        document = read_object(path, kinds, remedy=remedy)
        check_seal(document, where=path, remedy=remedy)
    except ValueError as fault:
        if path.parent.name != name:
            raise
        log(str(fault))
        return None
    return document


def _of_all_heads(out: Path, *, name: str | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in sorted((out / "pieces").glob("*")):
        yield from _documents(folder, name=name)


def _without_head(name: str, decoding: Decoding) -> TrainedHead:
    settings = {key: json.dumps(value) for key, value in decoding.stated().items()}
    return TrainedHead(name=name, word=_NO_HEAD, facts={"trained": "nothing", **settings}, metrics=())


def _facts(config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], *, num_parameters: int) -> dict[str, Any]:
    """What a reader wants to know of a head before its figures."""
    settings = config["made_by"].get("settings", {})
    last = metrics[-1] if metrics else {}
    norms = config["settings"].get("norms", {})
    return {
        "parameters": f"{num_parameters / 1e6:.2f} M",
        "norms on": ", ".join(name for name, on in norms.items() if on) or "none",
        "steps": last.get("step"),
        "tokens trained on": last.get("tokens"),
        "losses": json.dumps(settings.get("losses")),
        WEIGHTS_FACT: config["weights_sha256"][:16],
    }


def _num_parameters(checkpoint: Path) -> int:
    from safetensors import safe_open

    with safe_open(checkpoint / WEIGHTS, framework="pt") as opened:
        slices = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118 - not a dict
        return sum(math.prod(found.get_shape()) for found in slices if found.get_dtype() == "F32")  # integers are no parameters


def check_target(out: Path, target: Mapping[str, str], *, name: str) -> None:
    """ValueError where ``out`` holds heads measured on another target than this one (an identity as artefacts state it).

    A damaged file is passed over where it is that of the head ``name``, which is about to be written again.
    """
    for path, document in _of_all_heads(out, name=name):
        stated = document["target"]
        differing = [key for key in target if key != "target_name" and stated.get(key) != target[key]]
        if differing:
            key, head = differing[0], path.parent.name
            raise ValueError(
                f"{out}: expected measurements on {target['target_name']} ({key} {target[key][:16]}), found head {head} measured "
                f"on {stated.get('target_name')} ({key} {str(stated.get(key))[:16]}); choose another run= or out=, or delete {path.parent}"
            )


def collect(out: Path, *, target: Mapping[str, Any], run_folder: Path, aims: Sequence[Mapping[str, Any]]) -> ReportData:
    """The report of every head whose pieces lie in ``out/pieces``, in the order of their names."""
    documents = [document for _, document in _of_all_heads(out)]
    by_name = {document["head"]["name"]: document for document in reversed(documents)}  # the first of each: its chains, where measured
    heads = tuple(part_from_json(TrainedHead, by_name[name]["head"]) for name in dict.fromkeys(d["head"]["name"] for d in documents))
    sets = _placed(documents)
    measurements = tuple(part_from_json(Measurement, item) for document in documents for item in document["measurements"])
    answers = tuple(part_from_json(MarkedAnswer, item) for head in heads for item in by_name[head.name]["answers"])
    names = [prompt_set.name for prompt_set in sets]
    provenance: dict[str, Any] = {}
    for stage, folder in zip(_STAGES, ("responses", "cache"), strict=True):
        path = run_folder / folder / f"settings.{stage}.json"
        if path.is_file():
            provenance[stage] = read_json(path)
    for document in documents:
        provenance |= document["provenance"]
    certificate, not_certified = _certificate(out, heads, target)
    costs, not_timed = costs_of(_costs(out, target), heads=heads)
    trained = [head for head in heads if head.word != _NO_HEAD]  # aims are for heads
    listed = [Aim(head=head.name, **aim) for aim in aims for head in trained if aim["prompt_set"] in names]
    return ReportData(
        title=f"Acceptance of {' and '.join(head.name for head in heads)} on {target['name']}",
        target=dict(target),
        heads=heads,
        prompt_sets=tuple(sets),
        measurements=measurements,
        answers=answers,
        aims=tuple(listed),
        provenance=provenance,
        notes=(
            *unlike(measurements),
            *(text for document in documents for text in (*document.get("replaced", ()), *document.get("stays", ()))),
            *not_certified,
            *not_timed,
        ),
        certificate=certificate,
        costs=costs,
    )


def _placed(documents: Sequence[dict[str, Any]]) -> list[PromptSet]:
    """The prompt sets of all documents, as their sources describe them. Where heads were measured on sources of one name, the documents
    that came later are given names of their own for them."""
    sets: list[PromptSet] = []
    for document in documents:
        names: dict[str, str] = {}
        for name in dict.fromkeys(item["prompt_set"] for item in document["measurements"]):
            found = set_of(document, name)
            taken = {known.name: known for known in sets}
            choices = (name, f"{name}: {found.label}", *(f"{name}: {found.label} ({number})" for number in range(2, len(sets) + 3)))
            chosen = next(
                word
                for word in choices
                if word not in taken or (taken[word].label, taken[word].description) == (found.label, found.description)
            )
            if chosen not in taken:
                sets.append(replace(found, name=chosen))
            names[name] = chosen
        for item in (*document["measurements"], *document["answers"]):
            item["prompt_set"] = names.get(item["prompt_set"], item["prompt_set"])
    return sets


def _certificate(out: Path, heads: Sequence[TrainedHead], target: Mapping[str, Any]) -> tuple[Certificate | None, list[str]]:
    """What the certificate in ``out`` says of these heads, and a sentence for what it says of others."""
    found = read_certificate(out)
    return (None, []) if found is None else certificate_of(found, heads=heads, target=target)


def _costs(out: Path, target: Mapping[str, Any]) -> tuple[CostTable, ...]:
    """The tables of costs that were measured for this report. ValueError for one of another target."""
    found = read_costs(out)
    for table in found:
        if table.target_fingerprint != target.get("fingerprint"):
            raise ValueError(
                f"{out}: expected costs measured on {target['name']} ({str(target.get('fingerprint'))[:16]}), found those of "
                f"{table.label} on {table.target_name} ({table.target_fingerprint[:16]}); delete them from {out / FOLDER}, or "
                "measure again (tools/measure_costs.py)"
            )
    return found
