"""An NNX unit's call under the engine: the unit's class is replaced by a subclass whose methods call the hooks.

[Note: how an NNX unit is hooked]
Inside a trace the graph definition is merged with the given arrays. In this traced copy, the class of each unit module
is replaced by a subclass whose methods split the module again and pass it to the engine. NNX keeps the class in the
graph definition, so the subclass is also used in the bodies of `nnx.scan`. The copy that runs a unit's call has the
user's class again, so a method that calls another one runs it directly. The user's own module is never changed.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError

from jfsdp.layout.units import UnitInfo
from jfsdp.modules.model import Arrays, Hooks, join_path, state_in_transform, with_leaves
from jfsdp.modules.parted import Parted, can_cast, is_array, map_arrays, part_output


def hook_unit(module: nnx.Module, unit: UnitInfo, hooks: Hooks) -> None:
    """Replace the class of a unit's module in a traced copy; see [Note: how an NNX unit is hooked]."""
    cls = type(module)
    _set_class(module, _subclass(cls, {name: _hooked(cls, name, unit, hooks) for name in hooked_methods(cls)}))


def hook_root(module: nnx.Module, hooks: Hooks) -> None:
    """Replace the class of the model in a traced copy, so that its `__call__` casts inputs and outputs."""
    cls = type(module)
    if not _has_call(cls):
        return

    method = inspect.getattr_static(cls, "__call__")

    @functools.wraps(cls.__call__)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = Parted((args, kwargs), can_cast, _is_node, can_cast)
        args, kwargs = map_arrays(hooks.cast_inputs, inputs, (args, kwargs))
        out = _bind(method, self)(*args, **kwargs)
        inputs.write_back()
        return map_arrays(hooks.cast_outputs, Parted(out, can_cast, is_data=can_cast), out)

    _set_class(module, _subclass(cls, {"__call__": hooked}))


def hooked_methods(cls: type) -> list[str]:
    """List the user's methods: `__call__`, and attributes of classes below nnx.Module that bind to a module.

    Overrides of methods of nnx.Module (train, eval, set_attributes) are excluded: they change Python state and read no
    weights.
    """
    own = {name for base in _own_bases(cls) for name in vars(base)}
    methods = {name for name in own if _is_method(inspect.getattr_static(cls, name))}
    names = {name for name in methods if not name.startswith("__") and not hasattr(nnx.Module, name)}
    return sorted(names | ({"__call__"} if _has_call(cls) else set()))


def _is_method(value: Any) -> bool:
    """Tell whether a class attribute is a method: a function, or the result of a decorator such as `nnx.jit`."""
    if isinstance(value, (type, staticmethod, classmethod, functools.partial)) or not hasattr(type(value), "__get__"):
        return False
    return callable(value) or isinstance(value, (functools.partialmethod, functools.singledispatchmethod))


def _bind(method: Any, module: nnx.Module) -> Callable[..., Any]:
    return method.__get__(module, type(module)) if hasattr(method, "__get__") else method


def _own_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base not in nnx.Module.__mro__]


def _has_call(cls: type) -> bool:
    return any("__call__" in vars(base) for base in _own_bases(cls))


def _set_class(module: nnx.Module, cls: type) -> None:
    # Not by assignment, which NNX forbids inside transforms of JAX (jax.checkpoint, lax.cond; flax 0.12.8).
    object.__setattr__(module, "__class__", cls)


def _subclass(cls: type, methods: Mapping[str, Any]) -> type:
    # A subclass is a pytree by default, and a subclass of a class with pytree=False would lose the attributes.
    options = {"pytree": cls._pytree__is_pytree}  # type: ignore[attr-defined]
    body = {**methods, "__module__": cls.__module__}
    return types.new_class(cls.__name__, (cls,), options, lambda namespace: namespace.update(body))


def _hooked(cls: type, name: str, unit: UnitInfo, hooks: Hooks) -> Callable[..., Any]:
    method = inspect.getattr_static(cls, name)

    @functools.wraps(getattr(cls, name))
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = type(self)
        inputs = Parted((args, kwargs), lambda x: is_array(x) or _is_node(x), _is_node)
        _set_class(self, cls)
        try:
            run = _PureCall(method, unit, self, inputs)
        finally:
            _set_class(self, hook)
        out, after = hooks.call(unit.name, run, run.weights, run.rest)
        for state in run.after.rebuild(after):
            try:
                nnx.update((self, inputs.dynamic), state)
            except TraceContextError as error:
                names = [join_path(path[1:]) for path, _ in nnx.to_flat_state(state)]
                raise state_in_transform(unit.name, names, "nnx") from error
        return run.out.rebuild(out)

    return hooked


