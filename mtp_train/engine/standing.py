"""What becomes of what stood in a report when its head is measured again: it stays, is replaced or leaves, and a sentence says which."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from mtp_train.acceptance.alike import apart, counted, limit_of, prompts_of
from mtp_train.acceptance.report_data import WEIGHTS_FACT, Measurement, PromptSet, part_from_json
from mtp_train.acceptance.report_way import way_of
from mtp_train.prompt.described import described
from mtp_train.runtime import read_object


class Standing(NamedTuple):
    """``kept``: measurements of an earlier evaluate that stay, with a sentence each in ``stays``; ``replaced``: a sentence for each that
    does not, kept until something is measured anew."""

    kept: list[Measurement]
    stays: list[str]
    replaced: list[str]


def standing(folder: Path, there: Mapping[str, Any], *, facts: Mapping[str, Any], measured: Sequence[Measurement]) -> Standing:
    """What of the document ``there`` stays beside ``measured``, of a head whose facts are ``facts`` now and whose pieces are in ``folder``.

    A measurement stays while its piece is there, the weights are the same, and its prompts are those of its set now or some of them.
    """
    old, now = [part_from_json(Measurement, item) for item in there["measurements"]], [_json(item) for item in measured]
    gone = [item for item in old if _json(item) not in now]
    fresh = any(item not in there["measurements"] for item in now)
    found = Standing([], [], [] if fresh else list(there.get("replaced", ())))
    if gone and there["head"]["facts"].get(WEIGHTS_FACT) != facts.get(WEIGHTS_FACT):
        found.replaced.append(f"{old[0].head}: what an earlier evaluate measured with other weights is replaced, or leaves the report.")
        return found
    pieces, to_count = _pieces(folder) if gone else [], list(counted(old))
    for item in gone:
        here = [new for new in measured if new.prompt_set == item.prompt_set]
        odd = next((new for new in here if not _same_prompts(item, new)), None)
        there_still = _json(item) in pieces
        if there_still and odd is None:
            found.kept.append(item)
        if item not in to_count:
            continue
        if not there_still:
            found.replaced.extend(_replaced(item, list(counted(here))))
        elif odd is not None:
            found.replaced.append(f"{_named(item)} leaves the report: {_prompts_apart(item, odd)}.")
        else:
            found.stays.append(f"{_named(item)} is of an earlier evaluate{_limit(item)}, and was not measured again.")
    return found


def _pieces(folder: Path) -> list[Any]:
    """The measurements on disk, as JSON; what is damaged is none."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read_object(path, {"depends_on": str, "measurement": dict}, remedy="")["measurement"])
        except ValueError:
            continue
    return found


def _json(item: Measurement) -> Any:
    return json.loads(json.dumps(asdict(item)))


def _same_prompts(first: Measurement, second: Measurement) -> bool:
    """Whether one was measured on the other's prompts or on some of them, as a limit leaves them."""
    one, other = prompts_of(first.acceptance), prompts_of(second.acceptance)
    return one <= other or other <= one


def _prompts_apart(old: Measurement, new: Measurement) -> str:
    one, other = prompts_of(old.acceptance), prompts_of(new.acceptance)
    return f"it was measured on other prompts ({len(one)}; of the {len(other)} of now, {len(one & other)} are among them)"


def _replaced(old: Measurement, measured: Sequence[Measurement]) -> list[str]:
    """That a count is replaced, and by what that was not measured alike; nothing where it was."""
    drawn = old.acceptance.temperature, old.acceptance.draft_sampling
    new = next((item for item in measured if (item.acceptance.temperature, item.acceptance.draft_sampling) == drawn), None)
    if new is None:
        return [f"{_named(old)} leaves the report: what an earlier evaluate measured is no longer on disk."]
    ways = way_of(old.acceptance), way_of(new.acceptance)
    why = apart(old, new) + ([] if ways[0] == ways[1] else [f"{ways[0].drafted} and {ways[1].drafted}"])
    return [f"{_named(old)} was measured anew, which replaces an earlier evaluate's; before and now: {'; '.join(why)}."] if why else []


def _named(item: Measurement) -> str:
    return f"{item.head} on {item.prompt_set} ({way_of(item.acceptance).text})"


def _limit(item: Measurement) -> str:
    most = limit_of(item.acceptance)
    return "" if most is None else f", with max_new_tokens {most}"


def set_of(document: Mapping[str, Any], name: str) -> PromptSet:
    """How a head's document, or where it is older the settings it records, describes a prompt set: by its source, never by its name."""
    for item in document.get("prompt_sets", ()):
        if item["name"] == name:
            return part_from_json(PromptSet, item)
    for stated in document["provenance"].values():
        node = stated.get("settings", {}).get("prompt_sets", {}).get(name, {}) if isinstance(stated, dict) else {}
        if node.get("source"):
            return sets_of({name: node["source"]})[0]
    return PromptSet(name=name, label=name, description="")


def sets_of(sources: Mapping[str, str | Sequence[str]]) -> list[PromptSet]:
    """The prompt sets of these names as their sources describe them."""
    found = {name: described(source) for name, source in sources.items()}
    return [PromptSet(name=name, label=label, description=description) for name, (label, description) in found.items()]
