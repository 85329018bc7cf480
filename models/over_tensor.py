"""Splitting what a model computes over mesh axis `tensor`, where the program has one."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

AXIS = "tensor"


def _size() -> int:
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def over_tensor(x: jax.Array, dim: int) -> jax.Array:
    """State that `dim` is split over axis `tensor`, and leave all other dims to the compiler.

    Layout:  [.. D ..] -> [.. D/tensor ..]; as it is where the mesh in context lacks the axis, or has it in size 1.

    Raises:
      ValueError: if the axis does not divide the dim.
    """
    size = _size()
    if size == 1:
        return x
    if x.shape[dim] % size:
        raise ValueError(
            f"dim {dim} (size {x.shape[dim]}) of a value cannot be split over mesh axis {AXIS!r} (size {size}); take a "
            "size that divides it"
        )
    entries = [AXIS if place == dim % x.ndim else PartitionSpec.UNCONSTRAINED for place in range(x.ndim)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def by_heads(attend: Callable[..., jax.Array], *heads: jax.Array, documents: Any) -> jax.Array:
    """Compute `attend(*heads, documents)` on each device's own heads.

    Inside a `shard_map` over the other axes of a mesh JAX (0.10.2, 0.12) cannot partition cuDNN's attention: so axis
    `tensor` is written out there too. Elsewhere the compiler partitions it.

    Layout:  several of [B T H/tensor A], and arrays that all heads share -> [B T H/tensor A]
    """
    mesh = jax.sharding.get_abstract_mesh()
    if _size() == 1 or AxisType.Manual not in mesh.axis_types:
        return attend(*heads, documents)
    spec = PartitionSpec(None, None, AXIS)
    specs = (*[spec] * len(heads), None if documents is None else PartitionSpec())
    run = jax.shard_map(attend, in_specs=specs, out_specs=spec, axis_names={AXIS}, check_vma=False)
    return run(*heads, documents)
