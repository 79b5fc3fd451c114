"""Builds responses from a data set's own answers, and splits a conversation into the turns that the target answers itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from mtp_train.prompt.skips import Skip, SkipCounts
from mtp_train.prompt.template import ChatTemplate, Encoding, TemplateRefusal
from mtp_train.records import FinishReason, Prompt, Response

LengthPolicy = Literal["truncate", "drop"]
LENGTH_POLICIES: tuple[LengthPolicy, ...] = ("truncate", "drop")


def build_response(prompt: Prompt, template: ChatTemplate, *, max_length: int, policy: LengthPolicy) -> Response | Skip:
    """The conversation with the data set's own answers as tokens (finish reason ``given``), or why it is not used.

    Longer than ``max_length`` tokens: ``drop`` skips it, ``truncate`` keeps the first ``max_length`` tokens up to the
    last one of the assistant's, cuts ``messages`` to match, and states the finish reason ``length``, so that half an
    answer never passes for a whole one. Where not one answer token is left it is skipped under either policy.
    """
    return _build(prompt, template, max_length=max_length, policy=policy)[0]


def build_responses(
    prompts: Iterable[Prompt], template: ChatTemplate, *, max_length: int, policy: LengthPolicy, counts: SkipCounts | None = None
) -> tuple[list[Response], SkipCounts]:
    """:func:`build_response` over a data set. ``counts`` (the loader's) is continued where given.

    ValueError where the template cannot say where the assistant speaks, and where no response has an assistant token.
    """
    _check_length(max_length, policy)
    template.check()
    counts = SkipCounts() if counts is None else counts
    continued = counts.num_rows > 0
    counts.num_kept = 0
    responses = []
    for prompt in prompts:
        counts.num_rows += 0 if continued else 1
        built, notes = _build(prompt, template, max_length=max_length, policy=policy)
        if isinstance(built, Skip):
            counts.skip(built, row=prompt.prompt_id)
            continue
        for note in notes:
            counts.note(note, row=prompt.prompt_id)
        responses.append(built)
        counts.num_kept += 1
    if not responses:
        raise ValueError(
            f"no token of the whole data set counts in the loss: {counts.summary()}; "
            "use a data set with answers, or let the target answer it (regenerate)"
        )
    return responses, counts


def _build(prompt: Prompt, template: ChatTemplate, *, max_length: int, policy: LengthPolicy) -> tuple[Response | Skip, tuple[Skip, ...]]:
    _check_length(max_length, policy)
    messages = prompt.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return Skip(reason="no_assistant_text", why="no assistant turn: nothing to learn until the target has answered (regenerate)"), ()
    if open_turns := [index for index in answers if not _says_something(messages[index])]:
        return Skip(reason="empty_assistant", why=f"message {open_turns[0]}: the assistant turn is empty: no token to learn"), ()
    notes: list[Skip] = []
    if answers[-1] < len(messages) - 1:
        notes.append(Skip(reason="trailing_turn_dropped", why=f"{len(messages) - 1 - answers[-1]} turn(s) behind the last answer"))
        messages = messages[: answers[-1] + 1]
    try:
        encoding = template.analyse(messages)
    except TemplateRefusal as refusal:
        return refusal.skip, ()
    notes += encoding.notes
    finish_reason: FinishReason = "given"
    if len(encoding.token_ids) > max_length:
        if encoding.turns[0].start >= max_length:
            why = f"the prompt has {encoding.turns[0].start} tokens of at most {max_length}: no answer token left"
            return Skip(reason="prompt_too_long", why=why), ()
        if policy == "drop":
            return Skip(reason="too_long", why=f"{len(encoding.token_ids)} tokens, more than {max_length} (policy drop)"), ()
        notes.append(Skip(reason="truncated", why=f"{len(encoding.token_ids)} tokens, cut to {max_length}"))
        encoding, messages = _truncate(encoding, messages, template, max_length)
        finish_reason = "length"
    response = Response(
        prompt_id=prompt.prompt_id,
        token_ids=encoding.token_ids,
        loss_mask=encoding.loss_mask,
        messages=messages,
        finish_reason=finish_reason,
        category=prompt.category,
        source=prompt.source,
    )
    return response, tuple(notes)


def _truncate(
    encoding: Encoding, messages: tuple[dict[str, Any], ...], template: ChatTemplate, max_length: int
) -> tuple[Encoding, tuple[dict[str, Any], ...]]:
    """Cut behind the last assistant token within ``max_length``: a question without its answer would only cost prefill."""
    reached = [turn for turn in encoding.turns if turn.start < max_length]
    last = reached[-1]
    end = min(last.end, max_length)
    kept = messages[: last.message_index + 1]
    if end < last.end:
        kept = (*kept[:-1], {**kept[-1], "content": template.decode_answer(encoding.token_ids[last.start : end])})
    turns = tuple(turn if turn.end <= end else type(turn)(message_index=turn.message_index, start=turn.start, end=end) for turn in reached)
    return Encoding(token_ids=encoding.token_ids[:end], turns=turns, notes=encoding.notes), kept


def turns_to_answer(prompt: Prompt) -> tuple[tuple[dict[str, Any], ...], ...]:
    """What is said before each answer that the target is to give: the first group opens the conversation, each later
    one follows the target's answer to the one before.

    The data set's own answers are left out, except where tool results follow: a result belongs to the call it answers,
    so there the whole history stands as given and only the last answer is the target's.
    """
    messages = prompt.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if any(message["role"] == "tool" for message in messages):
        return (messages,)
    groups: list[tuple[dict[str, Any], ...]] = [()]
    for message in messages:
        if message["role"] != "assistant":
            groups[-1] = (*groups[-1], message)
        elif groups[-1]:
            groups.append(())
    return tuple(group for group in groups if group)


def _says_something(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _check_length(max_length: int, policy: str) -> None:
    if max_length < 2:
        raise ValueError(f"max_length: expected at least 2 tokens (a prompt and an answer), found {max_length}")
    if policy not in LENGTH_POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(LENGTH_POLICIES)}, found {policy!r}")