def _is_node(value: Any) -> bool:
    return isinstance(value, (nnx.Module, nnx.Variable, nnx.Rngs))


class _PureCall:
    """A unit's call as a pure function of its weights and the rest; stores the Python parts of its output.

    Attributes:
      weights: the unit's own weights, by their full names.
      rest: weights of inner units, other variables, and inputs.
      out, after: the call's output, and the variables that it changed or created, parted; set when it has run.
    """

    def __init__(self, method: Any, unit: UnitInfo, module: nnx.Module, inputs: Parted):
        prefix = unit.name + "."
        own = {leaf.removeprefix(prefix): leaf for leaf in unit.leaves}

        def is_own(path: Sequence[Any], value: Any) -> bool:
            return path[0] == 0 and isinstance(value, nnx.Param) and join_path(path[1:]) in own

        self.method, self.unit, self.inputs = method, unit.name, inputs
        # The unit's own weights, weights of inner units, other variables, plain input arrays.
        self.filters = is_own, nnx.Param, nnx.Variable, ...
        self.graphdef, *self.parts = nnx.split((module, inputs.dynamic), *self.filters)
        weights, params, state, arrays = map(jax.tree.leaves, self.parts)
        self.paths = [own[join_path(path[1:])] for path, _ in nnx.to_flat_state(self.parts[0])]
        self.weights: Arrays = dict(zip(self.paths, weights, strict=True))
        self.inner = [f"weight {index} of an inner unit" for index in range(len(params))]
        self.rest = {"params": dict(zip(self.inner, params, strict=True)), "state": state, "inputs": arrays}
        self.out, self.after = Parted(()), Parted(())

    def __call__(self, full: Arrays, rest: Mapping[str, Any]) -> tuple[list[Any], list[Any], Arrays]:
        """Run the method; return the arrays of its output, of the variables that it changed or created, and of the
        parameters, its own and those of inner units, that it may have written."""
        weights = [full[path] for path in self.paths], [rest["params"][name] for name in self.inner]
        before = [*weights, rest["state"], rest["inputs"]]
        filled = [with_leaves(part, values) for part, values in zip(self.parts, before, strict=True)]
        module, dynamic = nnx.merge(self.graphdef, *filled)
        known = {path for path, _ in _variables((module, dynamic))}
        args, kwargs = self.inputs.rebuild(dynamic)
        out = part_output(self.unit, _bind(self.method, module)(*args, **kwargs))
        self.inputs.check_unwritten(f"unit {self.unit!r}")
        created = self._take_created((module, dynamic), known)
        graphdef, *after = nnx.split((module, dynamic), *self.filters)
        if graphdef != self.graphdef:
            raise ValueError(f"unit {self.unit!r}: its call created, removed or replaced attributes; do so in __init__")
        self.out = out
        self.after = Parted((_changed(after[2], with_leaves(self.parts[2], rest["state"])), created))
        names, values = [*self.paths, *self.inner], zip([*weights[0], *weights[1]], jax.tree.leaves(after[:2]))
        written = {name: new for name, (old, new) in zip(names, values, strict=True) if new is not old}
        return self.out.dynamic, self.after.dynamic, written

    def _take_created(self, nodes: Any, known: set[Any]) -> nnx.State:
        """Remove variables that a call created (sown values, lazily made caches) from the copy, and return them."""
        new = {path: variable for path, variable in _variables(nodes) if path not in known}
        for path, variable in new.items():
            if isinstance(variable, nnx.Param):
                raise ValueError(f"unit {self.unit!r}: created parameter {join_path(path[1:])!r}; do so in __init__")
        if not new:
            return nnx.State({})
        return nnx.pop(nodes, lambda path, _: tuple(path) in new)


def _changed(state: nnx.State, before: nnx.State) -> nnx.State:
    """Return the variables that a call changed: inside a transform of JAX, writing others would be an error."""
    old = {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(before)}

    def is_new(path: Any, variable: Any) -> bool:
        values, given = jax.tree.leaves(variable), old.get(path, [])  # a tuple of sown values may have grown
        return len(values) != len(given) or any(new is not old for new, old in zip(values, given, strict=True))

    return nnx.from_flat_state([(path, x) for path, x in nnx.to_flat_state(state) if is_new(path, x)])


def _variables(nodes: Any) -> list[tuple[Any, nnx.Variable]]:
    return [(tuple(path), node) for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Variable)]
