"""Values parted into the arrays that a trace carries and the rest, which stays Python.

[Note: containers that JAX does not know]
A pytree is a leaf to JAX if its class is not registered: a plain dataclass, a subclass of dict or list, any object with
attributes. Flax runs a model inside one trace, where that does not matter. A unit's call is a trace, and precision
casts arrays; so such containers are opened here, where they hold arrays, and copied around others.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Awaitable, Callable, Iterable, Iterator, ValuesView
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from jfsdp.layout.precision import is_float

Test = Callable[[Any], bool]
_LAZY = (Iterator, ValuesView)  # JAX warns of these
_CLOSED = (types.ModuleType, linen.Module, nnx.Module, nnx.Variable)


def is_array(value: Any) -> bool:
    """Tell arrays, traced ones included, from what stays Python in a call."""
    return isinstance(value, (jax.Array, np.ndarray))


def _is_data(value: Any) -> bool:
    # In a container, arrays of numpy that are not floating may be settings, whose values a call reads.
    return is_array(value) and (isinstance(value, jax.Array) or is_float(value.dtype))


class Parted:
    """A pytree parted into what a trace carries and what stays Python; see [Note: containers that JAX does not know].

    Attributes:
      dynamic: the leaves that a trace carries.
      static: the leaves that stay Python, opened containers not among them.
    """

    def __init__(
        self, values: Any, is_dynamic: Test = is_array, is_leaf: Test = lambda x: False, parent: Parted | None = None
    ):
        self._seen: set[int] = parent._seen if parent else set()
        self._copies: list[tuple[Any, list[Any]]] = parent._copies if parent else []
        leaves, self._tree = jax.tree.flatten(values, is_leaf=lambda x: is_leaf(x) or isinstance(x, _LAZY))
        self.dynamic, self.static, self._parts = [], [], []
        for x in leaves:
            mark = is_dynamic(x)
            inside = None if mark or is_array(x) or id(x) in self._seen else self._open(x, is_leaf)
            self._parts.append((x, mark, inside))
            self.dynamic += [x] if mark else inside.dynamic if inside else []
            self.static += [] if mark else inside.static if inside else [x]

    def _open(self, container: Any, is_leaf: Test) -> Parted | None:
        """Part what a container holds; None if there is not an array in it."""
        self._seen.add(id(container))
        found = Parted(_held(container), _is_data, is_leaf, self)
        self._seen -= {id(container)} if found.dynamic else set()
        return found if found.dynamic else None

    def rebuild(self, dynamic: Iterable[Any]) -> Any:
        """Return the pytree with other dynamic leaves."""
        values, leaves = iter(dynamic), []
        for x, mark, inside in self._parts:
            leaves.append(next(values) if mark else _copy_around(x, inside.rebuild(values)) if inside else x)
            if inside:
                self._copies.append((leaves[-1], _leaves(leaves[-1])))
        return jax.tree.unflatten(self._tree, leaves)

    def check_unwritten(self, who: str) -> None:
        """Refuse a call that has written to a container that `rebuild` copied: the caller's would not change."""
        while self._copies:
            copied, before = self._copies.pop()
            after = _leaves(copied)
            if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
                raise ValueError(
                    f"{who}: its call writes to an argument (a {type(copied).__name__}), of which it has a copy; "
                    "return the new values"
                )


def map_arrays(fn: Callable[[Any], Any], parts: Parted, values: Any) -> Any:
    """Return the values of which `parts` is made with their arrays mapped; themselves if that changes none."""
    new = [fn(x) if is_array(x) else x for x in parts.dynamic]
    return values if all(a is b for a, b in zip(new, parts.dynamic, strict=True)) else parts.rebuild(new)


def part_output(unit: str, out: Any) -> Parted:
    """Part what a unit's call returns.

    Raises:
      ValueError: for what is computed later, when the unit's weights are freed.
    """
    parts = Parted(out)
    if late := [x for x in parts.static if isinstance(x, (*_LAZY, Awaitable))]:
        raise ValueError(
            f"unit {unit!r}: its call returns a {type(late[0]).__name__}, which is read after the call, when the "
            "unit's weights are freed; return a list"
        )
    return parts


def _held(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the items and the attributes of a container; functions and modules are none."""
    if callable(value) or isinstance(value, _CLOSED):
        return [], {}
    items = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    names = dict.fromkeys([*fields, *getattr(value, "__dict__", ())])
    return items, {name: getattr(value, name) for name in names if hasattr(value, name)}


def _leaves(container: Any) -> list[Any]:
    return jax.tree.leaves(_held(container), is_leaf=lambda x: isinstance(x, _LAZY))


def _copy_around(value: Any, held: tuple[list[Any], dict[str, Any]]) -> Any:
    """Return a copy of an object with other items and attributes."""
    new, (items, attributes) = copy.copy(value), held
    if isinstance(value, list):
        new[:] = items
    elif isinstance(value, dict):
        for key, x in zip(value, items, strict=True):
            new[key] = x
    for name, x in attributes.items():
        object.__setattr__(new, name, x)
    return new
