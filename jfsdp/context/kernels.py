"""The kernel contract of gathered keys, and a kernel in plain JAX; cudnn.py has the other one.

[Note: kernels of gathered keys]
A kernel is two functions with the same `Reach`, which tells what each query sees:

    forward(query, key, value, reach) -> (output, statistics)
    backward(query, key, value, output, statistics, output gradient, reach) -> (query, key, value gradient)

Statistics are the log of the sum of exponentials of a query's scores, `[B H n]` in float32 or wider. The forward reads
only the given keys. The backward accepts output and statistics of a softmax over more keys, and then returns this
call's part of its gradient. A kernel may write anything for queries and keys that `Reach` excludes.
With `documents`, statistics may have another shape, and the backward is only given those of the same kernel's forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HIDDEN = -1e30  # statistics of a query without keys: finite, so that no difference of two of them is NaN


class Reach(NamedTuple):
    """Which keys the queries of a kernel call see.

    Attributes:
      queries: [B] int32, number of first queries that see any key, at least 1; None: all of them.
      keys: [B] int32, number of first keys that these queries see, at least 1. The keys end where the queries begin.
        None: queries and keys are the same tokens, and a query sees itself and the tokens before it.
      documents: [B n] int32, equal for tokens of one document, if queries see only theirs; None: one document.
      max_documents: maximum number of documents in n tokens, for kernels that need it; 0: unknown.
      window: number of keys that a query sees, including its own; None: all.
    """

    queries: jax.Array | None = None
    keys: jax.Array | None = None
    documents: jax.Array | None = None
    max_documents: int = 0
    window: int | None = None


def forward(query: jax.Array, key: jax.Array, value: jax.Array, reach: Reach) -> tuple[jax.Array, jax.Array]:
    """Compute attention with scores in memory; see [Note: kernels of gathered keys].

    Layout:  query [B n H A], key and value [B m K A] -> [B n H A], [B H n]
    Memory:  scores [B H n m], in float32 or wider.
    """
    scores = _scores(query, key, reach)
    statistics = jax.nn.logsumexp(scores, axis=-1)
    output = _weighted(jnp.exp(scores - statistics[..., None]), value)
    return output.astype(query.dtype), statistics.reshape(query.shape[0], query.shape[2], -1)


def backward(
    query: jax.Array, key: jax.Array, value: jax.Array, output: Any, statistics: Any, grad: Any, reach: Reach
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradient of query, key and value; see [Note: kernels of gathered keys]."""
    grad = grad.astype(statistics.dtype)
    means = jnp.sum(output * grad, axis=-1).swapaxes(1, 2)  # of the gradients of a query's weights, [B H n]

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        # Its gradient is that of attention: the derivative of a softmax subtracts the mean.
        scores = _scores(query, key, reach)
        of_heads, of_means = (x.reshape(*scores.shape[:4], 1) for x in (statistics, means))
        weights = jnp.exp(scores - of_heads)
        return jnp.sum(_weighted(weights, value) * grad) - jnp.sum(weights * of_means)

    return jax.grad(total, argnums=(0, 1, 2))(query, key, value)


def _weighted(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Sum values by weights. Layout: [B K H/K n m], [B m K A] -> [B n H A]."""
    output = jnp.einsum("bkgnm,bmka->bnkga", weights, value)
    return output.reshape(*output.shape[:2], -1, output.shape[-1])


def _scores(query: jax.Array, key: jax.Array, reach: Reach) -> jax.Array:
    """Return scores, and -1e30 for keys that a query does not see. Layout: [B K H/K n m], in float32 or wider."""
    wide = jnp.promote_types(jnp.float32, query.dtype)
    query = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = jnp.einsum("bnkga,bmka->bkgnm", query, key, preferred_element_type=wide) * query.shape[-1] ** -0.5
    rows, columns = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])[None]
    distance, is_seen = (rows - columns)[None], True  # from a query back to a key
    if reach.keys is not None:
        distance += reach.keys[:, None, None]
        is_seen = columns < reach.keys[:, None, None]
    is_seen &= distance >= 0
    if reach.window is not None:
        is_seen &= distance < reach.window
    if reach.queries is not None:
        is_seen &= rows < reach.queries[:, None, None]
    if reach.documents is not None:
        is_seen &= reach.documents[:, :, None] == reach.documents[:, None, :]
    return jnp.where(is_seen[:, None, None], scores, HIDDEN)
