"""Keys and values of the tokens seen so far, so that generation computes each token once."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .attention import AttentionChoice, attend
from .over_tensor import HEADS, by_heads, over_tensor


class Cache(NamedTuple):
    """Of all layers, or inside a layer of its own.

    Attributes:
      keys, values: `[L B S K A]` where layers are stacked, else tuples of L arrays `[B S K A]`: of S places in each of
        B rows, K heads of size A; keys are rotated already.
    """

    keys: Any
    values: Any


def cache_shapes(layers: int, heads: int, head_size: int, stacked: bool, rows: int, length: int, dtype: Any) -> Cache:
    """Return the shapes of a cache of `length` places. A zero cache is empty.

    Memory:  2 * L * B * S * K * A elements.
    """
    shape = (rows, length, heads, head_size)
    if stacked:
        array = jax.ShapeDtypeStruct((layers, *shape), dtype)
        return Cache(array, array)
    arrays = (jax.ShapeDtypeStruct(shape, dtype),) * layers
    return Cache(arrays, arrays)


def of_layer(cache: Cache, layer: Any) -> Cache:
    """Return the part of one layer, of a list or of a stack."""
    if isinstance(cache.keys, tuple):
        return Cache(cache.keys[layer], cache.values[layer])
    return Cache(*(jax.lax.dynamic_index_in_dim(array, layer, keepdims=False) for array in cache))


def with_layer(cache: Cache, layer: Any, part: Cache) -> Cache:
    """Return a cache with another part of one layer. In a scan's carry it is written in place."""
    if isinstance(cache.keys, tuple):
        put = [(*array[:layer], new, *array[layer + 1 :]) for array, new in zip(cache, part)]
        return Cache(*put)
    return Cache(*(jax.lax.dynamic_update_index_in_dim(array, new, layer, 0) for array, new in zip(cache, part)))


def attend_cached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    positions: jax.Array,
    *,
    choice: AttentionChoice,
    window: int | None = None,
) -> tuple[jax.Array, Cache]:
    """Write keys and values to their places, and attend to all places up to each query's own.

    Several tokens at once are prompts, which begin their rows: they attend to each other alone, by the kernel of
    training. A single token attends to the whole cache, by plain attention: its scores are few.

    Layout:  query [B T H A], key and value [B T K A], cache [B S K A], positions [B T] int32 -> [B T H A], cache
    Dtype:   the cache keeps its own; attention is in the query's.

    Args:
      positions: of each token in its row; S for padding, which stands at the end and is written nowhere.
      choice: that of `choose_attention`.
      window: how many keys a query sees, itself included; None: all before it.
    """

    def write(cached: jax.Array, new: jax.Array) -> jax.Array:
        # Mapped over rows, or XLA would bring the rows of all devices together for the scatter.
        put = jax.vmap(lambda row, place, values: row.at[place].set(values, mode="drop"))
        return over_tensor(put(cached, positions, new.astype(cached.dtype)), 2, HEADS)

    keys, values = write(cache.keys, key), write(cache.values, value)
    if query.shape[1] > 1:
        attended = by_heads(partial(attend, choice=choice, window=window), query, key, value, documents=None)
        return attended, Cache(keys, values)
    place = jnp.arange(keys.shape[1], dtype=jnp.int32)
    seen = place <= positions[:, :, None]
    if window is not None:
        seen &= place > positions[:, :, None] - window
    attended = jax.nn.dot_product_attention(
        query, keys.astype(query.dtype), values.astype(query.dtype), mask=seen[:, None], implementation="xla"
    )
    return attended, Cache(keys, values)


def last_of(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return what stands at the last token of each row. Layout: [B T D], [B] int32 -> [B 1 D]."""
    return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
