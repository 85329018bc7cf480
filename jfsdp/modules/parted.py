"""Values split into the arrays that a trace carries and the rest, which stays Python.

[Note: containers that JAX does not know]
For JAX, an object whose class is not a registered pytree is a leaf: a plain dataclass, a subclass of dict or list, any
object with attributes. Flax runs a model inside one trace, where this makes no difference. A unit's call is a trace,
and precision casts arrays. So such containers are opened here if they contain arrays, and copied with the other
arrays. A unit must not write to such a copy. Writes of the model to a copy are written back to the original.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Awaitable, Callable, Iterable, Iterator, ValuesView
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from jfsdp.layout.precision import is_float

Test = Callable[[Any], bool]
_LAZY = (Iterator, ValuesView)  # JAX warns about these
_CLOSED = (types.FunctionType, types.MethodType, types.ModuleType, type, linen.Module, nnx.Module, nnx.Variable)


def is_array(value: Any) -> bool:
    """Tell whether a value is an array, traced or not; other values stay Python in a call."""
    return isinstance(value, (jax.Array, np.ndarray))


def can_cast(value: Any) -> bool:
    """Tell whether precision may cast a value."""
    return is_array(value) and is_float(value.dtype)


class Parted:
    """A pytree split into traced and Python leaves; see [Note: containers that JAX does not know].

    Attributes:
      dynamic: the leaves that a trace carries.
      static: the leaves that stay Python, without opened containers.
    """

    def __init__(
        self,
        values: Any,
        is_dynamic: Test = is_array,
        is_leaf: Test = lambda x: False,
        is_data: Test = lambda x: isinstance(x, jax.Array),  # inside a container, numpy arrays may be settings
        parent: Parted | None = None,
    ):
        self._seen: set[int] = parent._seen if parent else set()
        self._copies: list[tuple[Any, Any, list[Any]]] = parent._copies if parent else []
        leaves, self._tree = jax.tree.flatten(values, is_leaf=lambda x: is_leaf(x) or _is_lazy(x))
        self.dynamic, self.static, self._parts = [], [], []
        for x in leaves:
            mark = is_dynamic(x)
            inside = None if mark or is_array(x) or id(x) in self._seen else self._open(x, is_leaf, is_data)
            self._parts.append((x, mark, inside))
            self.dynamic += [x] if mark else inside.dynamic if inside else []
            self.static += [] if mark else inside.static if inside else [x]

    def _open(self, container: Any, is_leaf: Test, is_data: Test) -> Parted | None:
        """Split the contents of a container; None if it contains no arrays."""
        self._seen.add(id(container))
        found = Parted(_contents(container), is_data, is_leaf, is_data, self)
        self._seen -= {id(container)} if found.dynamic else set()
        return found if found.dynamic else None

    def rebuild(self, dynamic: Iterable[Any]) -> Any:
        """Return the pytree with other dynamic leaves."""
        values, leaves = iter(dynamic), []
        for x, mark, inside in self._parts:
            leaves.append(next(values) if mark else _copy_around(x, inside.rebuild(values)) if inside else x)
            if inside:
                self._copies.append((x, leaves[-1], _leaves(_contents(leaves[-1]))))
        return jax.tree.unflatten(self._tree, leaves)

    def _written(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield containers whose copies a call has written to, the copies, and the copies' contents without casts."""
        while self._copies:
            old, new, put = self._copies.pop()
            given, contents = _contents(old), _contents(new)
            for name in contents[1].keys() - given[1].keys():
                if isinstance(getattr(type(new), name, None), functools.cached_property):
                    del contents[1][name]  # read by the call, not written
            if list(map(id, _leaves(contents))) != list(map(id, put)):
                back = dict(zip(map(id, put), _leaves(given)))
                yield old, new, jax.tree.map(lambda x, back=back: back.get(id(x), x), contents, is_leaf=_is_lazy)

    def check_unwritten(self, who: str) -> None:
        """Check that a call has not written to the copy of a container, since the caller's would not change."""
        for old, _, _ in self._written():
            raise ValueError(f"{who}: writes to a copy of an argument (a {type(old).__name__}); return the new values")

    def write_back(self) -> None:
        """Write a call's writes to copies back to the original containers."""
        for old, new, contents in self._written():
            _fill(old, new, contents)


def map_arrays(fn: Callable[[Any], Any], parts: Parted, values: Any) -> Any:
    """Return the values of `parts` with their arrays mapped; the same objects if no array changes."""
    new = [fn(x) for x in parts.dynamic]
    return values if all(a is b for a, b in zip(new, parts.dynamic, strict=True)) else parts.rebuild(new)


def part_output(unit: str, out: Any) -> Parted:
    """Split a unit's output.

    Raises:
      ValueError: for values that are computed later, when the unit's weights are freed.
    """
    parts = Parted(out)
    if late := [x for x in parts.static if isinstance(x, (*_LAZY, Awaitable))]:
        kind = type(late[0]).__name__
        raise ValueError(f"unit {unit!r}: its call returns a {kind}, which is read after the call; return a list")
    return parts


def _contents(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the items and the attributes of a container; functions and modules have none."""
    if isinstance(value, _CLOSED):
        return [], {}
    items = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else []
    bases = [vars(base) for base in type(value).__mro__ if "__slots__" in vars(base)]
    slots = [name for base in bases for name, x in base.items() if isinstance(x, types.MemberDescriptorType)]
    names = dict.fromkeys([*slots, *getattr(value, "__dict__", ())])
    return items, {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_lazy(value: Any) -> bool:
    return isinstance(value, _LAZY)


def _leaves(contents: Any) -> list[Any]:
    return jax.tree.leaves(contents, is_leaf=_is_lazy)


def _copy_around(value: Any, contents: tuple[list[Any], dict[str, Any]]) -> Any:
    """Return a copy of an object with the given items and attributes."""
    is_tuple = isinstance(value, tuple)
    new = tuple.__new__(type(value), contents[0]) if is_tuple else copy.copy(value)  # type: ignore[type-var]
    return _fill(new, value, contents)


def _fill(target: Any, source: Any, contents: tuple[list[Any], dict[str, Any]]) -> Any:
    """Write items, with the keys of `source`, and attributes to an object."""
    items, attributes = contents
    if isinstance(target, list):
        target[:] = items
    elif isinstance(target, dict):
        for key in [key for key in target if key not in source]:
            del target[key]
        for key, x in zip(source, items, strict=True):
            target[key] = x
    for name, x in attributes.items():
        object.__setattr__(target, name, x)
    return target
