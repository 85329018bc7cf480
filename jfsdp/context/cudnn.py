"""cuDNN as a kernel of gathered keys, through two private primitives of JAX (0.10 to 0.12).

[Note: cuDNN's attention in parts]
`jax.nn.dot_product_attention` cannot be used for parts of a softmax: the derivative of its statistics is dropped
without an error, and it rounds them to half precision. So the primitives of its forward and backward are bound here.
Their check of the GPU is in a function that is not called, so it needs no device of this process.

Relied on: lengths of at least 1 exclude the queries and keys from there on; a causal mask is only used between equal
lengths; the backward computes weights as exp(score - statistics), and their mean gradient from the given output. Not
relied on: results for excluded queries and keys, which the caller replaces. In packed rows every token belongs to a
document. Their statistics are indexed by document, and only passed back.
Not yet run on a GPU: programs were compiled for H100s, and read.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp.compat import counts_query_heads, cudnn_attention
from jfsdp.context.kernels import Reach


def find_problem(query: Any, window: int | None, max_documents: int | None) -> str:
    """Return why cuDNN does not support a call, with the remedies; "" if it does. Packed rows also need Hopper.

    Args:
      max_documents: None: rows are not packed; 0: unknown.
    """
    _, num_tokens, _, size = query.shape
    this, elsewhere = "implementation='cudnn'", "use implementation='xla' or context_by='heads'"
    problems = {
        f"this JAX has no cuDNN attention in parts; {elsewhere}": cudnn_attention() is None,
        f"{this} needs bfloat16 or float16, got {query.dtype}; {elsewhere}": query.dtype.itemsize != 2,
        f"{this} needs heads of at most 128, divisible by 8, got {size}; {elsewhere}": size % 8 or size > 128,
        f"{this} needs an even number of tokens per chunk, got {num_tokens // 2}; {elsewhere}": num_tokens % 4,
        f"{this} cannot limit keys of other chunks to window={window}; {elsewhere}": window is not None,
        f"{this} needs max_documents= for segment ids: the most documents in half a device's tokens": max_documents
        == 0,
    }
    return next((problem for problem, is_found in problems.items() if is_found), "")


def forward(query: jax.Array, key: jax.Array, value: jax.Array, reach: Reach) -> tuple[jax.Array, jax.Array]:
    """Compute attention in half precision; see [Note: kernels of gathered keys]."""
    output, statistics = _bind("fwd", query, key, value, (), reach, is_training=True)
    if reach.documents is not None:
        has_too_many = _document_index(reach)[:, -1] >= reach.max_documents
        output = jnp.where(has_too_many[:, None, None, None], jnp.nan, output).astype(output.dtype)
    return output, statistics


def backward(
    query: jax.Array, key: jax.Array, value: jax.Array, output: Any, statistics: Any, grad: Any, reach: Reach
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradient of query, key and value; see [Note: kernels of gathered keys]."""
    grads = _bind("bwd", query, key, value, (statistics, output, grad), reach)
    of_key, of_value = (x.reshape(*key.shape[:3], -1, key.shape[3]).sum(axis=3) for x in grads[1:])  # of copies
    return grads[0], of_key, of_value


def _bind(direction: str, query: Any, key: Any, value: Any, more: Any, reach: Reach, **options: Any) -> list[jax.Array]:
    """Call a primitive: "fwd" without `more`, or "bwd" with statistics, output and its gradient."""
    binding = cudnn_attention()
    primitive = getattr(binding, f"_dot_product_attention_{direction}_p_wrapper")
    if "score_mod" in inspect.signature(binding.dot_product_attention).parameters:  # since JAX 0.12
        options["score_mod"] = None
    if reach.documents is not None and counts_query_heads():
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    kind, lengths = _lengths(query, reach)
    unused = jnp.zeros(0, query.dtype)
    lengths = [*lengths, *[unused] * (4 - len(lengths))]
    bias, pages = unused, (unused, unused)
    return primitive.bind(
        *(query, key, value, bias, *lengths, *pages, *more),
        scale=query.shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=binding.MaskType[kind],
        layout=binding.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **options,
    )


def _lengths(query: Any, reach: Reach) -> tuple[str, tuple[jax.Array, ...]]:
    """Return cuDNN's mask, and lengths (and offsets of documents) of queries and keys."""
    if reach.documents is not None:
        # At least 2: with 1 the binding ignores offsets.
        places = jnp.arange(max(reach.max_documents, 2), dtype=jnp.int32)
        counts = jnp.sum(_document_index(reach)[:, :, None] == places, axis=1, dtype=jnp.int32)
        lengths, offsets = (jnp.where(counts > 0, x, -1) for x in (counts, jnp.cumsum(counts, axis=1) - counts))
        offsets = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
        return "PADDING_CAUSAL", (lengths, lengths, offsets, offsets)
    if reach.keys is not None:
        queries = jnp.full_like(reach.keys, query.shape[1]) if reach.queries is None else reach.queries
        return "PADDING", (queries, reach.keys)
    return ("CAUSAL", ()) if reach.queries is None else ("PADDING_CAUSAL", (reach.queries, reach.queries))


def _document_index(reach: Reach) -> jax.Array:
    """Return the index of each token's document in its chunk. Layout: [B n] int32."""
    assert reach.documents is not None
    is_start = reach.documents[:, 1:] != reach.documents[:, :-1]
    return jnp.pad(jnp.cumsum(is_start, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
