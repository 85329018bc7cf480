"""A Linen unit's call under the engine: Flax's lifting makes it a pure function of variables.

[Note: how a Linen unit is hooked]
An interceptor (`nn.intercept_methods`) sees every method call. A call on a unit that is not open is lifted as in
`nn.remat`: Flax clones the module onto new scopes around given variables, with the same paths, rng keys and rng
counters, and publishes the changes of the call. So dropout masks, names and collections are those of the plain model.
It also works inside nn.scan, nn.remat, nn.vmap and nn.jit, which call the interceptor in their bodies.

A parameter of a unit that is not open is in a box, `NotGathered`. Flax opens it where the model reads a parameter, and
the result, `Unread`, raises at any use.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
from flax import linen
from flax.core import lift, meta
from flax.core.tracers import current_trace
from flax.linen import transforms

from jfsdp.modules.model import Arrays, Hooks, join_path, not_gathered, state_in_transform
from jfsdp.modules.parted import Parted, is_array, part_output

# The name of a unit's method inside its lift. Captures of intermediates exclude it.
IN_UNIT = "in_unit"


class NotGatheredError(ValueError):
    """A parameter was used while its unit was not open."""


class _Refused:
    """A placeholder, with path and unit, for a parameter that is not gathered; computing with it raises."""

    path: str
    unit: str

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise NotGatheredError(str(not_gathered(self.path, self.unit)))


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "mod")
for _name in ("jax_array", "getitem", "neg", *_OPERATORS, *(f"r{operator}" for operator in _OPERATORS)):
    setattr(_Refused, f"__{_name}__", _Refused._refuse)


class Unread(_Refused):
    """The placeholder that a model reads for a parameter that is not gathered: shape and dtype. Any use raises."""

    def __init__(self, path: str, unit: str, shape: tuple[int, ...], dtype: Any):
        self.path, self.unit, self.shape, self.dtype, self.ndim = path, unit, shape, dtype, len(shape)

    def __repr__(self) -> str:
        return f"Unread({self.path!r}, {self.dtype}{list(self.shape)})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


for _name in ("array", "iter", "len", "bool", "float", "int", "pos", "abs", "lt", "le", "gt", "ge"):
    setattr(Unread, f"__{_name}__", Unread._refuse)


@jax.tree_util.register_pytree_node_class
class NotGathered(_Refused, meta.AxisMetadata):
    """A parameter at rest on its way to its unit, through scans, remats and jits: a pytree node around the array.

    Computing with it raises, since a transform that maps variables (nn.map_variables) receives the boxes themselves.

    Args:
      shape: the logical shape.
      owner: distinguishes traces that Flax caches (nn.jit): a trace of one model must not be used for another.
    """

    def __init__(self, value: Any, path: str, unit: str, shape: tuple[int, ...], owner: Any):
        self.value, self.path, self.unit, self.shape, self.owner = value, path, unit, shape, owner

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.value,), (self.path, self.unit, self.shape, self.owner)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> NotGathered:
        return cls(children[0], *aux)

    def unbox(self) -> Any:
        return Unread(self.path, self.unit, self.shape[len(self.shape) - self.value.ndim :], self.value.dtype)

    def replace_boxed(self, val: Any) -> NotGathered:
        return type(self)(val, self.path, self.unit, self.shape, self.owner)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> NotGathered:
        del params
        if index != 0:
            raise ValueError(
                f"{self.path}: nn.scan or nn.vmap stacks its layers along dim {index}, but unit {self.unit!r} is "
                "gathered along dim 0; use variable_axes={'params': 0}, or leave it to the root unit"
            )
        return self

    def add_axis(self, index: int, params: dict[Any, Any]) -> NotGathered:
        return self.remove_axis(index, params)


class Labelled(NotGathered):
    """A parameter with its name, for discovery: Flax opens the box, and does not reuse traces of other names."""

    def unbox(self) -> Any:
        return self.value

    def remove_axis(self, index: int, params: dict[Any, Any]) -> NotGathered:
        return self


jax.tree_util.register_pytree_node_class(Labelled)


def is_box(value: Any) -> bool:
    return isinstance(value, NotGathered)


def make_interceptor(hooks: Hooks) -> Callable[..., Any]:
    """Make the interceptor that runs the calls of units through the engine."""

    def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, call: linen.module.InterceptorContext) -> Any:
        module = call.module
        name = join_path(module.path) if module.scope is not None else ""
        if name not in hooks.units or hooks.is_open(name):
            return next_fun(*args, **kwargs)
        if call.method_name == "setup":
            # Called from outside, to access its submodules. If setup computes with weights, it can only run in the
            # copy that runs the call.
            with contextlib.suppress(NotGatheredError):
                next_fun()
            return None
        # `orig_method` is the method bound to its module.
        method = call.orig_method.func  # type: ignore[attr-defined]
        return _lift_call(method, name, hooks, _is_in_transform(module.scope))(module, *args, **kwargs)

    return intercept


def _is_in_transform(scope: Any) -> bool:
    """Tell whether a transform of JAX was entered since a scope, or one around it, was made or lifted."""
    return scope is not None and (scope.trace_level != current_trace() or _is_in_transform(scope.parent))


def _lift_call(method: Callable[..., Any], unit: str, hooks: Hooks, is_in_transform: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def in_unit(module: linen.Module, *args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    in_unit.__name__ = IN_UNIT

    def transform(core_fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = Parted((args, kwargs))
            run = _ScopedRun((core_fn, scope_fn, repack), variables, rngs, inputs, unit)
            if missing := [leaf for leaf in hooks.units[unit].leaves if leaf not in run.shards]:
                raise ValueError(
                    f"unit {unit!r}: called where its parameters {', '.join(missing[:4])} are not visible; a lifted "
                    "transform around it (nn.jit, nn.remat, nn.scan) must include collection 'params' in its variables"
                )
            out, after = hooks.call(unit, run, run.shards, {"params": {}, "inputs": inputs.dynamic})
            if after and is_in_transform:
                raise state_in_transform(unit, run.changed, "nn")
            return run.out.rebuild(out), run.after.rebuild(after)

        return lift.pack(inner, (True,), (True,), (True,), name="unit", enable_kwargs=True)

    return transforms.decorator_lift_transform(transform, in_unit)


class _ScopedRun:
    """A unit's call as a pure function of its weights and inputs, closed over other variables and rng keys.

    Attributes:
      out, after: the call's output, and the variables afterwards, parted, dynamic if it changed them.
      changed: the names of the changed variables. All three are set when it has run.
    """

    def __init__(
        self,
        make: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]],
        variables: Any,
        rngs: Any,
        inputs: Parted,
        unit: str,
    ):
        self.core_fn, self.scope_fn, self.repack = make
        self.rngs, self.inputs, self.unit = rngs, inputs, unit
        self._leaves, self._tree = jax.tree.flatten(variables, is_leaf=is_box)
        self.shards: Arrays = {x.path: x.value for x in self._leaves if self._is_own(x)}
        self.out = self.after = Parted(())
        self.changed: list[str] = []

    def _is_own(self, leaf: Any) -> bool:
        return is_box(leaf) and leaf.unit == self.unit

    def __call__(self, full: Arrays, rest: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any], Arrays]:
        leaves = [full[leaf.path] if self._is_own(leaf) else leaf for leaf in self._leaves]
        scopes = self.scope_fn(jax.tree.unflatten(self._tree, leaves), self.rngs)
        args, kwargs = self.inputs.rebuild(rest["inputs"])
        self.out = part_output(self.unit, self.core_fn(scopes, *args, **kwargs))
        self.inputs.check_unwritten(f"unit {self.unit!r}")
        after, before = self.repack(scopes), set(map(id, self._leaves))
        # Unchanged variables are returned as the same objects: no other value could leave a transform of JAX.
        is_changed = lambda x: is_array(x) and id(x) not in before  # noqa: E731
        self.after = Parted(after, is_dynamic=is_changed)
        changed = [path[2:] for path, x in jax.tree_util.tree_leaves_with_path(after) if is_changed(x)]
        self.changed = [jax.tree_util.keystr(path, simple=True, separator=".") for path in changed]
        return self.out.dynamic, self.after.dynamic, {}  # "params" is never mutable
