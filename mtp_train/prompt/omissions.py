"""Finds what a chat template leaves out of a conversation without saying so: tool calls, reasoning, the end of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtp_train.prompt.skips import Skip

Message = Mapping[str, Any]
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_TOOL_PROBE = "zqprobe"


def tool_probes(messages: Sequence[Message]) -> list[dict[str, Any]] | None:
    """The messages with a mark in place of each tool's name and result, to be rendered; None where no tool is used."""
    if not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return None
    probes = []
    for index, message in enumerate(messages):
        probe = dict(message)
        if "tool_calls" in probe:
            probe["tool_calls"] = [
                {**call, "function": {**call["function"], "name": f"{_TOOL_PROBE}{index}c"}} for call in probe["tool_calls"]
            ]
        if probe["role"] == "tool":
            probe["content"] = f"{_TOOL_PROBE}{index}r"
        probes.append(probe)
    return probes


def lost_tools(messages: Sequence[Message], rendered_probes: str) -> Skip | None:
    """Why the conversation cannot be used: a tool call or result whose mark doesn't show in the rendered probes."""
    for index, message in enumerate(messages):
        if "tool_calls" in message and f"{_TOOL_PROBE}{index}c" not in rendered_probes:
            return Skip(reason="tools_not_rendered", why=f"message {index}: the template does not render tool calls")
        if message["role"] == "tool" and f"{_TOOL_PROBE}{index}r" not in rendered_probes:
            return Skip(reason="tools_not_rendered", why=f"message {index}: the template does not render tool results")
    return None


def dropped_thinking(messages: Sequence[Message], texts: Mapping[int, str]) -> list[Skip]:
    """A note for each assistant turn whose reasoning is not in its rendered text: it is not read, so it cannot count.

    ``texts`` is {message index: the turn's text as rendered}, for the turns that count.
    """
    notes = []
    for index, message in enumerate(messages):
        lost = [thought for thought in _thoughts(message) if thought not in texts.get(index, "")]
        if lost:
            notes.append(
                Skip(reason="thinking_dropped", why=f"message {index}: the template does not render the reasoning {lost[0][:60]!r}")
            )
    return notes


def cut_answers(messages: Sequence[Message], texts: Mapping[int, str], stops: Sequence[str]) -> list[Skip]:
    """A note for each answer that holds a stop token's text, and so ends before its own last word, as generation would."""
    return [
        Skip(reason="end_of_turn_inside", why=f"message {index}: the answer's text holds {stop!r}, and counts up to there")
        for index in texts
        for stop in stops
        if stop in messages[index]["content"]
    ]


def _thoughts(message: Message) -> list[str]:
    """The reasoning an assistant message holds, inside ``<think>`` or beside its content."""
    if message["role"] != "assistant":
        return []
    thoughts = [*_THINKING.findall(message["content"]), message.get("reasoning_content") or ""]
    return [thought.strip() for thought in thoughts if thought.strip()]
