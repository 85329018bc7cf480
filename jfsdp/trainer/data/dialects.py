"""Records of ShareGPT and Alpaca as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def read_sharegpt(record: Mapping[str, Any]) -> list[Any]:
    """Return the turns of `conversations`, `{"from", "value"}`, after what `system` holds.

    A value from "function_call" is JSON text with the name and the arguments of a call, or a list of these. A turn that
    already has a role is a message.

    Raises:
      ValueError: if a turn is from an unknown name, or a call is not JSON.
    """
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise ValueError("its field conversations is not a list; write a list of turns, or rename the field")
    return [*_system(record), *(_read_turn(turn, number) for number, turn in enumerate(turns, 1))]


def read_alpaca(record: Mapping[str, Any]) -> list[Any]:
    """Return `instruction`, with `input` in further lines, and `output`, after what `system` and `history` hold.

    Raises:
      ValueError: if `history` is not a list of pairs, or `instruction` or `input` is not text.
    """
    instruction, more, history = record["instruction"], record.get("input") or "", record.get("history") or []
    if not isinstance(instruction, str) or not isinstance(more, str):
        raise ValueError("its fields instruction and input are not both texts; write text there")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError('its field history is not a list of pairs; write [["question", "answer"], ...]')
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
        raise ValueError(f"turn {number} is from 'function_call', and its value is not JSON ({error})") from error
    functions = [{"type": "function", "function": one} for one in (calls if isinstance(calls, list) else [calls])]
    return {**rest, "role": "assistant", "tool_calls": functions}
