"""Whether measurements that stand side by side were made alike, since readers will compare their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtp_train.acceptance.report_data import Measurement
from mtp_train.acceptance.report_way import way_of
from mtp_train.records import Acceptance


def unlike(measurements: Sequence[Measurement]) -> Iterator[str]:
    """A sentence for each table whose heads were not measured alike, since their figures would be read as a comparison."""
    tables: dict[tuple[str, str], list[Measurement]] = {}
    for item in counted(measurements):
        tables.setdefault((item.prompt_set, way_of(item.acceptance).text), []).append(item)
    for (prompt_set, way), items in tables.items():
        stated = {item.head: _stated(item) for item in items}
        first = next(iter(stated.values()))
        for key in first:
            found = {head: values[key] for head, values in stated.items()}
            if any(value != first[key] for value in found.values()):
                said = "not the same" if key == "prompts" else "; ".join(f"{head} {value}" for head, value in found.items())
                yield f"{prompt_set}, {way}: the heads were not measured alike and cannot be compared; {key}: {said}."


def counted(measurements: Sequence[Measurement]) -> Iterator[Measurement]:
    """Those that were made to count: no estimates, and no proofs of identity beside a count."""
    decoded = [item for item in measurements if not item.is_estimate]
    for item in decoded:
        here = item.prompt_set, way_of(item.acceptance)
        if not is_proof_alone(item, [other for other in decoded if (other.prompt_set, way_of(other.acceptance)) == here]):
            yield item


def is_proof_alone(measurement: Measurement, decoded: Sequence[Measurement]) -> bool:
    """Whether a run was made to compare texts, beside one (in ``decoded``: those of one set and way) of the same head by the same
    engine that was made to count: without a comparison, or in the engine's own dtype before this one in float32."""
    if measurement.identity is None:
        return False
    mine = measurement.acceptance
    others = [other for other in decoded if other.head == measurement.head and other.acceptance.measured_by == mine.measured_by]
    if any(other.identity is None for other in others):
        return True
    return mine.dtype == "float32" and any(other.acceptance.dtype != "float32" for other in others)


def prompts_of(acceptance: Acceptance) -> frozenset[tuple[str, int]]:
    """The prompts that were measured on: their ids and lengths."""
    return frozenset((prompt.prompt_id, prompt.num_prompt_tokens) for prompt in acceptance.prompts)


def limit_of(acceptance: Acceptance) -> int | None:
    """The most tokens that an answer could have; None where it is not stated."""
    found = acceptance.notes.get("max_new_tokens")
    return found if isinstance(found, int) else None


def apart(first: Measurement, second: Measurement) -> list[str]:
    """What forbids to pair two measurements prompt by prompt, each as a key with both values; none: they can be paired.

    What one of them does not state forbids nothing.
    """
    one, other = first.acceptance, second.acceptance
    found = []
    if engine_of(one) != engine_of(other):
        found.append(f"engine {engine_of(one)} and {engine_of(other)}")
    if prompts_of(one) != prompts_of(other):
        shared = len(prompts_of(one) & prompts_of(other))
        found.append(f"prompts {len(one.prompts)} and {len(other.prompts)}, {shared} of them the same")
    keys = (
        ("max_new_tokens", "ignore_eos") if one.temperature == 0 == other.temperature else ("max_new_tokens", "ignore_eos", "top_p", "seed")
    )
    for key in keys:
        values = one.notes.get(key), other.notes.get(key)
        if None not in values and values[0] != values[1]:
            found.append(f"{key} {values[0]} and {values[1]}")
    return found


def engine_of(acceptance: Acceptance) -> str:
    """Who counted: engine, version and dtype."""
    return f"{acceptance.measured_by} ({acceptance.engine_version}, {acceptance.dtype})"


def _stated(item: Measurement) -> dict[str, Any]:
    acceptance = item.acceptance
    return {
        "engine": engine_of(acceptance),
        **{key: acceptance.notes.get(key) for key in ("max_new_tokens", "top_p", "seed", "decoding", "ignore_eos")},
        "prompts": [(prompt.prompt_id, prompt.num_prompt_tokens) for prompt in acceptance.prompts],
    }
