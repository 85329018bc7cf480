"""The arrays of a training state under logical names, and where each device's block of them lies.

[Note: what a checkpoint holds]
Arrays are stored by logical name: `params.<name>`, `opt_state.<path>`, `model_state.<name>`, `step`, `num_skipped`,
`loss_scale.<name>`, in their logical shape. No strategy, mesh, engine or storage form is part of a name or a shape:
padding is left out, and a buffer of flat storage is written as the leaves in it, each from the very block that a device
holds. The low-precision copy of strategies that keep one is not written: it is the cast of the master.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.checkpoint.source import Index
from jfsdp.layout.flat import Buffer, View
from jfsdp.layout.layout import Layout
from jfsdp.layout.precision import is_key
from jfsdp.train.state import TrainState
from jfsdp.train.update.roles import dotted


@dataclasses.dataclass(frozen=True)
class Logical:
    """A logical array: what a checkpoint says of it. `key_impl` is the rng implementation if it is the data of keys."""

    shape: tuple[int, ...]
    dtype: Any
    key_impl: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": jnp.dtype(self.dtype).name, "key_impl": self.key_impl}


@dataclasses.dataclass(frozen=True)
class Part:
    """What one block of a stored array holds of a logical one.

    Attributes:
      index: which part of the logical array; padding is outside of it.
      of: returns that part of a block, as a view that can be written.
    """

    name: str
    index: Index
    of: Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array of a state as it stands at rest (keys as their data), or its shape.

    Attributes:
      logical: by name, the logical arrays that it holds.
      blocks: by name, the largest part of each that one device's block holds.
      parts: `f(index)` -> the parts of a block, given by its index in the stored array.
    """

    value: Any
    logical: Mapping[str, Logical]
    blocks: Mapping[str, tuple[int, ...]]
    parts: Callable[[tuple[slice, ...]], list[Part]]


def contents(state: TrainState) -> list[Stored]:
    """List the arrays of a state, or of its shapes, in the order of its tree. Moves no data between devices."""
    buffers = {buffer.path: buffer for buffer in state.layout.packed if isinstance(buffer, Buffer)}
    shapes = {role.name: role.shape for role in state.roles.arrays}
    shapes |= {f"params.{leaf.path}": leaf.shape for leaf in state.layout.leaves}
    found, roles = [], iter(state.roles.arrays)
    for path, value in jax.tree_util.tree_leaves_with_path(_trees(state)):
        data, impl = _key_data(value)
        part, last = path[0].key, getattr(path[-1], "key", None)
        if part == "params" and last in buffers:
            found.append(_many(state.layout, buffers[last], data))
        else:
            name = next(roles).name if part == "opt_state" else dotted(path)
            shape = tuple(data.shape) if impl else shapes.get(name, tuple(data.shape))
            found.append(_one(name, data, Logical(shape, data.dtype, impl)))
    return found


def logical_arrays(state: TrainState) -> dict[str, Logical]:
    """Return name, logical shape and dtype of every array of a state, or of its shapes."""
    return {name: array for stored in contents(state) for name, array in stored.logical.items()}


def rebuild(like: TrainState, arrays: list[jax.Array]) -> TrainState:
    """Build a state out of its arrays, in the order of `contents`. The low-precision copy is left empty."""
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


def _one(name: str, data: Any, logical: Logical) -> Stored:
    """Describe a stored array that is one logical array, with padding at the end of one dim."""

    def parts(index: tuple[slice, ...]) -> list[Part]:
        inside = _cut(_bounds(index, data.shape), logical.shape)
        sizes = tuple(slice(0, part.stop - part.start) for part in inside)
        return [Part(name, inside, lambda block: block[(*sizes, ...)])]

    return Stored(
        data, {name: logical}, {name: _smaller(data.sharding.shard_shape(tuple(data.shape)), logical.shape)}, parts
    )


