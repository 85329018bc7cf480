"""Movements inside a `shard_map` over the data axes: the list of movements as collectives of our own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jfsdp.engine.engine import Engine, Pairs, T, is_key, pad_all, to_device
from jfsdp.engine.movements import (
    BACKWARD,
    CALL,
    FORWARD,
    GATHER,
    LAST,
    REDUCE,
    SCATTER,
    Move,
    accumulator_axes,
    last_axes,
    of_leaf,
)
from jfsdp.engine.unit import Arrays
from jfsdp.layout.precision import is_float
from jfsdp.layout.table import Leaf


@dataclasses.dataclass(frozen=True)
class LocalEngine(Engine):
    """Gathers and reduces what is this device's own; leaves are shards of their stored shape.

    Attributes:
      deferred: the data axes over which gradients are summed after the last microbatch.
      own: the mesh axes that are left to XLA and to what the model states.
    """

    writes_order = True

    deferred: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    @functools.cached_property
    def _moves(self) -> Mapping[tuple[str, str], Sequence[Move]]:
        found: dict[tuple[str, str], list[Move]] = {}
        for leaf in self.layout.by_path.values():
            for move in of_leaf(self.layout, leaf, self.deferred):
                found.setdefault((leaf.path, move.when), []).append(move)
        return found

    def _move(self, when: str, leaf: Leaf, gone: int, value: jax.Array) -> jax.Array:
        """Do what the list says of a leaf."""
        for move in self._moves.get((leaf.path, when), ()):
            axes = self._names(leaf, move.stage) if move.kind == GATHER else self.layout.axes_on(self.mesh, move.axes)
            value = self._collect(move.kind, value.astype(move.dtype), axes, leaf.dim, gone)
        return value

    def _collect(self, kind: str, value: jax.Array, axes: tuple[str, ...], dim: int | None, gone: int) -> jax.Array:
        if kind == GATHER:
            assert dim is not None
            if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
                # Else XLA splits over `tensor` what the gather takes, and must put it together again before.
                value = jax.lax.with_sharding_constraint(value, PartitionSpec(*[None] * value.ndim))
            return jax.lax.all_gather(value, axes, axis=dim - gone, tiled=True)
        dtype, value = value.dtype, _widened(value, self.mesh)
        if kind == SCATTER:
            assert dim is not None
            return jax.lax.psum_scatter(value, axes, scatter_dimension=dim - gone, tiled=True).astype(dtype)
        assert kind == REDUCE, kind
        return jax.lax.psum(value, axes).astype(dtype)

    def on_rows(self, compute: Callable[..., T], arrays: Any, specs: T) -> T:
        """Run on each device by itself, with its part of the weights and its rows of the batch."""
        layout, whole = self.layout, PartitionSpec()
        leaves = map(layout.by_path.__getitem__, arrays[0])
        at_rest = {leaf.path: layout.on_device(self.mesh, leaf, leaf.source).spec for leaf in leaves}
        rows = jax.tree.map(lambda x: PartitionSpec(self._data) if x.ndim else whole, arrays[2])
        given: Any = {"in_specs": (at_rest, whole, rows, *[whole] * len(arrays[3:])), "out_specs": specs}
        axes = {axis for axis in self.mesh.axis_names if axis not in self.own}
        return jax.shard_map(compute, mesh=self.mesh, axis_names=axes, check_vma=False, **given)(*arrays)

    @property
    def _data(self) -> tuple[str, ...]:
        return self.layout.axes_on(self.mesh, self.layout.data_axes)

    def sum_rows(self, value: jax.Array) -> jax.Array:
        """Sum a scalar over devices."""
        return jax.lax.psum(value, self._data)

    def max_rows(self, value: jax.Array) -> jax.Array:
        """Return the maximum of a scalar over devices."""
        return jax.lax.pmax(value, self._data)

    def own_state(self, state: Arrays) -> Arrays:
        """Return a state whose keys are folded with this device's place along the data axes."""
        index = jax.lax.axis_index(self._data)

        def fold(keys: jax.Array) -> jax.Array:
            return jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), index).reshape(keys.shape)

        return {name: fold(value) if is_key(value) else value for name, value in state.items()}

    def common_state(self, before: Arrays, after: Arrays) -> Arrays:
        """Return what is the same on all devices: the state afterwards, with the keys as they were."""
        return {name: before[name] if is_key(value) else value for name, value in after.items()}

    def sum_shape(self, path: str) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of this device's part of an accumulator."""
        leaf, whole = self.layout.by_path[path], super().sum_shape(path)
        parts = self.layout.num_shards(accumulator_axes(leaf, self.deferred))
        shape = [size // parts if dim == leaf.dim else size for dim, size in enumerate(whole.shape)]
        return jax.ShapeDtypeStruct(shape, whole.dtype)

    def finished_spec(self, path: str) -> PartitionSpec:
        """Return how a gradient stands after `finish`: split further where the last sum is scattered."""
        leaf = self.layout.by_path[path]
        split = (*accumulator_axes(leaf, self.deferred), *last_axes(leaf, self.deferred))
        axes = self.layout.axes_on(self.mesh, split)
        return PartitionSpec(*[axes if dim == leaf.dim and axes else None for dim in range(len(leaf.shape))])

    def finish(self, grads: Arrays, weight: jax.Array | None) -> Arrays:
        """Sum accumulators over the deferred axes, in the unit's `reduce_dtype`."""

        def last(leaf: Leaf, grad: jax.Array) -> jax.Array:
            grad = to_device(grad) if weight is None else to_device(grad) / weight
            summed = self._move(LAST, leaf, 0, grad).astype(leaf.stage("grad").dtype)
            return summed if weight is None else summed * weight

        return {path: last(self.layout.by_path[path], grad) for path, grad in grads.items()}

    def gather(self, pairs: Pairs, shards: Arrays) -> Arrays:
        """All-gather leaves along their split dim.

        Layout:  [D/axes F] -> [D F]
        Cost:    one all-gather each; (N-1)/N of its bytes received per device.
        """
        # What is computed from the gathered weights must not be moved before the gather of another unit.
        here = jax.lax.optimization_barrier(shards)
        return {leaf.path: self._move(FORWARD, leaf, gone, here[leaf.path]) for leaf, gone in pairs}

    def keep(self, pairs: Pairs, whole: Arrays) -> Arrays:
        """Cut whole leaves to what is kept of them. Moves no data between devices."""
        kept = {}
        for leaf, gone in pairs:
            axes = self._names(leaf, "kept")
            value = whole[leaf.path]
            if axes:
                assert leaf.dim is not None
                size = value.shape[leaf.dim - gone] // jax.lax.axis_size(axes)
                start = jax.lax.axis_index(axes) * size
                value = jax.lax.dynamic_slice_in_dim(value, start, size, axis=leaf.dim - gone)
            kept[leaf.path] = value
        return kept

    def regather(self, pairs: Pairs, kept: Arrays) -> Arrays:
        """All-gather leaves from what was kept of them."""
        return {leaf.path: self._move(BACKWARD, leaf, gone, kept[leaf.path]) for leaf, gone in pairs}

    def reduce_whole(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum whole gradients, of logical shape, over the axes that are not deferred.

        Layout:  [D F]{unreduced data} -> [D/axes F]{unreduced deferred}, that of their accumulator
        Dtype:   summed in `reduce_dtype`, returned in the accumulator's.
        Cost:    one reduce-scatter each; an all-reduce over the axes that split nothing.
        """
        padded = pad_all(pairs, grads)
        return {
            leaf.path: self._move(CALL, leaf, gone, padded[leaf.path]).astype(leaf.stage("grad").dtype)
            for leaf, gone in pairs
        }

    def constrain(self, values: Arrays, stage: str) -> Arrays:
        """Leave values as they are: inside a `shard_map` a layout is a fact."""
        del stage
        return values

    def reduce(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum gradients over the axes that split their source, into its layout, where no schedule reaches a call.

        A derivative has the shape of its value: over all other axes `finish_in_place` sums.

        Layout:  [D F]{unreduced data} -> [D/axes F]{unreduced other axes}
        Cost:    one reduce-scatter each.
        """
        reduced = {}
        for leaf, gone in pairs:
            grad, axes = grads[leaf.path].astype(self.layout.reduce_dtype(leaf)), self._names(leaf, leaf.source)
            reduced[leaf.path] = self._collect(SCATTER, grad, axes, leaf.dim, gone) if axes else grad
        return reduced

    def finish_in_place(self, path: str, grad: jax.Array) -> jax.Array:
        """Bring a gradient from what a unit's own derivative gives to what its accumulator adds."""
        leaf = self.layout.by_path[path]
        done, held = leaf.stage(leaf.source).axes, accumulator_axes(leaf, self.deferred)
        grad = to_device(grad).astype(self.layout.reduce_dtype(leaf))
        further = self.layout.axes_on(self.mesh, [axis for axis in held if axis not in done])
        if further:
            grad = self._collect(SCATTER, grad, further, leaf.dim, 0)
        rest = [axis for axis in self.layout.data_axes if axis not in (*self.deferred, *done, *held)]
        if rest:
            grad = self._collect(REDUCE, grad, self.layout.axes_on(self.mesh, rest), leaf.dim, 0)
        grad = grad.astype(leaf.stage("grad").dtype)
        if set(done) <= set(held):
            return grad
        # The accumulator is whole until the last microbatch: what is summed already stands in one device's part of it.
        assert leaf.dim is not None, path
        start = jax.lax.axis_index(self._names(leaf, leaf.source)) * grad.shape[leaf.dim]
        return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(leaf.stored_shape, grad.dtype), grad, start, leaf.dim)

    def _names(self, leaf: Leaf, stage: str) -> tuple[str, ...]:
        """Return the axes of the mesh that split a stage."""
        if leaf.dim is None:
            return ()
        entry = self.layout.on_device(self.mesh, leaf, stage).spec[leaf.dim]
        return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _widened(grad: jax.Array, mesh: Mesh) -> jax.Array:
    """Cast what XLA:CPU would otherwise abort on; it sums 16 bits in float32 itself, so no bit differs.

    In a `shard_map` that leaves an axis to XLA the sum's own computation ends in a copy, which the pass that widens it
    (all-reduce-promotion; JAX 0.10.2, 0.12) cannot read: "Invalid binary instruction opcode copy".
    """
    is_part = AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types
    is_cpu = not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "cpu"
    return grad.astype(jnp.float32) if is_part and is_cpu and is_float(grad.dtype) and grad.itemsize < 4 else grad
