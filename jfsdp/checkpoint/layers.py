"""Conversion between stacked layers and lists of layers while reading.

Only names identify the layers of a stack: `layers.attn.kernel [L ...]` is `layers.0.attn.kernel` to
`layers.<L-1>.attn.kernel`, and in flax.linen `h.kernel` is `h_0.kernel` and so on. Only names that would be missing are
searched in the other form. A list must be complete. A stack counts as used only if all of its rows are wanted: if a
model has fewer layers than the checkpoint, the stack is reported as extra.

Some optimizers have states of one element for leaves that need none (optax's `scale_by_factored_rms`: [1], for a stack
and for a layer). Such a state is the same in both forms.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jfsdp.checkpoint.source import Index, Source


class ConvertedLayers:
    """A source under the wanted names, with stacks converted to lists and lists to stacks where needed.

    Args:
      source: the arrays to read.
      wanted: the wanted names, optionally with shapes.
    """

    def __init__(self, source: Source, wanted: Iterable[str] | Mapping[str, Any]):
        self._source = source
        self._members = _members(source.arrays)
        missing = [name for name in wanted if name not in source.arrays]
        shapes = {name: tuple(wanted[name].shape) for name in missing} if isinstance(wanted, Mapping) else {}
        same = {name: found for name in missing if (found := self._find_same(name, shapes.get(name)))}
        rest = [name for name in missing if name not in same]
        self._same = {name: group[0] for name, group in same.items()}
        self._stacks = {name: stack for name in rest if (stack := self._find_stack(name))}
        self._slices = {name: at for name in rest if (at := _find_slice(name, source.arrays))}
        taken = {member for group in (*self._stacks.values(), *same.values()) for member in group}
        rows = collections.Counter(stack for stack, _ in set(self._slices.values()))
        taken |= {stack for stack, num in rows.items() if num == source.arrays[stack].shape[0]}
        arrays = {name: array for name, array in source.arrays.items() if name not in taken}
        for name, stack in self._stacks.items():
            first = source.arrays[stack[0]]
            arrays[name] = jax.ShapeDtypeStruct((len(stack), *first.shape), first.dtype)
        for name, (stack, _) in self._slices.items():
            arrays[name] = jax.ShapeDtypeStruct(source.arrays[stack].shape[1:], source.arrays[stack].dtype)
        arrays |= {name: source.arrays[other] for name, other in self._same.items()}
        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = arrays

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names in the source from which an array is read."""
        if name in self._stacks:
            return self._stacks[name]
        if name in self._same:
            return (self._same[name],)
        return (self._slices[name][0],) if name in self._slices else (name,)

    def read(self, name: str, index: Index) -> np.ndarray:
        if name in self._slices:
            stack, row = self._slices[name]
            return self._source.read(stack, (slice(row, row + 1), *index))[0]
        if name not in self._stacks:
            return self._source.read(self._same.get(name, name), index)
        layers, *rest = index
        members = self._stacks[name][layers]
        out = np.empty((len(members), *(part.stop - part.start for part in rest)), self.arrays[name].dtype)
        for place, member in enumerate(members):
            out[place] = self._source.read(member, tuple(rest))
        return out

    def _find_same(self, name: str, shape: tuple[int, ...] | None) -> tuple[str, ...] | None:
        """Return the names of an optimizer's one-element state, which has no layer dim in either form."""
        if shape != (1,) or not name.startswith("opt_state."):
            return None
        whole = next((stack for stack, _ in _rows(name) if stack in self._source.arrays), None)
        found = (whole,) if whole else self._find_stack(name)
        return found if found and self._source.arrays[found[0]].shape == shape else None

    def _find_stack(self, name: str) -> tuple[str, ...] | None:
        """Return the complete list of layers that makes up a wanted stack."""
        members = self._members.get(name, {})
        shapes = {(self._source.arrays[m].shape, self._source.arrays[m].dtype) for m in members.values()}
        if len(shapes) != 1 or sorted(members) != list(range(len(members))):
            return None
        return tuple(members[number] for number in range(len(members)))


