"""Metadata of an option's field: group, rule on resume, minimum, reader of its text.

`--help` and docs/options.md show options in these groups. In Python, each command has one flat dataclass.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from jfsdp.arguments import find_problem
from jfsdp.trainer.option_errors import MOST
from jfsdp.trainer.parse import hints_of, read_fields

FIRST = "most used"
Read = Callable[[str], Any] | None
# Groups of the training script, in the order shown. Groups of a single command come after the first.
GROUPS = (
    *(FIRST, "model", "sharding and memory", "precision", "gradient accumulation", "optimizer", "preferences"),
    *("frozen weights and adapters", "data", "checkpoint", "evaluation and logging", "process and device"),
    "XLA and debugging",
)
SHOWN = {"True": "on", "False": "off", "": "-", "''": "-"}


def option(default: Any, group: str = "", resume: str = "", *, least: float | None = None, read: Read = None) -> Any:
    """Return a dataclass field for an option.

    Args:
      group: group in the help; "": none.
      resume: effect of another value on a resumed run; see jfsdp/trainer/run/resume_rules.py.
      least: minimum; see `Options`.
      read: converts the text to a value; see `read_fields`.
    """
    metadata = {"group": group, "resume": resume, "least": least, "read": read}
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """Base class of a command's options. Checks types and ranges of every instance.

    Raises:
      TypeError: naming the field, its value and the valid type.
      ValueError: for a number below the field's `least` or above `MOST`.
    """

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, least = getattr(self, field.name), field.metadata.get("least")
            if problem := find_problem(field.name, value, hints[field.name]):
                raise problem
            if value is not None and least is not None and not least <= value <= MOST:
                raise ValueError(f"{field.name}={value} must be a number from {least:g} to {MOST:,}")


def groups_of(kind: Any) -> dict[str, list[str]]:
    """Return a command's fields by group, in order."""
    found: dict[str, list[str]] = {}
    for field in dataclasses.fields(kind):
        if group := field.metadata.get("group"):
            found.setdefault(group, []).append(field.name)
    others = [title for title in found if title not in GROUPS]
    return {title: found[title] for title in (FIRST, *others, *GROUPS[1:]) if title in found}


def read_command(kind: Any, args: Sequence[str], *, default: Any = tyro.MISSING_NONPROP, **shown: Any) -> Any:
    """Parse a command line into options. All texts are converted to values here.

    Args:
      shown: `prog` and `description` of `--help`.

    Raises:
      ValueError: naming the invalid option, its text and the valid values.
    """
    config, registry = (tyro.conf.OmitArgPrefixes,), show_groups(kind)
    given = tyro.cli(kind, args=args, default=default, config=config, registry=registry, **shown)
    return kind(**read_fields(kind, given))


def help_of(kind: Any) -> dict[str, str]:
    """Return the help texts of a command's options, by field."""
    return {field.name: _help(field) or "" for field in _fields(kind)}


def show_groups(kind: Any) -> ConstructorRegistry:
    """Return a registry with which `tyro.cli` shows a command's options in groups and returns one dict of texts."""
    registry, fields = ConstructorRegistry(), _fields(kind)

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is not kind:
            return None
        shared = {name for title, names in groups_of(kind).items() if title in GROUPS for name in names}
        others = {field.name: _described(field, info.default, field.name in shared) for field in fields}
        groups = {title: [others.pop(name) for name in names] for title, names in groups_of(kind).items()}

        def flatten(**given: Any) -> dict[str, Any]:
            return {name: value for title in groups for name, value in given.pop(title).items()} | given

        return StructConstructorSpec(flatten, (*others.values(), *(_group(*group) for group in groups.items())))

    return registry


def _fields(kind: Any) -> tuple[StructFieldSpec, ...]:
    spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(kind, tyro.MISSING_NONPROP, False))
    assert isinstance(spec, StructConstructorSpec), kind
    return spec.fields


def _help(field: StructFieldSpec) -> str | None:
    return field.helptext() if callable(field.helptext) else field.helptext


def _group(title: str, fields: list[StructFieldSpec]) -> StructFieldSpec:
    kind = TypedDict(title, {field.name: field.type for field in fields})  # type: ignore[misc]
    return StructFieldSpec(title, kind, {field.name: field.default for field in fields}, helptext="")


def _described(field: StructFieldSpec, owner: Any, is_shared: bool) -> StructFieldSpec:
    """Return a field with its owner's default, in the form of docs/options.md. Lines break only at full stops.

    Args:
      is_shared: whether a recipe may replace the default.
    """
    text = _help(field)
    text = text and re.sub(r"(?<!\.)\n\s*", " ", text)
    shown = tyro.conf.arg(help=text, help_behavior_hint=lambda shown: f"(default: {SHOWN.get(shown, shown)})")
    kind = Annotated[field.type, shown] if is_shared else Annotated[field.type, shown, tyro.conf.FlagCreatePairsOff]
    return dataclasses.replace(field, type=kind, default=getattr(owner, field.name, field.default))
