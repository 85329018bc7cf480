"""Spelling of options on the command line, and errors for unknown options."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

MOST = 2**31 - 1  # largest count: JAX's indices have 32 bits
_NAMES = tomllib.loads(Path(__file__).with_name("option_names.toml").read_text(encoding="utf-8"))
REMOVED = {name: (row.get("default"), row["instead"]) for name, row in _NAMES["removed"].items()}
"""Options of 0.2 that were removed: the default, and the replacement."""
ELSEWHERE: dict[str, str] = _NAMES["elsewhere"]
"""Options of Transformers, Accelerate, MaxText and torchtitan, and their equivalents."""


def check_known(args: Sequence[str], kind: type) -> None:
    """Check that a command has all options of a command line.

    Args:
      kind: the dataclass of the command's options.

    Raises:
      ValueError: naming the first unknown option, and similar ones.
    """
    names = [spell(field.name) for field in dataclasses.fields(kind)]
    known = {*names, *(name.replace("--", "--no-", 1) for name in names), "--help"}
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        if arg.startswith("--") and name not in known and not arg.startswith("--tyro-"):
            close = ", ".join(_close_options(name, names))
            instead = instead_of(name[2:].removeprefix("no-").replace("-", "_"), names)
            remedy = f"use {instead}" if instead else f"there is {close}" if close else "--help lists them"
            raise ValueError(f"{arg.partition('=')[0]}: there is no such option; {remedy}")


def instead_of(field: str, names: Collection[str]) -> str:
    """Return the equivalent of an option that was removed or that another program has; "" if there is none.

    Args:
      names: the options of the command.
    """
    instead = ELSEWHERE.get(field, "")
    return instead if instead.partition(" ")[0] in names else REMOVED.get(field, ("", ""))[1]


def _close_options(name: str, names: Iterable[str]) -> list[str]:
    """Return the options that are spelled similarly, have the same initials, or share a word with a name."""
    names, words = list(names), tuple(name.strip("-").split("-"))
    initials = [one for one in names if "".join(word[0] for word in one[2:].split("-")) == name[2:]]
    alike = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    sharing = [one for one in names if any(word in words or words[0].startswith(word) for word in one[2:].split("-"))]
    return list(dict.fromkeys([*initials, *alike, *sharing]))[:4]


def spell(name: str) -> str:
    """Return the command-line spelling of a field."""
    return f"--{name.replace('_', '-')}"
