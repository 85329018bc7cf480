"""The arrays of a training state under logical names, and each device's block of them.

[Note: contents of a checkpoint]
Arrays are stored in their logical shape under logical names: `params.<name>`, `opt_state.<path>`,
`model_state.<name>`, `step`, `num_skipped`, `loss_scale.<name>`. Names and shapes do not depend on strategy, mesh,
program or storage form; padding is left out. The low-precision copy of some strategies is not written, since it is a
cast of the master.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.checkpoint.source import Index
from jfsdp.layout.precision import is_key
from jfsdp.train.state import TrainState, array_bytes
from jfsdp.train.update.roles import dotted


@dataclasses.dataclass(frozen=True)
class Logical:
    """Shape and dtype of a logical array. `key_impl` is the rng implementation if it is the data of random keys."""

    shape: tuple[int, ...]
    dtype: Any
    key_impl: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": jnp.dtype(self.dtype).name, "key_impl": self.key_impl}


def read_shapes(arrays: Mapping[str, Mapping[str, Any]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes by name, of what `Logical.to_dict` gave."""
    return {name: jax.ShapeDtypeStruct(tuple(x["shape"]), jnp.dtype(x["dtype"])) for name, x in arrays.items()}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A logical array in the form in which a state stores it: keys as their data, padded at the end of a dim.

    Attributes:
      value: the array, or its shape.
    """

    name: str
    logical: Logical
    value: Any

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of the largest part of the logical array in one device's block."""
        return tuple(map(min, self.value.sharding.shard_shape(tuple(self.value.shape)), self.logical.shape))

    def inside(self, index: Index) -> Index:
        """Return the part of the logical array in a block, from the block's index in the stored array."""
        bounds = (part.indices(size)[:2] for part, size in zip(index, self.value.shape, strict=True))
        pairs = zip(bounds, self.logical.shape, strict=True)
        return tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in pairs)


def without_padding(block: np.ndarray, inside: Index) -> np.ndarray:
    """Return a writable view of a block without its padding."""
    return block[(*(slice(0, part.stop - part.start) for part in inside), ...)]


def contents(state: TrainState) -> list[Stored]:
    """List the arrays of a state, or of its shapes, in the order of its tree. Moves no data between devices."""
    shapes = {role.name: role.shape for role in state.roles.arrays}
    shapes |= {f"params.{leaf.path}": leaf.shape for leaf in state.layout.leaves}
    found, roles = [], iter(state.roles.arrays)
    for path, value in jax.tree_util.tree_leaves_with_path(_trees(state)):
        data, impl = _key_data(value)
        name = next(roles).name if path[0].key == "opt_state" else dotted(path)
        shape = tuple(data.shape) if impl else shapes.get(name, tuple(data.shape))
        found.append(Stored(name, Logical(shape, data.dtype, impl), data))
    return found


def logical_arrays(state: TrainState) -> dict[str, Logical]:
    """Return name, logical shape and dtype of every array of a state or of its shapes."""
    return {stored.name: stored.logical for stored in contents(state)}


def rebuild(like: TrainState, arrays: list[jax.Array]) -> TrainState:
    """Build a state from its arrays, in the order of `contents`. The low-precision copy is left empty."""
    values, tree = jax.tree.flatten(_trees(like))
    new = [
        jax.random.wrap_key_data(array, impl=_key_data(value)[1]) if is_key(value) else array
        for value, array in zip(values, arrays, strict=True)
    ]
    return TrainState(**jax.tree.unflatten(tree, new), work={}, layout=like.layout, roles=like.roles)


def _trees(state: TrainState) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(state) if field.name not in ("work", "layout", "roles")]
    return {name: getattr(state, name) for name in fields}


def _key_data(value: Any) -> tuple[Any, str | None]:
    if not is_key(value):
        return value, None
    if isinstance(value, jax.Array):
        return jax.random.key_data(value), str(jax.random.key_impl(value))
    impls: list[Any] = []
    data = jax.eval_shape(lambda key: (impls.append(jax.random.key_impl(key)), jax.random.key_data(key))[1], value)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=value.sharding), str(impls[0])


def single_array(name: str, logical: Any, stored: Any) -> Stored:
    """Return a `Stored` for an array that is not part of a state."""
    return Stored(name, Logical(tuple(logical.shape), logical.dtype), stored)


def choose_writers(arrays: list[Stored], devices: Collection[Any] | None = None) -> list[list[Any]]:
    """Choose a writer for each block of each array among these devices (default: all). Return the writers by array.

    Goes through the arrays from the largest, and chooses the device with the fewest bytes so far, so that replicas
    share the work. Every process gets the same result.
    """
    load = collections.Counter[Any]()
    found: list[list[Any]] = [[] for _ in arrays]
    for place in sorted(range(len(arrays)), key=lambda place: -array_bytes(arrays[place].value)):
        copies: dict[tuple[Any, ...], list[Any]] = {}
        value = arrays[place].value
        for device, index in value.sharding.devices_indices_map(tuple(value.shape)).items():
            if devices is None or device in devices:
                copies.setdefault(tuple((part.start, part.stop) for part in index), []).append(device)
        for holders in copies.values():
            writer = min(holders, key=load.__getitem__)
            load[writer] += array_bytes(value)
            found[place].append(writer)
    return found
