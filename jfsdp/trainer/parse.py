"""Conversion of option texts from a command line, a recipe or a run's config.json to values. Does not import JAX."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jfsdp.trainer.option_errors import spell

Pairs = tuple[tuple[str, Any], ...]
_WORDS = {"true": True, "false": False, "none": None}
_LORA = {
    "rank": int,
    "alpha": float,
    "dropout": float,
    "rslora": bool,
    "dora": bool,
    "targets": tuple,
    "also": tuple,
    "stacks": tuple,
}


@functools.cache
def hints_of(kind: type, *, include_extras: bool = False) -> dict[str, Any]:
    """Return the types of an options dataclass, by field."""
    return typing.get_type_hints(kind, include_extras=include_extras)


def read_fields(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of options with their texts converted to values.

    Numbers and booleans are converted like their texts. None and unknown names are kept. Lists and dicts from JSON
    become tuples, so that options are hashable. If a name has several values, the last applies, because a command line
    appends to a recipe.

    Args:
      kind: the dataclass of the options.

    Raises:
      ValueError: naming the option, its text and the valid values.
    """
    known, hints = {field.name: field for field in dataclasses.fields(kind)}, hints_of(kind, include_extras=True)
    values = dict(fields)
    for name in values.keys() & known.keys():
        try:
            values[name] = _read(known[name].metadata.get("read"), hints[name], values[name])
        except ValueError as error:
            raise ValueError(f"{spell(name)} {_shown(fields[name])}: {error}") from None
    return values


def _read(read: Callable[[str], Any] | None, hint: Any, value: Any) -> Any:
    if isinstance(value, str | int | float):
        specs = [one for one in getattr(hint, "__metadata__", ()) if hasattr(one, "instance_from_str")]
        found = specs[0].instance_from_str([write(value)]) if specs else value
        if read and isinstance(found, str):
            return read(found)
        return found if isinstance(value, str) or not isinstance(found, str) else value  # a number is not a text
    if read and isinstance(value, Mapping):
        value = [write(((name, _frozen(part)),)) for name, part in value.items()]
    value = _frozen(value)
    if not read or not isinstance(value, tuple):
        return value
    items = [read(item) if isinstance(item, str) else (item,) for item in value]
    found = tuple(itertools.chain.from_iterable(items))
    has_names = all(isinstance(item, tuple) and isinstance(item[0], str) for item in found)
    return tuple(dict(found).items()) if has_names else found


def _shown(value: Any) -> str:
    return repr(value[0] if isinstance(value, tuple | list) and len(value) == 1 else value)


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = list(value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def pairs(form: str, read: Callable[[str], Any] = str) -> Callable[[str], Pairs]:
    """Return a reader of NAME=VALUE; the value may contain `=`.

    Args:
      form: description of a pair with an example, for the error.
    """

    def read_pair(text: str) -> Pairs:
        name, equals, value = text.partition("=")
        with contextlib.suppress(ValueError):
            if name and equals:
                return ((name, read(value)),)
        raise ValueError(f"{text!r} is not {form}")

    return read_pair


def words(*known: str, remedy: str = "") -> Callable[[str], tuple[str, ...]]:
    """Return a reader of words separated by commas.

    Args:
      known: the valid words; none: any.
    """

    def read_words(text: str) -> tuple[str, ...]:
        found = tuple(word for word in text.split(",") if word)
        if not found:
            raise ValueError(f"{text!r} has no words; leave it out")
        unknown = [word for word in found if known and word not in known]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is unknown; use any of {', '.join(known)}{remedy}")
        return found

    return read_words


def read_literal(text: str) -> Any:
    """Read a Python literal (a list as a tuple), true, false or none. Return any other text unchanged."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


def read_xla_value(text: str) -> Any:
    """Read true, false, none or a whole number. Return any other text unchanged."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    return int(text) if text.removeprefix("-").isdecimal() else text


def read_factor(text: str) -> float:
    """Read a finite number of at least 0."""
    if not 0 <= float(text) < math.inf:
        raise ValueError(text)
    return float(text)


def read_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Read `replica=2,fsdp=4` into axes and sizes."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name in sizes:
            raise ValueError(f"axis {name!r} is given twice")
        try:
            sizes[name] = int(size)
        except ValueError:
            raise ValueError(f"{part!r} is not AXIS=SIZE, such as fsdp=8 (size -1: the rest)") from None
    return tuple(sizes.items())


def read_strategy(text: str) -> str | int:
    """Read a name or a DeepSpeed stage."""
    return int(text) if text.isdecimal() else text


def read_profile(text: str) -> tuple[int, int]:
    """Read START:STOP."""
    start, _, stop = text.partition(":")
    if not (start.isdigit() and stop.isdigit()):
        raise ValueError("not START:STOP, such as 10:12")
    return int(start), int(stop)


def read_reshard(text: str) -> bool | int | str | None:
    """Read none, true, false, node or a number of devices."""
    if text.lower() in _WORDS or text == "node":
        return _WORDS.get(text.lower(), text)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("use none, true, false, node or a number of devices")
    return int(text)


def read_remat(text: str) -> str | Pairs:
    """Read none, full, dots, or fields of `SaveNames`: `names:a,b+offload:c`."""
    if text in ("none", "full", "dots"):
        return text
    fields: dict[str, tuple[str, ...]] = {}
    for part in text.split("+"):
        kind, _, names = part.partition(":")
        field = {"names": "save", "offload": "offload"}.get(kind)
        if field is None or field in fields or not names.strip(","):
            raise ValueError("unknown; use none, full, dots, names:a,b, offload:c, or names:a,b+offload:c")
        fields[field] = words()(names)
    if twice := set(fields.get("save", ())) & set(fields.get("offload", ())):
        raise ValueError(f"{', '.join(sorted(twice))} cannot be both saved and offloaded")
    return tuple(fields.items())


def read_lora(text: str) -> tuple[Pairs]:
    """Read KEY=VALUE,...: fields of a `LoRA`. A word without `=` is another value of the previous key."""
    found: dict[str, list[str]] = {}
    key = ""
    for word in filter(None, text.split(",")):
        first, equals, last = word.partition("=")
        key, value = (first, last) if equals else (key, word)
        if key not in _LORA:
            problem = f"{key!r} is unknown" if key else f"{word!r} is not KEY=VALUE"
            raise ValueError(f"{problem}; the keys are {', '.join(_LORA)}")
        found.setdefault(key, []).extend([value] if value else [])
    if not found.get("targets"):
        raise ValueError("has no targets; name the matrices: targets=**.q_proj.kernel,**.v_proj.kernel")
    return (tuple((key, _lora_value(key, values)) for key, values in found.items()),)


def _lora_value(key: str, values: list[str]) -> Any:
    kind = _LORA[key]
    if kind is tuple:
        return tuple(values)
    try:
        (value,) = values
        return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (ValueError, KeyError):
        what = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise ValueError(f"{key}={','.join(values)} is not {what}") from None


def write(value: Any) -> str:
    """Return a value as the text of its option."""
    if not isinstance(value, tuple):
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return ",".join(map(write, value))
    if {name for name, _ in value} <= {"save", "offload"} and value:
        return "+".join(f"{'names' if field == 'save' else field}:{','.join(names)}" for field, names in value)
    return ",".join(f"{name}={part if isinstance(part, tuple) else write(part)}" for name, part in value)
