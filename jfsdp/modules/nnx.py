"""Flax NNX models as pure functions of named arrays, with a hook at the call of every unit.

[Note: how a unit is hooked]
Inside a trace the graph definition is merged with the arrays given, and each unit module of that traced copy has its
class swapped for a subclass whose `__call__` splits the module again and hands it to the engine. NNX keeps the class
in the graph definition, so a swapped class survives into the bodies of `nnx.scan`. The user's own module is never
touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jfsdp.layout.units import ModuleInfo, UnitInfo

Arrays = dict[str, jax.Array]
UnitCall = Callable[[str, Callable[..., Any], Arrays, Any], Any]


def _name(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


class NNXModel:
    """An NNX model seen from outside: names, shapes and modules, and ways into a trace and out of it.

    Args:
      source: a factory `f(rngs) -> nnx.Module`, or an `nnx.Module` whose weights are kept.
    """

    def __init__(self, source: Any):
        self.instance = source if isinstance(source, nnx.Module) else None
        self.factory = source
        model = self.instance if self.instance is not None else _abstract(source)
        self.graphdef, params, state = nnx.split(model, nnx.Param, ...)
        self._params, self._state = nnx.to_flat_state(params), nnx.to_flat_state(state)
        self.params = {name: _struct(value) for name, value in _arrays(self._params).items()}
        self.state = {name: _struct(value) for name, value in _arrays(self._state).items()}
        self.modules = _modules(model)

    def create(self, seed: Any) -> tuple[Arrays, Arrays]:
        """Return parameters and other state by name; call it inside `jit`. A given instance keeps its own."""
        model = self.instance if self.instance is not None else self.factory(nnx.Rngs(jax.random.key(seed)))
        _, params, state = nnx.split(model, nnx.Param, ...)
        return _arrays(nnx.to_flat_state(params)), _arrays(nnx.to_flat_state(state))

    def bind(
        self,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        hooks: Mapping[str, type],
        guards: Mapping[str, Callable[..., Any]],
    ) -> nnx.Module:
        """Build the model around arrays, with the class of each module in `hooks` (by path) swapped.

        Args:
          guards: by parameter, `f(variable, value) -> value`, called at every read of it.
        """
        flat = [_with_arrays(self._params, params), _with_arrays(self._state, state)]
        model = nnx.merge(self.graphdef, *(nnx.from_flat_state(part) for part in flat))
        for path, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Module) and _name(path) in hooks:
                _set_class(node, hooks[_name(path)])
            elif isinstance(node, nnx.Param) and _name(path) in guards:
                node.set_metadata(on_get_value=guards[_name(path)])
        return model

    def collect(self, model: nnx.Module) -> tuple[Arrays, Arrays]:
        """Return the parameters and the other state that a bound model holds after its calls.

        Raises:
          ValueError: if the calls created or removed some.
        """
        _, *parts = nnx.split(model, nnx.Param, ...)
        params, state = (_arrays(nnx.to_flat_state(part)) for part in parts)
        changed = sorted((params.keys() ^ self.params.keys()) | (state.keys() ^ self.state.keys()))
        if changed:
            raise ValueError(f"the model's call created or removed state: {', '.join(changed)}; create it in __init__")
        return params, state

    def module_class(self, path: str) -> type:
        return next(module.cls for module in self.modules if module.path == path)


def _abstract(factory: Any) -> nnx.Module:
    if any(base.__module__.startswith("flax.linen") for base in type(factory).__mro__):
        raise ValueError("the model is a flax.linen module, and only flax.nnx modules are supported")
    if not callable(factory):
        raise ValueError(f"model {factory!r} is neither an nnx.Module nor a factory f(rngs) -> nnx.Module")
    model = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
    if not isinstance(model, nnx.Module):
        raise ValueError(f"the model factory returned {type(model).__name__}; it must return an nnx.Module")
    return model


def _struct(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _arrays(flat: Any) -> Arrays:
    """Name every array of a flat state; a variable that holds several gets numbered names."""
    named = {}
    for path, variable in flat:
        leaves = jax.tree.leaves(variable)
        for index, leaf in enumerate(leaves):
            named[_name(path) if len(leaves) == 1 else f"{_name(path)}.{index}"] = leaf
    return named


def _with_arrays(flat: Any, arrays: Mapping[str, Any]) -> Any:
    names = list(_arrays(flat))
    return jax.tree.unflatten(jax.tree.structure(flat), [arrays[name] for name in names])


def _modules(model: nnx.Module) -> list[ModuleInfo]:
    """List the modules, root first, each with the parameters that it reaches (tied ones by their first name)."""
    names = {id(node): _name(path) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)}

    def leaves(module: nnx.Module) -> tuple[str, ...]:
        return tuple(names[id(node)] for _, node in nnx.iter_graph(module) if id(node) in names)

    found = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)}
    in_order = sorted(found, key=lambda path: [(isinstance(key, str), key) for key in path])
    return [ModuleInfo(_name(path), type(found[path]), leaves(found[path])) for path in in_order]


def unit_hook(cls: type, unit: UnitInfo, call: UnitCall) -> type:
    """Subclass a unit's class so that its `__call__` runs through the engine; see [Note: how a unit is hooked].

    Args:
      call: `call(name, run, shards, rest) -> run(full, rest)`, with the weights by their full names.
    """
    prefix = unit.name + "."
    own = {leaf.removeprefix(prefix): leaf for leaf in unit.leaves}

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = type(self)
        inputs = _Inputs(args, kwargs)
        _set_class(self, cls)
        try:
            graphdef, *parts = nnx.split((self, inputs.dynamic), *_filters(own))
        finally:
            _set_class(self, hook)
        pure = _PureCall(unit.name, graphdef, parts, own, inputs)
        out, new_state = call(unit.name, pure, pure.weights, pure.rest)
        if new_state:
            nnx.update((self, inputs.dynamic), _with_leaves(parts[2], new_state))
        return pure.rebuild(out)

    return _subclass(cls, hooked)


def root_hook(cls: type, cast_inputs: Callable[[Any], Any], cast_outputs: Callable[[Any], Any]) -> type:
    """Subclass the model's class so that its `__call__` casts what goes in and what comes out."""

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = _Inputs(args, kwargs)
        args, kwargs = inputs.rebuild([cast_inputs(x) if _is_array(x) else x for x in inputs.dynamic])
        out = cls.__call__(self, *args, **kwargs)
        return jax.tree.map(lambda x: cast_outputs(x) if _is_array(x) else x, out)

    return _subclass(cls, hooked)


