"""Options as a command line spells them, and what is refused of their names and numbers."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

MOST = 2**31 - 1  # of what is counted: JAX's indices


def check_numbers(options: Any) -> None:
    """Refuse numbers below the least that their fields say, and beyond what is ever counted; None is none.

    Raises:
      ValueError: naming the option, its value, and what it takes.
    """
    for field in dataclasses.fields(options):
        value, least = getattr(options, field.name), field.metadata.get("least")
        if value is not None and least is not None and not least <= value <= MOST:
            raise ValueError(f"{spell(field.name)} {value} must be a number from {least:g} to {MOST:,}")


def check_known(args: Sequence[str], kind: type) -> None:
    """Refuse options that a command does not have.

    Args:
      kind: the dataclass of its options.

    Raises:
      ValueError: naming the first, and those that may have been meant.
    """
    names = [spell(field.name) for field in dataclasses.fields(kind)]
    known = {*names, *(name.replace("--", "--no-", 1) for name in names), "--help"}
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        if arg.startswith("--") and name not in known and not arg.startswith("--tyro-"):
            close = ", ".join(_close_options(name, names))
            remedy = f"there is {close}" if close else "--help lists them"
            raise ValueError(f"{arg.partition('=')[0]}: there is no such option; {remedy}")


def _close_options(name: str, names: Iterable[str]) -> list[str]:
    """Return the options that are spelled alike, begin with the same letters, or share a word with a name."""
    names, words = list(names), tuple(name.strip("-").split("-"))
    initials = [other for other in names if "".join(word[0] for word in other[2:].split("-")) == name[2:]]
    alike = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    sharing = [
        other for other in names if any(word in words or words[0].startswith(word) for word in other[2:].split("-"))
    ]
    return list(dict.fromkeys([*initials, *alike, *sharing]))[:4]


def spell(name: str) -> str:
    """Return the option of a field."""
    return f"--{name.replace('_', '-')}"
