"""A number for the bits of an array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_WORDS = {1: jnp.uint8, 2: jnp.uint16}


def digest(x: Any) -> jax.Array:
    """Return a number of 32 bits that any changed bit, or two elements that change places, change almost surely.

    Of a split array it is that of the whole one, whatever the split; for use inside `jit`.

    Cost:    each device reads its part once, and a number is summed over all devices.
    """
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 8):
        words = x.astype(jnp.uint32)
    else:
        words = jax.lax.bitcast_convert_type(x, _WORDS.get(x.dtype.itemsize, jnp.uint32)).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):  # not flat: a split array would be gathered
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    place = place * jnp.uint32(2654435761) | 1
    mixed = (words ^ place) * jnp.uint32(2246822519)
    return jnp.sum((mixed ^ (mixed >> 15)) * place, dtype=jnp.uint32)