def _set_class(module: nnx.Module, cls: type) -> None:
    # Not by assignment, which NNX forbids below transforms of JAX itself (jax.checkpoint, lax.cond; flax 0.12.8).
    object.__setattr__(module, "__class__", cls)


def _subclass(cls: type, call: Callable[..., Any]) -> type:
    return type(cls.__name__, (cls,), {"__call__": functools.wraps(cls.__call__)(call), "__module__": cls.__module__})


def _filters(own: Mapping[str, str]) -> Sequence[Any]:
    """Sort what a call reads: the unit's own weights, weights of inner units, other variables, plain input arrays."""

    def is_own(path: Sequence[Any], value: Any) -> bool:
        return path[0] == 0 and isinstance(value, nnx.Param) and _name(path[1:]) in own

    return is_own, nnx.Param, nnx.Variable, ...


def _with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray))


class _Inputs:
    """The arguments of a call, parted into what a trace carries (arrays, NNX objects) and what stays Python."""

    def __init__(self, args: Any, kwargs: Any):
        is_leaf = lambda x: isinstance(x, (nnx.Module, nnx.Variable, nnx.Rngs))  # noqa: E731
        leaves, self.tree = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
        self.is_dynamic = [_is_array(x) or is_leaf(x) for x in leaves]
        self.dynamic = [x for x, dynamic in zip(leaves, self.is_dynamic, strict=True) if dynamic]
        self.static = [None if dynamic else x for x, dynamic in zip(leaves, self.is_dynamic, strict=True)]

    def rebuild(self, dynamic: Iterable[Any]) -> Any:
        values = iter(dynamic)
        pairs = zip(self.static, self.is_dynamic, strict=True)
        return jax.tree.unflatten(self.tree, [next(values) if is_dynamic else x for x, is_dynamic in pairs])


def inner_names(params: Sequence[Any]) -> list[str]:
    """Name the weights of inner units that a unit's call reads, by their place."""
    return [f"weight {index} of an inner unit" for index in range(len(params))]


class _PureCall:
    """A unit's call as a pure function of its weights and the rest; keeps the Python parts of its output aside."""

    def __init__(self, name: str, graphdef: Any, parts: Sequence[Any], own: Mapping[str, str], inputs: _Inputs):
        self.name, self.graphdef, self.parts, self.inputs = name, graphdef, parts, inputs
        self.filters = _filters(own)
        weights, *rest = map(jax.tree.leaves, parts)
        self.paths = [own[_name(path[1:])] for path, _ in nnx.to_flat_state(parts[0])]
        self.weights = dict(zip(self.paths, weights, strict=True))
        self.rest = dict(zip(("params", "state", "inputs"), rest, strict=True))
        self.names, self.may_write = [*self.paths, *inner_names(self.rest["params"])], False

    def __call__(self, full: Arrays, rest: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Run the module; return the arrays of its output and its state afterwards."""
        out, after = self._run(full, rest)
        leaves, self._out_tree = jax.tree.flatten(out)
        self._out_static = [None if _is_array(x) else x for x in leaves]
        self._out_is_array = [_is_array(x) for x in leaves]
        return [x for x in leaves if _is_array(x)], after[2]

    def params_after(self, full: Arrays, rest: Mapping[str, Any]) -> list[Any]:
        """Run the module; return the parameters it holds afterwards, its own and those of inner units."""
        _, after = self._run(full, rest)
        return [*after[0], *after[1]]

    def _run(self, full: Arrays, rest: Mapping[str, Any]) -> tuple[Any, list[list[Any]]]:
        before = [[full[path] for path in self.paths], rest["params"], rest["state"], rest["inputs"]]
        filled = [_with_leaves(part, values) for part, values in zip(self.parts, before, strict=True)]
        module, dynamic = nnx.merge(self.graphdef, *filled)
        args, kwargs = self.inputs.rebuild(dynamic)
        out = module(*args, **kwargs)
        graphdef, *after = nnx.split((module, dynamic), *self.filters)
        after = list(map(jax.tree.leaves, after))
        self._check(graphdef)
        params = zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True)
        self.may_write = any(old is not new for old, new in params)
        return out, after

    def _check(self, graphdef: Any) -> None:
        if graphdef != self.graphdef:
            raise ValueError(
                f"unit {self.name!r}: its call created, removed or replaced attributes; create all state in __init__ "
                "(a call may only change the values of variables that are there)"
            )

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Put output arrays back between the Python parts of the output."""
        values = iter(arrays)
        pairs = zip(self._out_static, self._out_is_array, strict=True)
        return jax.tree.unflatten(self._out_tree, [next(values) if is_array else x for x, is_array in pairs])