def _rows(name: str) -> Iterator[tuple[str, int]]:
    """Yield the stacks of which an array may be a row: the name without one of its numbers, and the number."""
    for match in re.finditer(r"[._](\d+)(?=\.|$)", name):
        yield name[: match.start()] + name[match.end() :], int(match[1])


def _members(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Group names that contain a number by the name without it: stack -> number -> name.

    A stack with two names for one row is ambiguous and left out: `a.0.1` without its first number and `a.1.0` without
    its second are both row 0 of `a.1`.
    """
    found: dict[str, dict[int, str]] = {}
    ambiguous: set[str] = set()
    for name in names:
        for stack, row in _rows(name):
            if found.setdefault(stack, {}).setdefault(row, name) != name:
                ambiguous.add(stack)
    return {stack: members for stack, members in found.items() if stack not in ambiguous}


def stack_names(arrays: Mapping[str, Any], layers: str) -> list[str]:
    """Replace the members of a list of layers, `layers.0.attn` or `layers_0.attn`, by the names of their stacks.

    Raises:
      ValueError: if there is no such list, it is incomplete, or its members differ in shape or dtype.
    """
    member = re.compile(rf"(^|.*\.){re.escape(layers.rstrip('_'))}[._](\d+)(\..*|$)")
    found: dict[str, dict[int, str]] = {}
    stack_of: dict[str, str] = {}
    for name in arrays:
        if match := member.match(name):
            stack_of[name] = f"{match[1]}{layers.rstrip('_')}{match[3]}"
            found.setdefault(stack_of[name], {})[int(match[2])] = name
    if not found:
        raise ValueError(f"stack={layers!r}: no array is named {layers}.0 or {layers}_0, or lies below them")
    for stack, members in found.items():
        shapes = {(arrays[name].shape, arrays[name].dtype) for name in members.values()}
        if len(shapes) > 1 or sorted(members) != list(range(len(members))):
            raise ValueError(f"stack={layers!r}: the layers of {stack} are incomplete, or differ in shape or dtype")
    return list(dict.fromkeys(stack_of.get(name, name) for name in arrays))


def list_names(arrays: Mapping[str, Any], layers: str) -> list[str]:
    """Replace the stacks below `layers` by the names of their members.

    Raises:
      ValueError: if there is no such stack, or arrays below it have different numbers of layers.
    """
    name_of, mark = layers.rstrip("_"), "_" if layers.endswith("_") else "."
    below = re.compile(rf"(^|.*\.){re.escape(name_of)}(\..*|$)")
    stacks = {name: match for name in arrays if (match := below.match(name)) and not re.match(r"\.\d+(\.|$)", match[2])}
    numbers = {name: (arrays[name].shape or (0,))[0] for name in stacks}
    if not stacks or len(set(numbers.values())) > 1:
        shown = ", ".join(f"{name} {number}" for name, number in list(numbers.items())[:6])
        why = f"arrays have different numbers of layers ({shown})" if stacks else "no array lies below it"
        raise ValueError(f"unstack={layers!r}: {why}; skip= leaves arrays out")
    out: list[str] = []
    for name in arrays:
        match = stacks.get(name)
        rows = range(numbers[name]) if match else ()
        out += [f"{match[1]}{name_of}{mark}{row}{match[2]}" for row in rows] if match else [name]
    return out


def _find_slice(name: str, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[str, int] | None:
    """Return the stack, and the row in it, that a wanted member of a list is; None if there is not exactly one."""
    rows = {(stack, row) for stack, row in _rows(name) if stack in arrays}
    found = [(stack, row) for stack, row in rows if arrays[stack].shape and row < arrays[stack].shape[0]]
    return found[0] if len(found) == 1 else None
