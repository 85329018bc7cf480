"""cuDNN as a kernel of gathered keys, through two private primitives of JAX (0.10 to 0.12).

[Note: cuDNN's attention in parts]
`jax.nn.dot_product_attention` cannot be used for parts of a softmax: the derivative of its statistics is dropped
without an error, and it rounds them to half precision. So the primitives of its forward and backward are bound here.
Their check of the GPU is in a function that is not called, so it needs no device of this process.

What is relied on: lengths of at least 1 mask the queries and keys from there on, and causal masks are only used between
equal lengths. What is not: results for masked queries and keys, which the caller replaces.
In packed rows every token belongs to a document, as in `jax.nn`'s tests of this layout. Statistics of packed rows are
indexed by document, and are passed back unread.
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
    _, num_tokens, _, head_size = query.shape
    elsewhere = "use kernel='xla' or context_by='heads'"
    problems = {
        f"this JAX has no cuDNN attention in parts; {elsewhere}": cudnn_attention() is None,
        f"kernel='cudnn' needs bfloat16 or float16, got {query.dtype}; {elsewhere}": query.dtype.itemsize != 2,
        f"kernel='cudnn' needs heads of at most 128, divisible by 8, got {head_size}; {elsewhere}": (
            head_size % 8 or head_size > 128
        ),
        f"kernel='cudnn' needs an even number of tokens per chunk, got {num_tokens // 2}; {elsewhere}": num_tokens % 4,
        f"kernel='cudnn' cannot limit keys of other chunks to window={window}; {elsewhere}": window is not None,
        "kernel='cudnn' needs max_documents= for segment ids: the most documents in half a device's tokens": (
            max_documents == 0
        ),
    }
    return next((problem for problem, is_found in problems.items() if is_found), "")


def forward(query: jax.Array, key: jax.Array, value: jax.Array, reach: Reach) -> tuple[jax.Array, jax.Array]:
    """Compute attention; see [Note: kernels of gathered keys]. Layout: as kernels.forward; half precision."""
    lengths, has_too_many = _lengths(query, reach)
    arrays = query, *(_repeat(x, query, reach) for x in (key, value))
    output, statistics = _bind("fwd", arrays, lengths, (), reach, is_training=True)
    if has_too_many is not None:
        output = jnp.where(has_too_many[:, None, None, None], jnp.nan, output).astype(output.dtype)
    return output, statistics


def backward(
    query: jax.Array, key: jax.Array, value: jax.Array, output: Any, statistics: Any, grad: Any, reach: Reach
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradient of query, key and value; see [Note: kernels of gathered keys]."""
    lengths, _ = _lengths(query, reach)
    arrays = query, *(_repeat(x, query, reach) for x in (key, value))
    grads = _bind("bwd", arrays, lengths, (statistics, output, grad), reach)
    of_key, of_value = (x.reshape(*key.shape[:3], -1, key.shape[3]).sum(axis=3) for x in grads[1:])
    return grads[0], of_key, of_value


def _bind(direction: str, arrays: Any, lengths: Any, more: Any, reach: Reach, **options: Any) -> list[jax.Array]:
    """Call a primitive: "fwd" without `more`, or "bwd" with statistics, output and its gradient."""
    binding = cudnn_attention()
    primitive = getattr(binding, f"_dot_product_attention_{direction}_p_wrapper")
    if "score_mod" in inspect.signature(binding.dot_product_attention).parameters:  # since JAX 0.12
        options["score_mod"] = None
    is_padded = lengths is not None
    kind = "PADDING" if reach.keys is not None else "PADDING_CAUSAL" if is_padded else "CAUSAL"
    unused = jnp.zeros(0, arrays[0].dtype)  # bias, pages of keys and of values, and lengths without padding
    lengths = [unused if x is None else x for x in lengths or [None] * 4]
    return primitive.bind(
        *(*arrays, unused, *lengths, unused, unused, *more),
        scale=arrays[0].shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=binding.MaskType[kind],
        layout=binding.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **options,
    )


def _lengths(query: jax.Array, reach: Reach) -> tuple[Any, jax.Array | None]:
    """Return lengths and offsets of queries and keys, and whether a row has too many documents."""
    if reach.documents is not None:
        assert reach.max_documents is not None
        is_start = reach.documents[:, 1:] != reach.documents[:, :-1]
        index = jnp.pad(jnp.cumsum(is_start, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        # At least 2: with 1 the binding ignores offsets.
        in_document = index[:, :, None] == jnp.arange(max(reach.max_documents, 2), dtype=jnp.int32)
        lengths = jnp.sum(in_document, axis=1, dtype=jnp.int32)
        offsets = jnp.where(lengths > 0, jnp.cumsum(lengths, axis=1) - lengths, -1)
        lengths = jnp.where(lengths > 0, lengths, -1)
        offsets = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
        return (lengths, lengths, offsets, offsets), index[:, -1] >= reach.max_documents
    if reach.keys is not None:
        queries = jnp.full_like(reach.keys, query.shape[1]) if reach.queries is None else reach.queries
        return (queries, reach.keys, None, None), None
    return None if reach.queries is None else (reach.queries, reach.queries, None, None), None


def _repeat(x: jax.Array, query: jax.Array, reach: Reach) -> jax.Array:
    """Copy keys for each query head, where the binding would compute wrong offsets of documents."""
    copies = query.shape[2] // x.shape[2]
    return jnp.repeat(x, copies, axis=2) if reach.documents is not None and counts_query_heads() else x
