"""Messages and tools of records (OpenAI, ShareGPT, Alpaca), checked and converted for chat templates.

[Note: whole] No part of a conversation is dropped silently. Two checks of each record find omissions of a template:

- The conversation is rendered again with a mark at the end of each content, each name of a tool and each name of a
  call. Marks consist of characters that texts do not contain. Every mark must be in the result. This finds messages of
  an unknown role, and tools that a template ignores.
- Each text of a trained answer (content, thoughts, calls and their arguments) must be complete in the trained
  characters, and each other content in the rendering. This finds truncated contents. White space is not compared,
  because templates strip it.

A template may remove the thoughts of answers that are not trained, because it also does so in generation.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

# Fields for the thoughts before an answer. Templates use the first, and gpt-oss the second, as in transformers.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Fields that a template need not mention.
OWN = frozenset(("role", "content", "weight", "train", *_THOUGHTS))

ROLES = ("system", "user", "assistant", "tool")
# Senders of ShareGPT -> roles.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def read_messages(messages: Any) -> list[Message]:
    """Return messages whose contents are texts. Text in parts is joined. Content may be missing next to tool calls.

    Fields that are null are removed: Arrow adds one for each field of other records.

    Raises:
      ValueError: if they are not messages.
    """
    is_list = isinstance(messages, list) and all(isinstance(one, Mapping) for one in messages)
    if not is_list or not all(isinstance(one.get("role"), str) for one in messages):
        raise ValueError(
            'messages are not a list of objects with "role" and "content"; write them as OpenAI does: '
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    return [_read_message(one, number) for number, one in enumerate(messages, 1)]


def _read_message(message: Message, number: int) -> Message:
    message = {name: value for name, value in message.items() if value is not None}
    thoughts = [message[name] for name in _THOUGHTS if message.get(name)]
    message |= dict.fromkeys(_THOUGHTS, thoughts[0]) if thoughts else {}
    content = message.get("content", "" if calls_of(message) else None)
    texts = texts_of(content)
    num_parts = len(content) if isinstance(content, list) else 1
    if len(texts) < num_parts or any(one != str(thoughts[0]) for one in thoughts):
        raise ValueError(
            f"the content of message {number} is neither text nor a list of parts with text, or its thoughts "
            f"({', '.join(_THOUGHTS)}) are not one text; write text there, or remove the record"
        )
    return {**message, "content": "".join(texts)}


def read_sharegpt(record: Mapping[str, Any]) -> list[Any]:
    """Return the messages of `system` and of `conversations`, whose turns are `{"from", "value"}`.

    A value from "function_call" is JSON text with the name and the arguments of a call, or a list of these. A turn with
    a role is a message.

    Raises:
      ValueError: if a sender is unknown, or a call is not JSON.
    """
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise ValueError("field conversations is not a list; write a list of turns, or rename the field")
    return [*_system(record), *(_read_turn(turn, number) for number, turn in enumerate(turns, 1))]


def read_alpaca(record: Mapping[str, Any]) -> list[Any]:
    """Return the messages of `system`, `history`, `instruction` (with `input` in further lines) and `output`.

    Raises:
      ValueError: if `history` is not a list of pairs, or `instruction` or `input` is not text.
    """
    instruction, more, history = record["instruction"], record.get("input") or "", record.get("history") or []
    if not isinstance(instruction, str) or not isinstance(more, str):
        raise ValueError("fields instruction and input are not both texts; write text there")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError('field history is not a list of pairs; write [["question", "answer"], ...]')
    pairs = [*history, (f"{instruction}\n{more}" if more else instruction, record["output"])]
    texts = [text for pair in pairs for text in pair]
    return [*_system(record), *({"role": ("user", "assistant")[at % 2], "content": x} for at, x in enumerate(texts))]


def _system(record: Mapping[str, Any]) -> list[Any]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _read_turn(turn: Any, number: int) -> Any:
    if not isinstance(turn, Mapping) or "role" in turn:
        return turn
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    sender, value = turn.get("from"), turn.get("value")
    if sender not in _ROLES:
        raise ValueError(f"turn {number} is from {sender!r}; rename it to one of {', '.join(_ROLES)}")
    if sender != "function_call":
        return {**rest, "role": _ROLES[sender], "content": value}
    try:
        calls = json.loads(str(value))
    except ValueError as error:
        raise ValueError(
            f"turn {number} is from 'function_call', but its value is not JSON ({error}); write the call as JSON"
        ) from error
    functions = [{"type": "function", "function": one} for one in (calls if isinstance(calls, list) else [calls])]
    return {**rest, "role": "assistant", "tool_calls": functions}


def read_tools(tools: Any) -> list[Any] | None:
    """Return the tools of a record, a list or its JSON text; None if there are none.

    Raises:
      ValueError: if they are not a list of objects.
    """
    if isinstance(tools, str):
        with contextlib.suppress(ValueError):
            tools = json.loads(tools or "null")
    if tools is None or (isinstance(tools, list) and all(isinstance(one, Mapping) for one in tools)):
        return tools
    raise ValueError(
        "field tools is neither a list of objects nor the JSON text of one; write each tool as OpenAI does, "
        '[{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
    )


def is_trained(message: Message, number: int) -> bool:
    """Return whether to train on a message.

    Raises:
      ValueError: if its `weight` or `train` is neither 0 nor 1, or `train` is true for a role other than assistant.
    """
    weights = {name: message.get(name, 1) for name in ("weight", "train")}
    for name, weight in weights.items():
        if weight not in (0, 1):
            raise ValueError(f"message {number} has {name} {weight!r}; use 0 or false (not trained), or 1 or true")
    if message.get("train") and message["role"] != "assistant":
        raise ValueError(f"message {number} has train true, but role {message['role']!r}; only answers are trained")
    return message["role"] == "assistant" and all(weights.values())


def calls_of(message: Message) -> list[Any]:
    """Return the tool calls of a message.

    Raises:
      ValueError: if they are not objects with a function.
    """
    calls = message.get("tool_calls") or []
    functions = [one.get("function") if isinstance(one, Mapping) else None for one in calls]
    if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in functions):
        raise ValueError(
            'tool_calls are not all {"function": {"name": "...", "arguments": {...}}}; write them as OpenAI does'
        )
    return list(calls)


def with_arguments(messages: list[Message], *, as_text: bool) -> list[Message]:
    """Return messages with the arguments of tool calls as JSON text or as objects, depending on the template.

    Raises:
      ValueError: if arguments are neither.
    """

    def convert(call: Any, number: int) -> Any:
        given = call["function"].get("arguments")
        parsed = given
        with contextlib.suppress(ValueError):
            parsed = json.loads(given or "{}") if isinstance(given, str) else given
        if not isinstance(parsed, Mapping | None):
            raise ValueError(f"message {number} has a call whose arguments are not a JSON object; write an object")
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        given = {} if given is None else {"arguments": text if as_text else parsed}
        return {**call, "function": {**call["function"], **given}}

    called = ((one, [convert(call, number) for call in calls_of(one)]) for number, one in enumerate(messages, 1))
    return [{**one, "tool_calls": calls} if calls else one for one, calls in called]


def texts_of(content: Any) -> list[str]:
    """Return the texts of a content: the content, or the texts of its parts."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def strings_of(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for one in pair for text in strings_of(one))
    elif isinstance(value, list):
        yield from (text for one in value for text in strings_of(one))


