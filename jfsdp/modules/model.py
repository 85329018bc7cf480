"""What jfsdp asks of a model, NNX or Linen: names and shapes, first arrays, and a run under hooks.

[Note: one path for both]
The engine sees a model as pure functions of arrays by name. An adapter turns the user's model into these functions and
gives its hooks control at every call of a unit; what a unit's call is made of (graph definitions, scopes, rng counters)
stays inside the adapter.
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
    """The tree in which the user's own code, an optimizer above all, sees the parameters of a model.

    Linen: `params` as `module.init` returns them, nested, without metadata boxes. NNX: the state of `nnx.Param` that
    `nnx.split(model, nnx.Param, ...)` returns, with its Params.

    Args:
      named: that tree, with the name of each parameter in the place of its array.
    """

    def __init__(self, named: Any):
        self._names, self._tree = jax.tree.flatten(named)
        self._name_of: dict[KeyPath, str] = {}
        for path, name in jax.tree_util.tree_leaves_with_path(named):
            self._name_of[path] = name
            # An optimizer may also keep arrays bare where the tree has them in a Param.
            bare = tuple(key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
            self._name_of.setdefault(bare, name)

    def build(self, values: Mapping[str, Any]) -> Any:
        """Return the tree of values by name, with `optax.MaskedNode()` where there is none."""
        return jax.tree.unflatten(self._tree, [values.get(name, optax.MaskedNode()) for name in self._names])

    def by_name(self, tree: Any) -> dict[str, Any]:
        """Return the values of a tree by name; undoes `build`.

        Raises:
          ValueError: if it is another tree.
        """
        values = zip(self._names, self._tree.flatten_up_to(tree), strict=True)
        return {name: value for name, value in values if not isinstance(value, optax.MaskedNode)}

    def find(self, path: KeyPath) -> tuple[KeyPath, str | None, KeyPath]:
        """Return the parameter that a path speaks of, and the keys before and after its own; (path, None, ()) if none.

        That is the one whose key path is the longest at the path's end. Where there is none, keys may follow: some
        optimizers keep several arrays in the place of a parameter.
        """
        for end in range(len(path), 0, -1):
            for start in range(end):
                if (name := self._name_of.get(path[start:end])) is not None:
                    return path[:start], name, path[end:]
        return path, None, ()


class UnitRun(Protocol):
    """A unit's call as a pure function; made anew for every call."""

    def __call__(self, full: Arrays, rest: Mapping[str, Any]) -> tuple[Any, Any, Arrays]:
        """Run on gathered weights; return the arrays of the output, those of the state afterwards, and by the names of
        `full` and `rest["params"]` the parameters that look written to.

        `rest` has "params", weights of inner units by any name, and "inputs", the arrays that precision may cast. What
        else is read may be closed over.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What a model calls back while it runs.

    Attributes:
      units: the units besides the root that own leaves, by name.
      call: `call(unit, run, shards, rest) -> run(gathered, rest)`.
      is_open: whether a unit's call is running, so that its weights are gathered.
      cast_inputs, cast_outputs: what precision does to a floating array at the model's own `__call__`.
    """

    units: Mapping[str, UnitInfo]
    call: Callable[[str, UnitRun, Arrays, dict[str, Any]], tuple[Any, Any]]
    is_open: Callable[[str], bool]
    cast_inputs: Callable[[Any], Any]
    cast_outputs: Callable[[Any], Any]

    def owners(self) -> dict[str, str]:
        """Return the unit of every parameter that belongs to one."""
        return {leaf: name for name, unit in self.units.items() for leaf in unit.leaves}


class FlaxModel(Protocol):
    """A Flax model seen from outside.

    Attributes:
      params, state: shapes and dtypes of the parameters, and of everything else that lives between steps, by name.
      types: the variable type of each parameter, where the API has such types; else empty.
      dim_names: what sharding metadata calls the dims of a parameter, for those that have it.
      aliases: other names of parameters that the model reaches in several ways, each with its own.
      tree: the tree in which users, and their optimizers, see the parameters.
      modules: all modules, the root first.
      instance: the weights given with the model, in a form of its own; None if `create` makes them.
      adapters, codecs: the low-rank adapters of parameters, and how some are coded, by the parameter's name.
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
        """Return parameters and other state by name: first ones, made inside `jit`, or those of the `instance`."""
        ...

    def run(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], inputs: Any, hooks: Hooks
    ) -> tuple[Any, Arrays, Arrays]:
        """Compute `fn(model, *inputs)` with the user's model bound to arrays.

        Args:
          params: the root unit's parameters gathered, all others as they rest.

        Returns:
          The output, and the parameters and other state afterwards.

        Raises:
          ValueError: if a parameter is read while its unit is not open; if state is created or removed.
        """
        ...

    def plain(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        """Return the user's own model around arrays: an `nnx.Module`, or the variables of a Linen module."""
        ...


class PlainModel(FlaxModel, Protocol):
    """A Flax model as the user wrote it, which adapters may be added to."""

    def named(self, values: Mapping[str, Any]) -> Any:
        """Return the tree in which users see the parameters, around anything by name."""
        ...

    def with_params(self, extra: Mapping[str, jax.ShapeDtypeStruct]) -> PlainModel:
        """Return the model with more parameters, which its own code does not read and its transforms carry along.

        Args:
          extra: by name, each that of a parameter of the model and one more word: `q_proj.kernel.lora_a`.
        """
        ...


@contextlib.contextmanager
def local_rules() -> Iterator[None]:
    """Let the user's logical axis rules state nothing where no axis is left to state: in a `shard_map` over them all.

    Without it a model sees the mesh of that `shard_map`, and Flax states shardings over axes that it must not name.
    """
    is_local = set(jax.sharding.get_abstract_mesh().axis_types) == {AxisType.Manual}
    with linen.logical_axis_rules(() if is_local else linen.get_logical_axis_rules()):
        yield


def not_gathered(path: str, unit: str) -> ValueError:
    """Make the error for a read of a parameter that is not gathered."""
    return ValueError(
        f"{path}: read outside the calls of its unit {unit!r}, where it is not gathered; call module.method(x), not "
        "Class.method(module, x), leave it to the root unit, or make a unit of a module whose methods hold all its uses"
    )


def state_in_transform(unit: str, names: Sequence[str], api: str) -> ValueError:
    """Make the error for a call that changes state where the change cannot leave."""
    return ValueError(
        f"unit {unit!r}: called inside a transform of JAX itself (jax.vmap, lax.scan, ...), and its call changes state "
        f"there, which cannot leave it: {', '.join(names[:4])}; use the transform of Flax ({api}.vmap, {api}.scan, "
        "...), or a mode in which the call changes nothing (deterministic, use_running_average)"
    )


def join_path(path: Iterable[Any]) -> str:
    """Join the keys of a path into a name."""
    return ".".join(map(str, path))


def struct_of(value: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    """Put other leaves into the structure of a pytree."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