def one_array(name: str, logical: Any, stored: Any) -> Stored:
    """Describe one array that stands alone: its logical shape and dtype, and its stored shape and sharding."""
    return _one(name, stored, Logical(tuple(logical.shape), logical.dtype))


def _many(layout: Layout, buffer: Buffer, data: Any) -> Stored:
    """Describe a buffer of flat storage: the parameters in it."""
    names = {view.path: f"params.{view.path}" for view in buffer.views}
    logical = {names[view.path]: Logical(layout.by_path[view.path].shape, data.dtype) for view in buffer.views}
    lead = data.shape[: buffer.stacked]

    def parts(index: tuple[slice, ...]) -> list[Part]:
        *_, flat = bounds = _bounds(index, data.shape)
        own = bounds[buffer.stacked] if buffer.cuts else slice(0, 1)
        chunks = range(flat.start // max(buffer.chunk, 1), -(-flat.stop // max(buffer.chunk, 1)))
        return [
            _view_part(buffer, view, names[view.path], logical[names[view.path]].shape, (part, chunk), (own, flat))
            for part in range(own.start, own.stop)
            for chunk in chunks
            for view in buffer.views
        ]

    blocks = {
        names[view.path]: _smaller((*lead, *view.shape), logical[names[view.path]].shape) for view in buffer.views
    }
    return Stored(data, logical, blocks, parts)


def _view_part(
    buffer: Buffer,
    view: View,
    name: str,
    shape: tuple[int, ...],
    at: tuple[int, int],
    block_index: tuple[slice, slice],
) -> Part:
    """Return what one chunk of one part of a buffer, `at`, holds of a leaf, in a block of those parts and elements."""
    lead, (part, chunk) = shape[: buffer.stacked], at
    own, flat = block_index
    begin = chunk * buffer.chunk + view.start - flat.start
    pieces = [0] * len(view.shape)
    if view.dim is not None:
        pieces[view.dim] = chunk
    if view.cut is not None:
        pieces[view.cut] += part * (buffer.shape[-1] // buffer.chunk if view.cut == view.dim else 1)
    index = [slice(piece * size, (piece + 1) * size) for piece, size in zip(pieces, view.shape, strict=True)]
    inside = _cut((*(slice(0, size) for size in lead), *index), shape)
    sizes = tuple(slice(0, part.stop - part.start) for part in inside)

    def of(block: np.ndarray) -> np.ndarray:
        block = block[..., part - own.start, :] if buffer.cuts else block
        return block[..., begin : begin + view.size].reshape((*lead, *view.shape))[(*sizes, ...)]

    return Part(name, inside, of)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def _cut(index: Index, shape: tuple[int, ...]) -> Index:
    return tuple(slice(min(part.start, size), min(part.stop, size)) for part, size in zip(index, shape, strict=True))


def _smaller(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(min, one, other))


def choose_writers(arrays: list[Stored], devices: Collection[Any] | None = None) -> list[list[Any]]:
    """Choose a writer for each block of each array among these devices, or among all; return the writers by array.

    The device with the least to write so far is chosen, the largest arrays first, so that replicas share the work.
    Every process comes to the same answer.
    """
    load = collections.Counter[Any]()
    found: list[list[Any]] = [[] for _ in arrays]
    for place in sorted(range(len(arrays)), key=lambda place: -block_bytes(arrays[place])):
        copies: dict[tuple[Any, ...], list[Any]] = {}
        value = arrays[place].value
        for device, index in value.sharding.devices_indices_map(tuple(value.shape)).items():
            if devices is None or device in devices:
                copies.setdefault(tuple((part.start, part.stop) for part in index), []).append(device)
        for holders in copies.values():
            writer = min(holders, key=load.__getitem__)
            load[writer] += block_bytes(arrays[place])
            found[place].append(writer)
    return found


def block_bytes(stored: Stored) -> int:
    """Return the bytes of what one device holds of an array."""
    return math.prod(stored.value.sharding.shard_shape(tuple(stored.value.shape))) * stored.value.dtype.itemsize
