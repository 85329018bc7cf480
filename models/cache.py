"""Cache of the keys and values of earlier tokens, with which generation computes each token once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .elementwise import soft_cap
from .over_tensor import HEADS, by_heads, over_tensor


class Cache(NamedTuple):
    """Keys and values of all layers, and the index of the current layer.

    The order of dims suits scatters (rows first) and matrix products (heads before positions). With another order XLA
    transposes the whole cache for every token.

    Attributes:
      keys, values: `[B L K S A]` for stacked layers, else tuples of L arrays `[B K S A]`: S positions in each of B
        rows, K heads of size A; keys are already rotated.
      layer: index of the layer that is called; None outside of layers.
    """

    keys: Any
    values: Any
    layer: Any = None

    def at(self, layer: Any) -> "Cache":
        """Return the cache for a call of this layer."""
        return self._replace(layer=layer)


def cache_shapes(layers: int, heads: int, head_size: int, stacked: bool, rows: int, length: int, dtype: Any) -> Cache:
    """Return the shapes of a cache of `length` positions. An empty cache is all zeros.

    Memory:  2 * L * B * K * S * A elements.
    """
    if stacked:
        array = jax.ShapeDtypeStruct((rows, layers, heads, length, head_size), dtype)
        return Cache(array, array)
    arrays = (jax.ShapeDtypeStruct((rows, heads, length, head_size), dtype),) * layers
    return Cache(arrays, arrays)


def check_cached(positions: jax.Array | None, lengths: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return both arguments; raise if either is missing."""
    if positions is None or lengths is None:
        raise ValueError("a model called with a cache also needs positions= [B T] and lengths= [B]; pass both")
    return positions, lengths


def attend_cached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    positions: jax.Array,
    *,
    window: Any = None,
    kernel: Callable[..., jax.Array],
    documents: Any = None,
    has_sinks: bool = False,
    softcap: float | None = None,
) -> tuple[jax.Array, Cache]:
    """Write keys and values to the cache, and compute attention over positions up to each query's.

    Several tokens are prompts at the start of their rows: they attend only to each other, with the kernel of training.
    A single token attends to the whole cache, with plain attention, because it has few scores.

    Layout:  query [B T H A], key and value [B T K A], cache [B K S A] of a layer, positions [B T] int32 -> [B T H A],
             cache
    Dtype:   the cache keeps its dtype; attention is in the dtype of the query, scores in float32.

    Args:
      positions: position of each token in its row; S for padding at the end, which is not written.
      window: number of keys that a query sees, including its own, also as an array; None: all earlier keys.
      kernel: attention of prompts, as `attend`, with these `documents`.
      has_sinks: whether the last element of each query is its sink.
      softcap: limit of the scores, as in `soft_cap`; None: no limit.
    """
    keys, all_keys = _write(cache.keys, cache.layer, key, positions)
    values, all_values = _write(cache.values, cache.layer, value, positions)
    cache = Cache(all_keys, all_values)
    if query.shape[1] > 1:
        return by_heads(kernel, query, key, value, documents=documents), cache
    rows, heads, length, size = keys.shape
    index = jnp.arange(length, dtype=jnp.int32)
    visible = index <= positions
    if window is not None:
        visible &= index > positions - window
    query = query.reshape(rows, heads, -1, query.shape[-1])
    query, sink = (query[..., :-1], query[..., -1:]) if has_sinks else (query, query[..., :0])
    keys, values = keys.astype(query.dtype), values.astype(query.dtype)
    scores = jnp.einsum("bkga,bksa->bkgs", query, keys, preferred_element_type=jnp.float32) * size**-0.5
    scores = soft_cap(scores, softcap)
    scores = jnp.concatenate([jnp.where(visible[:, None, None], scores, -jnp.inf), sink.astype(jnp.float32)], -1)
    probabilities = jax.nn.softmax(scores, axis=-1)[..., :length].astype(query.dtype)
    attended = jnp.einsum("bkgs,bksa->bkga", probabilities, values)
    return attended.reshape(rows, 1, -1, size), cache


def _write(cached: Any, layer: Any, new: jax.Array, positions: jax.Array) -> tuple[jax.Array, Any]:
    """Return the updated cache of the current layer, and of all layers."""
    # With vmap over rows; otherwise XLA gathers the rows of all devices for the scatter.
    if isinstance(cached, tuple):
        put = jax.vmap(lambda row, position, values: row.at[:, position].set(values, mode="drop"))
        updated = put(cached[layer], positions, new.swapaxes(1, 2).astype(cached[layer].dtype))
        updated = over_tensor(updated, 1, HEADS)
        return updated, (*cached[:layer], updated, *cached[layer + 1 :])
    put = jax.vmap(lambda row, position, values: row.at[layer, :, position].set(values, mode="drop"))
    stack = over_tensor(put(cached, positions, new.astype(cached.dtype)), 2, HEADS)
    return jax.lax.dynamic_index_in_dim(stack, layer, axis=1, keepdims=False), stack


def last_of(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the activations of the last token of each row. Layout: [B T D], [B] int32 -> [B 1 D]."""
    return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
