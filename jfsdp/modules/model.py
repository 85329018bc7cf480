"""The protocol of a model, NNX or Linen: names and shapes, initial arrays, and a run with hooks.

[Note: one path for both]
The engine sees a model as pure functions of arrays by name. An adapter converts the user's model to these functions and
calls hooks at every call of a unit. The parts of a unit's call (graph definitions, scopes, rng counters) stay inside
the adapter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import optax
from flax import linen
from jax.sharding import AxisType

from jfsdp.layout.codec import Codec
from jfsdp.layout.lora import Adapter
from jfsdp.layout.units import ModuleInfo, UnitInfo

Arrays = dict[str, jax.Array]
KeyPath = tuple[Any, ...]


class ParamTree:
    """The tree of a model's parameters that the user's code, mainly an optimizer, sees.

    Linen: `params` as `module.init` returns them, nested, without metadata boxes. NNX: the state of `nnx.Param` that
    `nnx.split(model, nnx.Param, ...)` returns, with its Params.

    Args:
      named: that tree, with the name of each parameter in place of its array.
    """

    def __init__(self, named: Any):
        self._names, self._tree = jax.tree.flatten(named)
        self._name_of: dict[KeyPath, str] = {}
        for path, name in jax.tree_util.tree_leaves_with_path(named):
            self._name_of[path] = name
            # An optimizer may also keep bare arrays in place of the tree's Params.
            bare = tuple(key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
            self._name_of.setdefault(bare, name)

    def build(self, values: Mapping[str, Any]) -> Any:
        """Return the tree with values by name, and `optax.MaskedNode()` for missing values."""
        return jax.tree.unflatten(self._tree, [values.get(name, optax.MaskedNode()) for name in self._names])

    def by_name(self, tree: Any) -> dict[str, Any]:
        """Return the values of a tree by name; the inverse of `build`.

        Raises:
          ValueError: if it is another tree.
        """
        values = zip(self._names, self._tree.flatten_up_to(tree), strict=True)
        return {name: value for name, value in values if not isinstance(value, optax.MaskedNode)}

    def find(self, path: KeyPath) -> tuple[KeyPath, str | None, KeyPath]:
        """Return a path's parameter, and the keys before and after the parameter's own; (path, None, ()) if none.

        It is the parameter with the longest key path at the end of the path. If there is none, keys may follow, since
        some optimizers keep several arrays in place of a parameter.
        """
        for end in range(len(path), 0, -1):
            for start in range(end):
                if (name := self._name_of.get(path[start:end])) is not None:
                    return path[:start], name, path[end:]
        return path, None, ()


class UnitRun(Protocol):
    """A unit's call as a pure function, made for a single call."""

    def __call__(self, full: Arrays, rest: Mapping[str, Any]) -> tuple[Any, Any, Arrays]:
        """Run on gathered weights; return the arrays of the output, those of the state afterwards, and the parameters
        that may have been written, by their names in `full` and `rest["params"]`.

        `rest` has "params", weights of inner units by any name, and "inputs", the arrays that precision may cast. Other
        inputs may be closed over.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions that a model calls while it runs.

    Attributes:
      units: the units other than the root that own leaves, by name.
      call: `call(unit, run, shards, rest) -> run(gathered, rest)`.
      is_open: whether a unit's call is running, so that its weights are gathered.
      cast_inputs, cast_outputs: casts of floating arrays at the model's own `__call__`.
    """

    units: Mapping[str, UnitInfo]
    call: Callable[[str, UnitRun, Arrays, dict[str, Any]], tuple[Any, Any]]
    is_open: Callable[[str], bool]
    cast_inputs: Callable[[Any], Any]
    cast_outputs: Callable[[Any], Any]

    def owners(self) -> dict[str, str]:
        """Return the unit of every parameter outside the root."""
        return {leaf: name for name, unit in self.units.items() for leaf in unit.leaves}


