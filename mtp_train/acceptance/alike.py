"""Whether measurements that stand side by side were made alike, since readers will compare their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtp_train.acceptance.report_data import Measurement
from mtp_train.acceptance.report_way import way_of


def unlike(measurements: Sequence[Measurement]) -> Iterator[str]:
    """A sentence for each table whose heads were not measured alike, since their figures would be read as a comparison."""
    tables: dict[tuple[str, str], list[Measurement]] = {}
    for item in measurements:
        if not item.is_estimate and item.identity is None:
            tables.setdefault((item.prompt_set, way_of(item.acceptance).text), []).append(item)
    for (prompt_set, way), items in tables.items():
        stated = {item.head: _stated(item) for item in items}
        first = next(iter(stated.values()))
        for key in first:
            found = {head: values[key] for head, values in stated.items()}
            if any(value != first[key] for value in found.values()):
                said = "not the same" if key == "prompts" else "; ".join(f"{head} {value}" for head, value in found.items())
                yield f"{prompt_set}, {way}: the heads were not measured alike and cannot be compared; {key}: {said}."


def _stated(item: Measurement) -> dict[str, Any]:
    acceptance = item.acceptance
    return {
        "engine": f"{acceptance.measured_by} ({acceptance.engine_version}, {acceptance.dtype})",
        **{key: acceptance.notes.get(key) for key in ("max_new_tokens", "top_p", "seed", "decoding", "ignore_eos")},
        "prompts": [(prompt.prompt_id, prompt.num_prompt_tokens) for prompt in acceptance.prompts],
    }
