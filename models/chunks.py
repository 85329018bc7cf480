"""Computation that is independent per token, on a part of every row at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .checks import MAX_SIZE, is_count
from .over_tensor import AXIS, context_axes, token_parts


def by_chunks(function: Callable[..., Any], chunk: int | None, *arrays: jax.Array) -> Any:
    """Apply a function to `chunk` tokens of every row at a time, so that its temporaries exist for one chunk.

    Layout:  several of [B T ..] or [1 T ..] -> a tree of [B T ..]
    Dtype:   gradients of the weights that the function reads are summed over chunks in float32 or wider, and returned
             in the dtype of the weights.
    Memory:  `arrays` are saved for the backward; every other value of a chunk is computed again there, unless the remat
             policy of the caller saves it by name.
    Cost:    the function once more in the backward; nothing if the caller is recomputed anyway (remat "full").
    Source:  sequence tiling of ALST (arXiv 2506.13996).

    Args:
      function: called with arrays [B chunk ..], or [1 chunk ..]. Tokens must be independent, as in an MLP and its norm.
        It may read weights, but change no state: no dropout, no batch statistics. A Linen module creates its parameters
        in `init`; call this with `None if self.is_initializing() else chunk` there.
      chunk: a divisor of T, and a multiple of mesh axis `tensor` (in program `xla` also of `context`); None, T or more:
        `function` is called once.

    Raises:
      ValueError: for a chunk that does not divide the tokens of a row, with the nearest chunk that does; one that is
        not a whole number from 1; arrays with other numbers of tokens.
    """
    if chunk is not None and not is_count(chunk, MAX_SIZE):
        raise ValueError(f"chunk={chunk!r} tokens must be a whole number, at least 1, or None for whole rows")
    lengths = [x.shape[1] if x.ndim > 1 else None for x in arrays]
    if len(set(lengths)) != 1 or lengths[0] is None:
        raise ValueError(f"arrays of shapes {[x.shape for x in arrays]} must be [B, T, ...] with the same T")
    axes, seq_len = (*context_axes(), AXIS), lengths[0]
    parts = token_parts(axes)
    if chunk is None or chunk >= seq_len:
        return function(*arrays)
    if seq_len % chunk or chunk % parts:
        usable = [size for size in range(parts, seq_len, parts) if seq_len % size == 0]
        nearest = f"{min(usable, key=lambda size: abs(size - chunk))}, or None" if usable else "None"
        raise ValueError(
            f"chunk={chunk} tokens (of the Llamas: token_chunk) must divide rows of {seq_len} tokens"
            + f", and be a multiple of mesh axis {', '.join(f'{axis!r} (size {token_parts([axis])})' for axis in axes)}"
            * (parts > 1)
            + f"; use {nearest} for whole rows"
        )

    # These axes may split the tokens of a row into contiguous parts, so a chunk has an equal share of each part.
    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], parts, -1, chunk // parts, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0).reshape(-1, x.shape[0], chunk, *x.shape[4:])

    def joined(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], parts, chunk // parts, *x.shape[3:])
        return jnp.moveaxis(x, 0, 2).reshape(x.shape[1], seq_len, *x.shape[4:])

    rows = tuple(map(cut, arrays))
    converted, weights = jax.closure_convert(function, *(x[0] for x in rows))
    dtypes = [x.dtype for x in weights]
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in weights]

    @partial(jax.checkpoint, prevent_cse=False)
    def body(_: None, rows: tuple[jax.Array, ...]) -> tuple[None, Any]:
        return None, converted(*rows, *(x.astype(dtype) for x, dtype in zip(wide, dtypes, strict=True)))

    return jax.tree.map(joined, jax.lax.scan(body, None, rows)[1])
