"""Recipes: named defaults of the training script and of plans, from packages (dicts) or files (TOML, JSON)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from jfsdp.arguments import did_you_mean
from jfsdp.trainer.help_groups import help_of
from jfsdp.trainer.option_errors import instead_of, spell
from jfsdp.trainer.parse import read_fields, write

ENTRY_POINT_GROUP = "jfsdp.recipes"
NO_RECIPE = "none"
Options = TypeVar("Options")


def recipe_names() -> list[str]:
    """List the recipes that installed packages offer in the entry-point group `jfsdp.recipes`."""
    return sorted({point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)})


def read_recipe(name: str) -> dict[str, Any]:
    """Return a recipe as fields of `TrainConfig`, by name or from a file (`*.toml`, `*.json`). "none" has no fields.

    Raises:
      ValueError: for an unknown name, and a file that cannot be read as a dict of options.
    """
    if name == NO_RECIPE:
        return {}
    if name.endswith((".toml", ".json")):
        return {**_read_file(name), "recipe": name}
    points = [point for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if not points:
        raise ValueError(
            f"recipe {name!r} is unknown{did_you_mean(name, recipe_names())}; the recipes are "
            f"{', '.join([NO_RECIPE, *recipe_names()])}, or a file *.toml or *.json"
        )
    return {**points[0].load()[name], "recipe": name}


def _read_file(path: str) -> Mapping[str, Any]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        fields = tomllib.loads(text) if path.endswith(".toml") else json.loads(text)
    except OSError as error:
        raise ValueError(f"recipe {path!r}: cannot be read ({error.strerror}); name a file *.toml or *.json") from error
    except ValueError as error:
        kind = Path(path).suffix[1:].upper()
        raise ValueError(f"recipe {path!r}: is not {kind}: {error}; write one option per key") from error
    if not isinstance(fields, dict):
        raise ValueError(f"recipe {path!r}: must be a JSON object of options, not {type(fields).__name__}")
    return fields


def write_recipe(path: str, fields: Mapping[str, Any], kind: type) -> None:
    """Write a recipe as JSON (`*.json`), or as TOML with the first sentence of each option's help.

    Args:
      fields: values by option. Options that `kind` does not have are omitted.
      kind: the dataclass of the options.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in read_fields(kind, fields).items() if name in defaults}
    text = json.dumps(fields, indent=2) + "\n"
    if not path.endswith(".json"):
        first = {name: re.split(r"\.(?:\s|$)", help)[0].replace("\n", " ") for name, help in help_of(kind).items()}
        given = {name: value for name, value in fields.items() if value is not None or defaults[name] is not None}
        text = "\n".join(f"# {first[name]}.\n{name} = {_toml(kind, name, value)}\n" for name, value in given.items())
    Path(path).expanduser().write_text(text, encoding="utf-8")


def _toml(kind: type, name: str, value: Any) -> str:
    """Return a value in TOML: a tuple as one text or a list of texts, whichever reads back as the same value."""
    for text in (write(value), [write((item,)) for item in value]) if isinstance(value, tuple) else ():
        with contextlib.suppress(TypeError, ValueError):
            if read_fields(kind, {name: text})[name] == value:
                return json.dumps(text, ensure_ascii=False)
    return json.dumps("none" if value is None else value, ensure_ascii=False)


def load_recipe(options: Options, name: str, *, ignore: frozenset[str] = frozenset()) -> Options:
    """Return options with their fields replaced by a recipe's.

    Args:
      options: an instance of `TrainConfig`, or of another dataclass with some of its fields.
      ignore: fields of recipes that these options may lack.

    Raises:
      ValueError: as `read_recipe`, and for a field that the options do not have.
    """
    known = {field.name: field for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    fields = read_recipe(name)
    unknown = [field for field in fields if field not in known and field not in ignore]
    if unknown:
        instead = [found for field in unknown if (found := instead_of(field, [*map(spell, known)]))]
        remedy = f"; use {instead[0]}" if instead else f"; options are {', '.join(known)}"
        raise ValueError(f"recipe {name!r}: has no option {', '.join(unknown)}{remedy}")
    given = {field: value for field, value in fields.items() if field in known}
    return with_fields(options, given, f"recipe {name!r}")


def with_fields(options: Options, plain: Mapping[str, Any], what: str) -> Options:
    """Return options with fields from JSON or TOML data, converted like a command line.

    Args:
      what: origin of the data, for the message.

    Raises:
      ValueError: naming the field, its value and the valid values.
    """
    try:
        return dataclasses.replace(options, **read_fields(type(options), plain))  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}; use another value") from error


def recipe_defaults(options: Options, args: Sequence[str], *, ignore: frozenset[str] = frozenset()) -> Options:
    """Return the defaults for a command line: options with the fields of the recipe that it names, if any.

    A --factory without a --model replaces the recipe's model.

    Raises:
      ValueError: as `load_recipe`.
    """
    default = load_recipe(options, option_value("--recipe", args) or NO_RECIPE, ignore=ignore)
    if option_value("--factory", args) and not option_value("--model", args):
        return dataclasses.replace(default, model=None)  # type: ignore[type-var]
    return default


def option_value(option: str, args: Sequence[str]) -> str | None:
    """Return the last value of an option in a command line; None if it is absent. Needed before options are parsed,
    because the recipe sets their defaults.
    """
    for place, arg in reversed(list(enumerate(args))):
        if arg == option:
            return args[place + 1] if place + 1 < len(args) else None
        if arg.startswith(f"{option}="):
            return arg.partition("=")[2]
    return None
