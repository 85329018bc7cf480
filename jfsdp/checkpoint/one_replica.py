"""Sending blocks from the first replica to the others, for file systems that are slower than the network."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def is_first_replica(sharding: Any, device: Any) -> bool:
    """Return whether a device is the first of the devices with the same block."""
    mesh = sharding.mesh
    place = np.argwhere(mesh.devices == device)[0]
    names = _repeated_over(sharding)
    return all(at == 0 for name, at in zip(mesh.axis_names, place, strict=True) if name in names)


def from_first_replica(array: jax.Array) -> jax.Array:
    """Copy the block of the first replica to the others, whose blocks must be zeros.

    Layout:  [D/axes F] in the first replica, zeros elsewhere -> [D/axes F].
    Cost:    an all-reduce of each block over the axes on which the array is replicated.
    Memory:  one more copy of the array, until the old one is dropped.
    Dtype:   bits are summed as integers, so every value arrives bit by bit.
    """
    sharding: Any = array.sharding
    axes = _repeated_over(sharding)
    if not axes:
        return array
    on_devices = sharding.with_memory_kind(None)  # offloaded arrays cannot be summed in host memory
    total = summing(sharding.mesh, sharding.spec, axes)(jax.device_put(array, on_devices))
    return jax.device_put(total, sharding)


def _repeated_over(sharding: NamedSharding) -> tuple[str, ...]:
    used = {name for entry in sharding.spec for name in ((entry,) if isinstance(entry, str) else entry or ())}
    return tuple(name for name in sharding.mesh.axis_names if name not in used and sharding.mesh.shape[name] > 1)


@functools.cache
def summing(mesh: Any, spec: PartitionSpec, axes: tuple[str, ...]) -> Any:
    """Return the program that sums blocks over axes, bit by bit."""

    def add(block: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(block):
            return jax.lax.complex(add(block.real), add(block.imag))
        bits = block
        if jnp.issubdtype(block.dtype, jnp.floating):
            bits = jax.lax.bitcast_convert_type(block, jnp.dtype(f"uint{8 * block.dtype.itemsize}"))
        total = jax.lax.psum(bits.astype(jnp.uint32) if bits.dtype.itemsize < 4 else bits, axes).astype(bits.dtype)
        return total if total.dtype == block.dtype else jax.lax.bitcast_convert_type(total, block.dtype)

    summed = jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(summed, out_shardings=NamedSharding(mesh, spec))