class FlaxModel(Protocol):
    """The interface of a Flax model.

    Attributes:
      params, state: shapes and dtypes of the parameters, and of all other values that are kept between steps, by name.
      types: the variable type of each parameter, if the API has such types; otherwise empty.
      dim_names: names of a parameter's dims in sharding metadata, if it has them.
      aliases: by other name of a parameter with several paths in the model, its own name.
      tree: the tree of parameters that users and their optimizers see.
      modules: all modules, the root first.
      instance: the weights given with the model, in the adapter's own form; None if `create` makes them.
      adapters, codecs: low-rank adapters and codecs by name of the parameter.
    """

    params: dict[str, jax.ShapeDtypeStruct]
    state: dict[str, jax.ShapeDtypeStruct]
    types: dict[str, type]
    dim_names: dict[str, tuple[Any, ...]]
    aliases: dict[str, str]
    tree: ParamTree
    modules: list[ModuleInfo]
    instance: Any
    adapters: Mapping[str, Adapter]
    codecs: Mapping[str, Codec]

    def create(self, seed: Any) -> tuple[Arrays, Arrays]:
        """Return parameters and other state by name: initialized inside `jit`, or those of the `instance`."""
        ...

    def run(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], inputs: Any, hooks: Hooks
    ) -> tuple[Any, Arrays, Arrays]:
        """Compute `fn(model, *inputs)` with the user's model bound to arrays.

        Args:
          params: the root unit's parameters gathered, all others as they are at rest.

        Returns:
          The output, and the parameters and other state afterwards.

        Raises:
          ValueError: if a parameter is read while its unit is not open; if state is created or removed.
        """
        ...

    def plain(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        """Return the user's own model with these arrays: an `nnx.Module`, or the variables of a Linen module."""
        ...


class PlainModel(FlaxModel, Protocol):
    """A user's Flax model, to which adapters can be added."""

    def named(self, values: Mapping[str, Any]) -> Any:
        """Return the tree of parameters that users see, with any values by name."""
        ...

    def with_params(self, extra: Mapping[str, jax.ShapeDtypeStruct]) -> PlainModel:
        """Return the model with additional parameters, which its code does not read and its transforms carry along.

        Args:
          extra: by name: a parameter of the model and a suffix, such as `q_proj.kernel.lora_a`.
        """
        ...


@contextlib.contextmanager
def local_rules() -> Iterator[None]:
    """Disable the user's logical axis rules inside a `shard_map` over all axes.

    Otherwise a model sees the mesh of that `shard_map`, and Flax states shardings over axes that it must not name.
    """
    is_local = set(jax.sharding.get_abstract_mesh().axis_types) == {AxisType.Manual}
    with linen.logical_axis_rules(() if is_local else linen.get_logical_axis_rules()):
        yield


def not_gathered(path: str, unit: str) -> ValueError:
    """Make the error for a read of a parameter that is not gathered."""
    return ValueError(
        f"{path}: read outside the calls of its unit {unit!r}, where it is not gathered; call module.method(x), not "
        "Class.method(module, x), replace a penalty on weights by weight decay in the optimizer, leave it to the root "
        "unit, or make a unit of a module whose methods contain all uses"
    )


def state_in_transform(unit: str, names: Sequence[str], api: str) -> ValueError:
    """Make the error for a call that changes state inside a transform from which changes cannot be returned."""
    return ValueError(
        f"unit {unit!r}: called inside a transform of JAX (jax.vmap, lax.scan, ...), and its call changes state, which "
        f"such a transform does not return: {', '.join(names[:4])}; use the transform of Flax ({api}.vmap, {api}.scan, "
        "...), or a mode in which the call changes no state (deterministic, use_running_average)"
    )


def join_path(path: Iterable[Any]) -> str:
    """Join the keys of a path into a name."""
    return ".".join(map(str, path))


def struct_of(value: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return a pytree with the same structure and other leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
