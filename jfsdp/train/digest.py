"""Digests of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_WORDS = {1: jnp.uint8, 2: jnp.uint16}


def digest(x: Any) -> jax.Array:
    """Return a 32-bit digest of an array's bits and their positions, for use inside `jit`.

    The sharding of the array does not change its digest. Changed bits and swapped elements change it almost surely.

    Cost:    each device reads its part once; one number is summed over all devices.
    """
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 8):
        words = x.astype(jnp.uint32)
    else:
        words = jax.lax.bitcast_convert_type(x, _WORDS.get(x.dtype.itemsize, jnp.uint32)).astype(jnp.uint32)
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):  # without reshape, which would gather a sharded array
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    position = position * jnp.uint32(2654435761) | 1
    mixed = (words ^ position) * jnp.uint32(2246822519)
    return jnp.sum((mixed ^ (mixed >> 15)) * position, dtype=jnp.uint32)
