"""Brings the messages of any data set to one form: known roles, text content, a user turn before the first answer."""

from __future__ import annotations

import json
from typing import Any

from mtp_train.prompt.skips import RowFault, Skip

# Spellings met in public data sets (ShareGPT dumps, OpenAI, Vertex, OpenAssistant, LLaMA-Factory), compared in lower case.
ROLE_SPELLINGS = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "claude": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
# What templates read besides role and content; anything else (weights, ids, scores) is the data set's own affair.
_KEPT_KEYS = ("tool_call_id", "name", "reasoning_content")


def normalise_messages(raw: Any) -> tuple[tuple[dict[str, Any], ...], list[Skip]]:
    """Messages with ``role`` of system, user, assistant or tool and string ``content``, and what was changed.

    Reads OpenAI (``role``, ``content``) and ShareGPT (``from``, ``value``) keys. An assistant turn before the first
    user turn is dropped and noted: no template lets the target speak first, so it cannot be answered again. Raises
    RowFault, with the reason, for what cannot be used.
    """
    if not isinstance(raw, list | tuple) or not raw:
        raise RowFault("messages_type", f"expected a non-empty list of messages, found {_describe(raw)}")
    messages = [_normalise_message(message, index) for index, message in enumerate(raw)]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise RowFault("no_user_turn", f"expected at least one user turn, found only {', '.join(dict.fromkeys(roles))}")
    first_user = roles.index("user")
    notes = []
    if any(role != "system" for role in roles[:first_user]):
        dropped = [m for m in messages[:first_user] if m["role"] != "system"]
        messages = [m for m in messages[:first_user] if m["role"] == "system"] + messages[first_user:]
        notes.append(Skip(reason="leading_turn_dropped", why=f"{len(dropped)} turn(s) before the first user turn ({dropped[0]['role']})"))
    for index, message in enumerate(messages):
        if message["role"] == "user" and not message["content"].strip():
            raise RowFault("empty_user", f"message {index}: the user turn is empty")
        if message["role"] == "assistant" and not (message["content"].strip() or "tool_calls" in message):
            raise RowFault("empty_assistant", f"message {index}: the assistant turn is {message['content']!r}: no token to learn")
    return tuple(messages), notes


def check_text(text: str, where: str) -> str:
    """The same text, or a RowFault where it holds half a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"{where}: U+{ord(text[error.start]):04X} at character {error.start} is half of a surrogate pair"
        raise RowFault("lone_surrogate", why) from None
    return text


def _normalise_message(message: Any, index: int) -> dict[str, Any]:
    where = f"message {index}"
    if not isinstance(message, dict):
        raise RowFault("message_type", f"{where}: expected an object with role and content, found {_describe(message)}")
    raw_role = _first_present(message, "role", "from")
    if not isinstance(raw_role, str):
        raise RowFault("role_type", f"{where}: expected the role as text under 'role' or 'from', found {_describe(raw_role)}")
    role = ROLE_SPELLINGS.get(raw_role.strip().lower())
    if role is None:
        raise RowFault("role_unknown", f"{where}: role {raw_role!r}; known: {', '.join(ROLE_SPELLINGS)}")
    tool_calls = message.get("tool_calls")
    content = _first_present(message, "content", "value")
    if content is None and role == "assistant" and (tool_calls or message.get("reasoning_content")):
        content = ""
    normalised: dict[str, Any] = {"role": role, "content": _content_text(content, where)}
    if tool_calls:
        if role != "assistant":
            raise RowFault("tool_calls_role", f"{where}: tool_calls on a {role} turn; only the assistant calls tools")
        if not isinstance(tool_calls, list | tuple):
            raise RowFault("tool_call_type", f"{where}: expected tool_calls as a list, found {_describe(tool_calls)}")
        normalised["tool_calls"] = [_normalise_tool_call(call, where) for call in tool_calls]
    for key in _KEPT_KEYS:
        if message.get(key) is not None:
            value = message[key]
            if not isinstance(value, str):
                raise RowFault("content_type", f"{where}: expected {key} as text, found {_describe(value)}")
            normalised[key] = check_text(value, f"{where}, {key}")
    return normalised


def _content_text(content: Any, where: str) -> str:
    """Text, or text parts joined with nothing between them, as the parts themselves hold their spaces."""
    if isinstance(content, str):
        return check_text(content, where)
    if isinstance(content, list) and content:
        return "".join(_part_text(part, f"{where}, part {number}") for number, part in enumerate(content))
    raise RowFault("content_type", f"{where}: expected content as text or text parts, found {_describe(content)}")


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return check_text(part, where)
    if not isinstance(part, dict):
        raise RowFault("content_type", f"{where}: expected a content part, found {_describe(part)}")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise RowFault("content_part", f"{where}: a part of type {kind!r}; only text can be read ({', '.join(_TEXT_PARTS)})")
    text = part.get("text")
    if not isinstance(text, str):
        raise RowFault("content_type", f"{where}: expected text in the part, found {_describe(text)}")
    return check_text(text, where)


def _normalise_tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is how serving engines hand it to the template."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault("tool_call_type", f"{where}: expected a tool call with function.name, found {_describe(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise RowFault("tool_call_type", f"{where}: the arguments of {function['name']!r} are not JSON: {error}") from None
    check_text(json.dumps([function["name"], arguments], ensure_ascii=False), f"{where}, tool call")
    normalised = {"type": "function", "function": {"name": function["name"], "arguments": arguments if arguments is not None else {}}}
    if isinstance(call.get("id"), str):
        normalised["id"] = check_text(call["id"], f"{where}, tool call id")
    return normalised


def _first_present(message: dict[str, Any], *keys: str) -> Any:
    return next((message[key] for key in keys if message.get(key) is not None), None)


def _describe(value: Any) -> str:
    if value is None:
        return "null (nothing)"
    text = repr(value)
    return f"{type(value).__name__} {text[:60] + '...' if len(text) > 60 else text}"
