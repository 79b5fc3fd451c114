"""Tells by its columns which kind of data set a row comes from, and turns the row into messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_train.prompt.messages import check_text, normalise_messages
from mtp_train.prompt.skips import RowFault, Skip

# format -> columns it must have; in the order in which they are looked for. Further columns are read where they exist.
SHAPES: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "turns": ("turns",),
    "alpaca": ("instruction",),
    "prompt_completion": ("prompt",),
    "text": ("text",),
}
_OPTIONAL = ("input", "output", "system", "history", "completion", "prompt_id", "category", "tools")
KNOWN_COLUMNS = tuple(column for columns in SHAPES.values() for column in columns) + _OPTIONAL
# Where a row names itself. ``prompt_id`` is taken as it stands; the others are only unique beside the source's name.
_ID_COLUMNS = ("question_id", "id", "conversation_id", "task_id")


@dataclass(frozen=True, kw_only=True)
class ShapedRow:
    """A row brought to messages. ``prompt_id`` and ``row_id`` are what the row calls itself, where it does."""

    messages: tuple[dict[str, Any], ...]
    notes: list[Skip]
    prompt_id: str | None
    row_id: str | None
    category: str | None


def describe_shapes() -> str:
    """The known shapes for an error message."""
    return (
        "messages (messages: list of role, content), sharegpt (conversations: list of from, value), turns (turns: list of questions), "
        "alpaca (instruction, with input, output), prompt_completion (prompt, with completion), text (text)"
    )


def detect_shape(row: Mapping[str, Any]) -> str:
    """The shape's name, or a RowFault that lists the columns found and the shapes known."""
    for name, columns in SHAPES.items():
        if all(row.get(column) is not None for column in columns):
            return name
    raise RowFault("unknown_columns", f"columns found: {', '.join(map(str, row)) or 'none'}; shapes known: {describe_shapes()}")


def shape_row(value: Any, *, shape: str | None, field_map: Mapping[str, str] | None) -> ShapedRow:
    """Turn one row into messages. ``field_map`` is {known column: this data set's column}. Raises RowFault."""
    if not isinstance(value, dict):
        raise RowFault("row_type", f"expected an object with named columns, found {type(value).__name__}")
    row = dict(value)
    for ours, theirs in (field_map or {}).items():
        if theirs not in row:
            raise RowFault(
                "unknown_columns", f"field_map reads {theirs!r} as {ours!r}; columns found: {', '.join(map(str, row)) or 'none'}"
            )
        row[ours] = row[theirs]
    if shape is None:
        shape = detect_shape(row)
    elif missing := [column for column in SHAPES[shape] if row.get(column) is None]:
        raise RowFault("unknown_columns", f"format {shape} needs {', '.join(missing)}; columns found: {', '.join(map(str, row)) or 'none'}")
    messages, notes = _READERS[shape](row)
    if row.get("tools"):
        notes = [
            *notes,
            Skip(reason="tool_definitions_dropped", why="the row's tools column is not rendered: a prompt carries messages only"),
        ]
    prompt_id, category = row.get("prompt_id"), row.get("category")
    return ShapedRow(
        messages=messages,
        notes=notes,
        prompt_id=None if prompt_id is None else check_text(str(prompt_id), "prompt_id"),
        row_id=next((check_text(str(row[c]), c) for c in _ID_COLUMNS if isinstance(row.get(c), str | int)), None),
        category=check_text(category, "category") if isinstance(category, str) and category else None,
    )


def check_field_map(field_map: Mapping[str, str] | None) -> None:
    """ValueError unless the map goes from our column names to the data set's."""
    for ours, theirs in (field_map or {}).items():
        if ours not in KNOWN_COLUMNS:
            hint = " (the map goes from the known column to the data set's own)" if theirs in KNOWN_COLUMNS else ""
            raise ValueError(f"field_map: expected keys among {', '.join(KNOWN_COLUMNS)}, found {ours!r}{hint}")


def _read_messages(row: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], list[Skip]]:
    return normalise_messages(_with_system(row, row["messages"]))


def _read_sharegpt(row: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], list[Skip]]:
    return normalise_messages(_with_system(row, row["conversations"]))


def _with_system(row: dict[str, Any], messages: Any) -> Any:
    """The row's ``system`` column as a first message, where it has one and the messages don't."""
    system = row.get("system")
    if not system or not isinstance(messages, list):
        return messages
    if any(isinstance(m, dict) and "system" in (m.get("role"), m.get("from")) for m in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _read_turns(row: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], list[Skip]]:
    """MT-Bench questions, asked one after the other. The answer between two is open: an assistant turn with no text."""
    turns = row["turns"]
    if isinstance(turns, str):
        turns = [turns]
    messages, notes = normalise_messages([{"role": "user", "content": turn} for turn in turns] if isinstance(turns, list) else turns)
    asked = [messages[0]]
    for message in messages[1:]:
        asked += [{"role": "assistant", "content": ""}, message]
    return tuple(asked), notes


def _read_alpaca(row: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], list[Skip]]:
    """The input field belongs to the question: a blank line after the instruction, as Alpaca's own prompt has it."""
    instruction, extra = row["instruction"], row.get("input")
    if extra is not None and not isinstance(extra, str):
        raise RowFault("content_type", f"input: expected text, found {type(extra).__name__}")
    if extra and extra.strip() and isinstance(instruction, str):
        instruction = f"{instruction}\n\n{extra}" if instruction.strip() else extra
    messages: list[dict[str, Any]] = []
    history = row.get("history") or []
    if not isinstance(history, list | tuple):
        raise RowFault("messages_type", f"history: expected a list of pairs of question and answer, found {type(history).__name__}")
    for turn in history:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise RowFault("messages_type", "history: expected pairs of question and answer")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append({"role": "user", "content": instruction})
    if row.get("output") is not None:
        messages.append({"role": "assistant", "content": row["output"]})
    return normalise_messages(_with_system(row, messages))


def _read_prompt_completion(row: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], list[Skip]]:
    prompt, completion = row["prompt"], row.get("completion")
    messages = list(prompt) if isinstance(prompt, list | tuple) else [{"role": "user", "content": prompt}]
    if isinstance(completion, list | tuple):
        messages += completion
    elif completion is not None:
        messages.append({"role": "assistant", "content": completion})
    return normalise_messages(_with_system(row, messages))


def _read_text(row: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], list[Skip]]:
    """A document is a long question without an answer: ``regenerate`` can use it, ``precompute`` finds nothing to learn."""
    return normalise_messages([{"role": "user", "content": row["text"]}])


_READERS: dict[str, Callable[[dict[str, Any]], tuple[tuple[dict[str, Any], ...], list[Skip]]]] = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "turns": _read_turns,
    "alpaca": _read_alpaca,
    "prompt_completion": _read_prompt_completion,
    "text": _read_text,
}
