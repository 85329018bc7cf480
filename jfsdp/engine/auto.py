"""The auto engine's movements: layouts are stated and XLA inserts the collectives.

[Note: low precision on the wire]
The *sharded* layout of the cast value is stated first, then a barrier, then the whole one. Without both, XLA gathers
41 % of the bytes of Llama-3-8B in the master's float32 and casts afterwards. Under the derivative of `engine/unit.py`
either one of the two was enough on JAX 0.10.2 and 0.12.0; neither is a documented behaviour, so both stand.
docs/log.md has the counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jfsdp.engine.unit import Arrays, Movement, call_unit
from jfsdp.layout.precision import is_float
from jfsdp.layout.table import Layout, Leaf


@dataclasses.dataclass(frozen=True)
class AutoEngine:
    """Gathers and reduces by stating layouts on a mesh with `Auto` axes."""

    layout: Layout
    mesh: Mesh

    def call_unit(self, name: str, run: Any, shards: Arrays, rest: Any) -> Any:
        """Run one unit on its gathered weights; `rest["inputs"]` are the inputs that precision may cast.

        Layout:  weights [D/axes F] -> [D F] -> freed; gradients [D F]{unreduced} -> [D/axes F].
        Dtype:   weights are gathered in the unit's `param_dtype` and their gradients reduced in it.
        Cost, Memory: as `jfsdp.engine.unit.call_unit`.

        Raises:
          ValueError: if a leaf arrives without a dim that the layout splits (an undeclared stack of layers).
        """
        unit, policy = self.layout.unit(name), self.layout.policy(name)
        leaves = [self.layout.by_path[path] for path in unit.leaves]
        sliced = [_num_sliced(leaf, shards[leaf.path].ndim) for leaf in leaves]
        if policy.mp_policy.cast_forward_inputs:
            rest = {**rest, "inputs": cast_floating(rest["inputs"], policy.mp_policy.param_dtype)}
        movement = Movement(
            gather=lambda shards: self._gather(leaves, sliced, shards),
            reduce=lambda grads: self._reduce(leaves, sliced, grads),
            reshard=policy.reshard_after_forward,
            remat=policy.remat,
        )
        return call_unit(run, shards, rest, self.full_shapes(name, shards), movement)

    def full_shapes(self, name: str, shards: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of a unit's weights once they are gathered. Moves no data."""
        leaves = [self.layout.by_path[path] for path in self.layout.unit(name).leaves]
        return {
            leaf.path: jax.ShapeDtypeStruct(
                leaf.shape[_num_sliced(leaf, shards[leaf.path].ndim) :], leaf.stage("use").dtype
            )
            for leaf in leaves
        }

    def _gather(self, leaves: Sequence[Leaf], sliced: Sequence[int], shards: Arrays) -> Arrays:
        """All-gather a unit's weights in their dtype in use; see [Note: low precision on the wire]."""
        pairs = list(zip(leaves, sliced, strict=True))
        cast = {leaf.path: shards[leaf.path].astype(leaf.stage("use").dtype) for leaf in leaves}
        split = [(leaf, gone) for leaf, gone in pairs if leaf.stage(leaf.source).axes]
        at_rest = {leaf.path: self._constrain(cast[leaf.path], leaf, leaf.source, gone) for leaf, gone in split}
        at_rest = jax.lax.optimization_barrier(at_rest)
        full = cast | {leaf.path: self._constrain(at_rest[leaf.path], leaf, "use", gone) for leaf, gone in split}
        return {leaf.path: _unpad(full[leaf.path], leaf, gone) for leaf, gone in pairs}

    def _reduce(self, leaves: Sequence[Leaf], sliced: Sequence[int], grads: Arrays) -> Arrays:
        """Sum gradients over the data axes into the layout of their accumulator, in the dtype of the stored weight.

        For matrices the whole layout is stated first, else XLA may move activations instead of gradients (it turned the
        scatter-add of an embedding's gradient into an all-to-all). Vectors go without: a norm's scale is summed in
        float32 and then cast, and between two statements that cast would keep the all-reduce from becoming a
        reduce-scatter.
        """
        reduced = {}
        for leaf, gone in zip(leaves, sliced, strict=True):
            grad = _pad(grads[leaf.path], leaf, gone)
            if grad.ndim > 1:
                grad = self._constrain(grad, leaf, "use", gone)
            grad = self._constrain(grad, leaf, "grad", gone)
            reduced[leaf.path] = grad.astype(leaf.stage(leaf.source).dtype)
        return reduced

    def _constrain(self, value: jax.Array, leaf: Leaf, stage: str, sliced: int) -> jax.Array:
        sharding = self.layout.sharding(self.mesh, leaf, stage, sliced=sliced)
        return jax.lax.with_sharding_constraint(value, sharding)

    def constrain(self, values: Arrays, stage: str) -> Arrays:
        """State the layout of leaves as they are stored: `stage` of each. XLA inserts what it takes to get there."""
        return {path: self._constrain(value, self.layout.by_path[path], stage, 0) for path, value in values.items()}


def cast_floating(values: Any, dtype: str | None) -> Any:
    """Cast the floating arrays of a pytree; None casts nothing. Moves no data between devices."""
    if dtype is None:
        return values
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(jnp.result_type(x)) else x, values)


def _num_sliced(leaf: Leaf, ndim: int) -> int:
    """Return how many leading dims a scan has taken off; they must be layer dims of the layout."""
    gone = len(leaf.shape) - ndim
    if leaf.dim is not None and gone > leaf.dim:
        raise ValueError(
            f"{leaf.path}: dim {leaf.dim} (size {leaf.shape[leaf.dim]}) is split over the mesh, but unit "
            f"{leaf.unit!r} is "
            f"called inside a scan over it; declare the layer dim: units=[jfsdp.Unit(..., stacked={gone})]"
        )
    return gone


def _unpad(value: jax.Array, leaf: Leaf, sliced: int) -> jax.Array:
    if not leaf.padding or leaf.dim is None:
        return value
    return jax.lax.slice_in_dim(value, 0, leaf.shape[leaf.dim], axis=leaf.dim - sliced)


def _pad(value: jax.Array, leaf: Leaf, sliced: int) -> jax.Array:
    if not leaf.padding or leaf.dim is None:
        return value
    widths = [(0, leaf.padding if dim == leaf.dim - sliced else 0) for dim in range(value.ndim)]
    return jnp.pad(value, widths)


def pad_leaf(value: jax.Array, leaf: Leaf) -> jax.Array:
    """Bring a leaf of logical shape into its stored shape; the padding is zeros. Moves no data between devices."""
    return _pad(value, leaf, 0)
