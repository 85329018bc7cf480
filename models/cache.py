"""Keys and values of the tokens seen so far, so that generation computes each token once."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .attention import AttentionChoice, attend
from .over_tensor import HEADS, by_heads, over_tensor


class Cache(NamedTuple):
    """Of all layers; in a layer's call it also says which one that is.

    The order of dims is that in which scatters (rows first) and products of matrices (heads before places) take them:
    in another XLA transposes the whole cache for every token.

    Attributes:
      keys, values: `[B L K S A]` where layers are stacked, else tuples of L arrays `[B K S A]`: of S places in each of
        B rows, K heads of size A; keys are rotated already.
      layer: the number of the layer that is called; None outside of layers.
    """

    keys: Any
    values: Any
    layer: Any = None

    def at(self, layer: Any) -> "Cache":
        """Return the cache for a call of that layer."""
        return self._replace(layer=layer)


def cache_shapes(layers: int, heads: int, head_size: int, stacked: bool, rows: int, length: int, dtype: Any) -> Cache:
    """Return the shapes of a cache of `length` places. A zero cache is empty.

    Memory:  2 * L * B * K * S * A elements.
    """
    if stacked:
        array = jax.ShapeDtypeStruct((rows, layers, heads, length, head_size), dtype)
        return Cache(array, array)
    arrays = (jax.ShapeDtypeStruct((rows, heads, length, head_size), dtype),) * layers
    return Cache(arrays, arrays)


def check_cached(positions: jax.Array | None, lengths: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return both; refuse a call with a cache that does not say where its tokens stand."""
    if positions is None or lengths is None:
        raise ValueError("a model called with a cache needs positions= [B T] and lengths= [B] too")
    return positions, lengths


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

    Layout:  query [B T H A], key and value [B T K A], cache [B K S A] of a layer, positions [B T] int32 -> [B T H A],
             cache
    Dtype:   the cache keeps its own; attention is in the query's, its scores in float32.

    Args:
      positions: of each token in its row; S for padding, which stands at the end and is written nowhere.
      choice: that of `choose_attention`.
      window: how many keys a query sees, itself included; None: all before it.
    """
    keys, all_keys = _write(cache.keys, cache.layer, key, positions)
    values, all_values = _write(cache.values, cache.layer, value, positions)
    cache = Cache(all_keys, all_values)
    if query.shape[1] > 1:
        return by_heads(partial(attend, choice=choice, window=window), query, key, value, documents=None), cache
    rows, heads, length, size = keys.shape
    place = jnp.arange(length, dtype=jnp.int32)
    seen = place <= positions
    if window is not None:
        seen &= place > positions - window
    query = query.reshape(rows, heads, -1, size)
    keys, values = keys.astype(query.dtype), values.astype(query.dtype)
    scores = jnp.einsum("bkga,bksa->bkgs", query, keys, preferred_element_type=jnp.float32) * size**-0.5
    shares = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1).astype(query.dtype)
    attended = jnp.einsum("bkgs,bksa->bkga", shares, values)
    return attended.reshape(rows, 1, -1, size), cache


def _write(cached: Any, layer: Any, new: jax.Array, positions: jax.Array) -> tuple[jax.Array, Any]:
    """Return the part of a layer with new tokens at their places, and all layers with it."""
    # Mapped over rows, or XLA would bring the rows of all devices together for the scatter.
    if isinstance(cached, tuple):
        put = jax.vmap(lambda row, place, values: row.at[:, place].set(values, mode="drop"))
        own = put(cached[layer], positions, new.swapaxes(1, 2).astype(cached[layer].dtype))
        own = over_tensor(own, 1, HEADS)
        return own, (*cached[:layer], own, *cached[layer + 1 :])
    put = jax.vmap(lambda row, place, values: row.at[layer, :, place].set(values, mode="drop"))
    stack = over_tensor(put(cached, positions, new.astype(cached.dtype)), 2, HEADS)
    return jax.lax.dynamic_index_in_dim(stack, layer, axis=1, keepdims=False), stack


def last_of(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return what stands at the last token of each row. Layout: [B T D], [B] int32 -> [B 1 D]."""
    return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
