"""Differences between two plans."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Lists of details, what follows from the rest, estimates of other options, and the seconds of this compile.
_SKIPPED = {"timeline", "step_range_s", "largest_buffers", "items", "paths", "advice", "compile_s"}
_KEYS = ("trap", "unit", "what", "kind", "name", "dtype", "axes", "group_size")  # name a row of a list


def read_plan(path: str) -> dict[str, Any]:
    """Read the output of `jfsdp plan --json`.

    Raises:
      ValueError: if the file cannot be read, or has no plan of a compiled step.
    """
    try:
        found = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--diff {path}: {error}; pass a file that `jfsdp plan --json` wrote") from error
    found = found if isinstance(found, dict) else {}
    if missing := [name for name in ("job", "memory", "collectives", "options") if name not in found]:
        raise ValueError(
            f"--diff {path}: a plan of a compiled step has {missing[0]!r}; write the file again with this version of "
            "`jfsdp plan --json`, without --analytic, --search, --inference and --diff"
        )
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the values that differ between two plans, floats by more than 1e-6 of the larger.

    Launches are compared if both plans have them. Seconds of the compiler and advice are not compared.

    Returns:
      Rows with "what" (the path in the plan), "old" and "new"; None where a plan has no such value.
    """
    old, new = (json.loads(json.dumps(plan)) for plan in (old, new))
    names = [name for name in {**old, **new} if name != "launches" or (old.get(name) and new.get(name))]
    one, other = (dict(_values({name: plan.get(name) for name in names})) for plan in (old, new))
    pairs = {what: (one.get(what), other.get(what)) for what in {**one, **other}}
    return [{"what": what, "old": a, "new": b} for what, (a, b) in pairs.items() if not _equal(a, b)]


def _values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        value = {" ".join(str(row[key]) for key in _KEYS if row.get(key)): row for row in value}
    if not isinstance(value, dict):
        yield path, value
        return
    for name, inner in value.items():
        if name not in _SKIPPED:
            yield from _values(inner, f"{path}: {name}" if path else name)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