def find_cut(message: Message, written: str, before: str) -> str | None:
    """Return a field of an answer that is incomplete in the text; None if all are complete. See [Note: whole].

    Args:
      written: the trained text.
      before: the end of its prompt, where thoughts may begin.
    """
    calls = [[call["function"]["name"], call["function"].get("arguments")] for call in calls_of(message)]
    parts = [(name, message.get(name, "")) for name in ("content", "reasoning_content")]
    for name, text in [*parts, *(("tool_calls", text) for text in strings_of(calls))]:
        ahead = _squeeze(before[max(0, len(before) - len(text)) :])
        forms = [_squeeze(form) for form in (text, json.dumps(text, ensure_ascii=False)[1:-1])]
        found = ((ahead + _squeeze(written)).find(form, max(0, len(ahead) - len(form) + 1)) for form in forms)
        if text.strip() and max(found) < 0:
            return name
    return None


def _squeeze(text: str) -> str:
    return "".join(text.split())


def marked(messages: Sequence[Message], tools: Any) -> tuple[list[Message], Any, dict[str, str]]:
    """Return messages and tools with marks, and a description of each mark's place; see [Note: whole]."""
    marks: dict[str, str] = {}

    def mark(text: str, what: str) -> str:
        found = f"\ue0f0{len(marks)}\ue0f1" if text.strip() else ""
        marks[found] = what
        return text + found

    def mark_name(one: Any, what: str) -> Any:
        if isinstance(one.get("function"), Mapping):
            return {**one, "function": mark_name(one["function"], what)}
        return {**one, "name": mark(one["name"], what)} if isinstance(one.get("name"), str) else one

    found = []
    for number, one in enumerate(messages, 1):
        role = f"message {number} of role {one['role']!r}"
        calls = [mark_name(call, f"the tool_calls of {role}") for call in calls_of(one)]
        found.append({**one, "content": mark(one["content"], role), **({"tool_calls": calls} if calls else {})})
    return found, tools and [mark_name(one, f"tool {at}") for at, one in enumerate(tools, 1)], marks
