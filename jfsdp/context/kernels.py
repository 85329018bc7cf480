"""The kernel contract of gathered keys, and a kernel in plain JAX; cudnn.py has the other one.

[Note: kernels of gathered keys]
A kernel is two functions with the same `Reach`, which tells what each query sees:

    forward(query, key, value, reach) -> (output, statistics)
    backward(query, key, value, output, statistics, output gradient, reach) -> (query, key, value gradient)

Statistics are the log of the sum of exponentials of a query's scores, `[B H n]` in float32 or wider. The forward reads
only the given keys. The backward accepts output and statistics of a softmax over more keys, and then returns this
call's part of its gradient. A kernel may write anything for queries and keys that `Reach` excludes.
With `documents`, statistics may have another shape, and the backward is only given those of its own forward.
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
      max_documents: maximum number of documents per entry of the batch, for kernels that need it.
      window: number of keys that a query sees, including its own; None: all.
    """

    queries: jax.Array | None = None
    keys: jax.Array | None = None
    documents: jax.Array | None = None
    max_documents: int | None = None
    window: int | None = None


def forward(query: jax.Array, key: jax.Array, value: jax.Array, reach: Reach) -> tuple[jax.Array, jax.Array]:
    """Compute attention with scores in memory; see [Note: kernels of gathered keys].

    Layout:  query [B n H A], key and value [B m K A] -> [B n H A], [B H n]
    Memory:  scores [B H n m], in float32 or wider.
    """
    scores, is_seen = _scores(query, key, reach)
    statistics = jax.nn.logsumexp(jnp.where(is_seen, scores, HIDDEN), axis=-1)
    weights = jnp.where(is_seen, jnp.exp(scores - statistics[..., None]), 0)
    output = jnp.einsum("bkgnm,bmka->bnkga", weights, value).reshape(query.shape)
    return output.astype(query.dtype), statistics.reshape(query.shape[0], query.shape[2], -1)


def backward(
    query: jax.Array, key: jax.Array, value: jax.Array, output: Any, statistics: Any, grad: Any, reach: Reach
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradient of query, key and value; see [Note: kernels of gathered keys]."""
    num_keys = key.shape[2]
    scores, is_seen = _scores(query, key, reach)
    split = statistics.reshape(*scores.shape[:3], -1)
    weights = jnp.where(is_seen, jnp.exp(scores - split[..., None]), 0)
    grad, output = (_groups(x, num_keys).astype(weights.dtype) for x in (grad, output))
    products = jnp.einsum("bnkga,bmka->bkgnm", grad, value)
    grad_scores = weights * (products - jnp.einsum("bnkga,bnkga->bkgn", grad, output)[..., None])
    grad_scores *= query.shape[-1] ** -0.5
    grad_query = jnp.einsum("bkgnm,bmka->bnkga", grad_scores, key).reshape(query.shape)
    grad_key = jnp.einsum("bkgnm,bnkga->bmka", grad_scores, _groups(query, num_keys))
    grad_value = jnp.einsum("bkgnm,bnkga->bmka", weights, grad)
    return grad_query.astype(query.dtype), grad_key.astype(key.dtype), grad_value.astype(value.dtype)


def _groups(x: jax.Array, num_keys: int) -> jax.Array:
    """Split heads by the key head that they share. Layout: [B n H A] -> [B n K H/K A]."""
    return x.reshape(*x.shape[:2], num_keys, -1, x.shape[3])


def _scores(query: jax.Array, key: jax.Array, reach: Reach) -> tuple[jax.Array, jax.Array]:
    """Return scores and which of them count. Layout: [B K H/K n m], [B 1 1 n m]."""
    wide = jnp.promote_types(jnp.float32, query.dtype)
    scores = jnp.einsum("bnkga,bmka->bkgnm", _groups(query, key.shape[2]), key, preferred_element_type=wide)
    rows, columns = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])[None]
    distance = (rows - columns)[None]  # from a query back to a key
    if reach.keys is None:
        is_seen = distance >= 0
    else:
        distance += reach.keys[:, None, None]
        is_seen = columns < reach.keys[:, None, None]
    if reach.window is not None:
        is_seen &= distance < reach.window
    if reach.queries is not None:
        is_seen &= rows < reach.queries[:, None, None]
    if reach.documents is not None:
        is_seen &= reach.documents[:, :, None] == reach.documents[:, None, :]
    return scores * query.shape[-1] ** -0.5, is_seen[:, None, None]
