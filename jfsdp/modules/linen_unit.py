"""A Linen unit's call under the engine: Flax's own lifting makes it a pure function of variables.

[Note: how a Linen unit is hooked]
An interceptor (`nn.intercept_methods`) sees every method call. For one on a unit that is not open, the method is lifted
as `nn.remat` lifts: Flax clones the module onto fresh scopes around given variables, with the same paths, rng keys and
rng counters, and publishes what the call changed. So dropout masks, names and collections are those of the plain model,
and it works below nn.scan, nn.remat, nn.vmap and nn.jit, which call back in their bodies.

A parameter of a unit that is not open is in a box, `NotGathered`. Flax opens it where the model reads a parameter: what
comes out, `Unread`, raises at any use.
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

# The name under which a unit's method runs inside its lift. Captures of intermediates leave it out.
IN_UNIT = "in_unit"


class NotGatheredError(ValueError):
    """A parameter was used while its unit is not open."""


class _Refused:
    """What stands for a parameter, by its path and unit, that is not gathered: to compute with it raises."""

    path: str
    unit: str

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise NotGatheredError(str(not_gathered(self.path, self.unit)))


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "mod")
for _name in ("jax_array", "getitem", "neg", *_OPERATORS, *(f"r{operator}" for operator in _OPERATORS)):
    setattr(_Refused, f"__{_name}__", _Refused._refuse)


class Unread(_Refused):
    """What a model reads of a parameter that is not gathered: its shape and dtype. Any use raises."""

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

    It refuses to be computed with, since a transform that maps variables (nn.map_variables) sees the boxes themselves.

    Args:
      shape: the logical shape.
      owner: told apart by traces that Flax caches (nn.jit): what is traced for one model must not serve another.
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
                f"{self.path}: nn.scan or nn.vmap stacks layers along dim {index} of it, and unit {self.unit!r} is "
                "gathered along dim 0; use variable_axes={'params': 0}, or leave it to the root unit"
            )
        return self

    def add_axis(self, index: int, params: dict[Any, Any]) -> NotGathered:
        return self.remove_axis(index, params)


class Labelled(NotGathered):
    """A parameter with its name, for discovery: Flax opens the box, and no trace cached for other names serves it."""

    def unbox(self) -> Any:
        return self.value

    def remove_axis(self, index: int, params: dict[Any, Any]) -> NotGathered:
        return self


jax.tree_util.register_pytree_node_class(Labelled)


def is_box(value: Any) -> bool:
    return isinstance(value, NotGathered)


def make_interceptor(hooks: Hooks) -> Callable[..., Any]:
    """Make the interceptor that runs the calls of units through the engine."""

    def intercept(
        next_fun: Callable[..., Any], args: Any, kwargs: Any, context: linen.module.InterceptorContext
    ) -> Any:
        module = context.module
        name = join_path(module.path) if module.scope is not None else ""
        if name not in hooks.units or hooks.is_open(name):
            return next_fun(*args, **kwargs)
        if context.method_name == "setup":
            # From outside, for who asks for its submodules. If it computes with its weights, only the copy that runs
            # the call can be set up.
            with contextlib.suppress(NotGatheredError):
                next_fun()
            return None
        # `orig_method` is the method with its module bound to it.
        method = context.orig_method.func  # type: ignore[attr-defined]
        return _lift_call(method, name, hooks, _is_in_transform(module.scope))(module, *args, **kwargs)

    return intercept


def _is_in_transform(scope: Any) -> bool:
    """Tell whether a transform of JAX itself was entered since a scope, or one around it, was made or lifted."""
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
                    "transform around it (nn.jit, nn.remat, nn.scan) leaves collection 'params' out of its variables"
                )
            out, after = hooks.call(unit, run, run.shards, {"params": {}, "inputs": inputs.dynamic})
            if after and is_in_transform:
                raise state_in_transform(unit, run.changed, "nn")
            return run.out.rebuild(out), run.after.rebuild(after)

        return lift.pack(inner, (True,), (True,), (True,), name="unit", enable_kwargs=True)

    return transforms.decorator_lift_transform(transform, in_unit)


class _ScopedRun:
    """A unit's call as a pure function of its weights and inputs; it closes over all else: other variables, rng keys.

    Attributes:
      out, after: what the call returned, and the variables afterwards, parted, dynamic if it changed them; and
      changed: the names of these. Known once it ran.
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
        # What a call leaves as it was goes back as it was: out of a transform of JAX, nothing else could come.
        is_changed = lambda x: is_array(x) and id(x) not in before  # noqa: E731
        self.after = Parted(after, is_dynamic=is_changed)
        changed = [path[2:] for path, x in jax.tree_util.tree_leaves_with_path(after) if is_changed(x)]
        self.changed = [jax.tree_util.keystr(path, simple=True, separator=".") for path in changed]
        return self.out.dynamic, self.after.dynamic, {}  # "params" is never mutable
