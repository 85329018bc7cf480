"""Movements inside a `shard_map` over the data axes: collectives are written out, and some are left for later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jfsdp.engine.engine import Engine, Pairs
from jfsdp.engine.unit import Arrays
from jfsdp.layout.precision import is_float
from jfsdp.layout.table import Leaf


@dataclasses.dataclass(frozen=True)
class LocalEngine(Engine):
    """Gathers and reduces what is this device's own; leaves are shards of their stored shape.

    Attributes:
      deferred: the data axes over which the caller sums gradients later.
    """

    deferred: tuple[str, ...] = ()

    def on_each_device(self, local: Callable[..., Any], own: tuple[str, ...], out_specs: Any, arrays: Any) -> Any:
        """Run a function on each device, with its part of the weights and its rows of the batch. Moves no data itself.

        Args:
          own: the mesh axes that are left to XLA and to what the model states.
          arrays: what `local` takes: weights at rest, the model's state, a batch, and what else is whole.
        """
        layout, whole = self.layout, PartitionSpec()
        leaves = map(layout.by_path.__getitem__, arrays[0])
        at_rest = {leaf.path: layout.on_device(self.mesh, leaf, leaf.source).spec for leaf in leaves}
        split = PartitionSpec(layout.axes_on(self.mesh, layout.data_axes))
        rows = jax.tree.map(lambda x: split if x.ndim else whole, arrays[2])
        specs: Any = {"in_specs": (at_rest, whole, rows, *[whole] * len(arrays[3:])), "out_specs": out_specs}
        axes = {axis for axis in self.mesh.axis_names if axis not in own}
        return jax.shard_map(local, mesh=self.mesh, axis_names=axes, check_vma=False, **specs)(*arrays)

    def gather(self, pairs: Pairs, shards: Arrays) -> Arrays:
        """All-gather leaves along their split dim.

        Layout:  [D/axes F] -> [D F]
        Cost:    one all-gather each; (N-1)/N of its bytes received per device.
        """
        # What is computed from the gathered weights must not be moved before the gather of another unit.
        here = jax.lax.optimization_barrier(shards)
        return {leaf.path: self._all_gather(here[leaf.path], leaf, leaf.source, gone) for leaf, gone in pairs}

    def keep(self, pairs: Pairs, whole: Arrays) -> Arrays:
        """Cut whole leaves to what is kept of them. Moves no data between devices."""
        kept = {}
        for leaf, gone in pairs:
            axes = self._names(leaf, "kept")
            value = whole[leaf.path]
            if axes:
                size = value.shape[_dim(leaf, gone)] // jax.lax.axis_size(axes)
                start = jax.lax.axis_index(axes) * size
                value = jax.lax.dynamic_slice_in_dim(value, start, size, axis=_dim(leaf, gone))
            kept[leaf.path] = value
        return kept

    def regather(self, pairs: Pairs, kept: Arrays) -> Arrays:
        """All-gather leaves from what was kept of them."""
        return {leaf.path: self._all_gather(kept[leaf.path], leaf, "kept", gone) for leaf, gone in pairs}

    def reduce(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum gradients over the axes that split their source, into its layout.

        A derivative has the shape of its value: over all other axes `accumulate` sums.

        Layout:  [D F]{unreduced data} -> [D/axes F]{unreduced other axes}
        Cost:    one reduce-scatter each.
        """
        reduced = {}
        for leaf, gone in pairs:
            split = leaf.stage(leaf.source).axes
            reduced[leaf.path] = self.sum_over(grads[leaf.path], split, split, _dim(leaf, gone) if split else None)
        return reduced

    def accumulate(self, leaf: Leaf, grad: jax.Array) -> jax.Array:
        """Sum what `reduce` left over the axes that are not deferred, into the layout of the accumulator.

        Layout:  [D F]{unreduced data} -> [D/axes F]{unreduced deferred}
        Cost:    one reduce-scatter or all-reduce, in `reduce_dtype`.
        """
        done = leaf.stage(leaf.source).axes
        further = tuple(axis for axis in self.accumulator_axes(leaf) if axis not in done)
        rest = tuple(axis for axis in self._now if axis not in done)
        if not rest:
            return grad
        return self.sum_over(grad.astype(self.layout.reduce_dtype(leaf)), rest, further, leaf.dim)

    def accumulator_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Return the axes that split a leaf's accumulator until the deferred ones are summed over."""
        return tuple(axis for axis in leaf.stage("grad").axes if axis not in self.deferred)

    @property
    def _now(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.layout.data_axes if axis not in self.deferred)

    def sum_over(self, grad: jax.Array, axes: tuple[str, ...], split: tuple[str, ...], dim: int | None) -> jax.Array:
        """Sum over mesh axes: by a reduce-scatter along `dim` over those of `split`, by an all-reduce over the others.

        Raises:
          AssertionError: if `split` is not among `axes`.
        """
        assert set(split) <= set(axes), f"{split} of {axes}"
        dtype, grad = grad.dtype, _widened(grad, self.mesh)
        if split:
            scatter = self.layout.axes_on(self.mesh, split)
            grad = jax.lax.psum_scatter(grad, scatter, scatter_dimension=dim or 0, tiled=True)
        rest = self.layout.axes_on(self.mesh, [axis for axis in axes if axis not in split])
        return (jax.lax.psum(grad, rest) if rest else grad).astype(dtype)

    def constrain(self, values: Arrays, stage: str) -> Arrays:
        """Leave values as they are: inside a `shard_map` a layout is a fact. Moves no data."""
        del stage
        return values

    def _all_gather(self, value: jax.Array, leaf: Leaf, stage: str, gone: int) -> jax.Array:
        axes = self._names(leaf, stage)
        return jax.lax.all_gather(value, axes, axis=_dim(leaf, gone), tiled=True) if axes else value

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


def _dim(leaf: Leaf, gone: int) -> int:
    assert leaf.dim is not None, leaf.path
    return leaf.dim - gone
