"""Rows that are split over mesh axis `context`: which axis splits them here, whole rows, and positions.

[Note: where rows are split]
A model is traced in two views. In a step of program `manual`, axis `context` is manual: an array has the tokens of one
device. Elsewhere (program `xla`, `forward`, `init`) an array has whole rows, and XLA splits them. The functions of this
package read the mesh of the trace. Where the axis is manual, they communicate over it. Where it is automatic, attention
makes it manual (`over_context`), and the other functions return their arguments. Without the axis, or if its size is 1,
all of them compute what they would on one device.

[Note: zigzag order]
With gathered keys (keys.py) later tokens of a row cost more than earlier ones. So a row is cut into 2C chunks, and
device i of C has the chunks i and 2C-1-i, which makes the work equal. A step of program `manual` brings its batch into
this order by two permutations of tokens, of 4 bytes each, and back never: losses are sums. Only the functions of this
package see the order. Everywhere else rows are in their own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jfsdp.arguments import checked
from jfsdp.layout.mesh import CONTEXT, axes_of

SCOPE = "jfsdp.context"  # in the names of operations over split rows
BY_KEYS = f"{SCOPE}.keys"
_IS_ZIGZAG = jax.make_user_context(False)  # part of the key of JAX's caches: a traced function is traced again


def zigzag_rows(is_zigzag: bool) -> AbstractContextManager[None]:
    """Trace functions of split rows in this order; see [Note: zigzag order]."""
    return _IS_ZIGZAG(is_zigzag)


def is_zigzag() -> bool:
    """Return whether split rows are in zigzag order here."""
    return _IS_ZIGZAG.value


def own_axes() -> tuple[str, ...]:
    """Return the mesh axes over which the tokens of an array are split here; see [Note: where rows are split]."""
    return axes_here((CONTEXT,), is_manual=True)


def axes_here(axes: Sequence[str], *, is_manual: bool) -> tuple[str, ...]:
    """Return those of these axes of the trace's mesh, larger than 1, that are manual here, or that are not."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    return tuple(name for name in axes_of(mesh, axes) if (name in manual) is is_manual and mesh.shape[name] > 1)


@checked
def whole_rows(x: Any) -> jax.Array:
    """Return the tokens of all devices of axis `context`, for values that attention needs of whole rows.

    Layout:  [B T/context ...] -> [B T ...]; unchanged where rows are not split.
    Cost:    an all-gather; a reduce-scatter of the gradient.

    Raises:
      ValueError: for an array without a dim of tokens.
    """
    axes = own_axes()
    if jnp.ndim(x) < 2:
        raise ValueError(f"whole_rows: dim 1 must be tokens, got shape {jnp.shape(x)}; values [B] of rows are whole")
    if not axes:
        return x
    with jax.named_scope(SCOPE):
        parts = jnp.moveaxis(jax.lax.all_gather(x, axes), 0, 1)
        return in_row_order(parts.reshape(x.shape[0], -1, *x.shape[2:]), parts.shape[1])


def in_row_order(x: jax.Array, size: int, *, back: bool = False) -> jax.Array:
    """Bring tokens in the order of the devices that they are from to the order of the row, or back.

    Layout:  [B T ...] -> [B T ...]; unchanged if rows are not in zigzag order.
    """
    if not is_zigzag():
        return x
    chunks = x.reshape(x.shape[0], 2 * size, -1, *x.shape[2:])
    if back:
        return jnp.stack([chunks[:, :size], chunks[:, size:][:, ::-1]], axis=2).reshape(x.shape)
    return jnp.concatenate([chunks[:, ::2], chunks[:, 1::2][:, ::-1]], axis=1).reshape(x.shape)


def own_tokens(x: jax.Array) -> jax.Array:
    """Return this device's tokens of whole rows; undoes `whole_rows`. Moves no data between devices.

    Layout:  [B T ...] -> [B T/context ...]; unchanged where rows are not split.
    """
    axes = own_axes()
    if not axes:
        return x
    size, index = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    parts = in_row_order(x, size, back=True).reshape(x.shape[0], size, -1, *x.shape[2:])
    return jax.lax.dynamic_index_in_dim(parts, index, axis=1, keepdims=False)


@checked
def positions(tokens: Any, segment_ids: Any = None) -> jax.Array:
    """Return the positions of tokens in their rows or documents, also if axis `context` splits the rows.

    Layout:  tokens [B T/context ...] -> [1 T/context] int32; with segment ids [B T/context] -> [B T/context] int32
    Cost:    with segment ids an all-gather of 4 bytes per token.

    Args:
      tokens: an array of which only the shape is read.
      segment_ids: the document of each token; positions are counted from the start of each run of equal ids.
    """
    with jax.named_scope(SCOPE):
        axes = own_axes()
        size = tokens.shape[1] * (jax.lax.axis_size(axes) if axes else 1)
        index = jnp.arange(size, dtype=jnp.int32)[None]
        if segment_ids is not None:
            ids = whole_rows(segment_ids)
            starts = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            index = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
        return own_tokens(index)


def check_chunks(num_tokens: int, size: int) -> None:
    """Check that the tokens of one of `size` devices form two chunks."""
    if num_tokens % 2:
        raise ValueError(
            f"attention with context_by='keys': {num_tokens} tokens per device cannot be split into two chunks; use "
            f"rows divisible by {2 * size} (2 * {size} devices per row)"
        )


def to_zigzag_rows(x: jax.Array) -> jax.Array:
    """Move the tokens of a leaf of a batch to zigzag order; leaves without tokens are unchanged."""
    return to_zigzag(x, own_axes()) if x.ndim > 1 else x


def to_zigzag(x: jax.Array, axes: tuple[str, ...], *, back: bool = False) -> jax.Array:
    """Move tokens between devices from row order to zigzag order, or back, inside a `shard_map`.

    A device has the chunks 2i and 2i+1 of a row in row order. Those with even numbers go to different devices, and so
    do the others.

    Layout:  [B T/context ...] -> [B T/context ...]
    Cost:    two permutations, of half of the array each.

    Raises:
      ValueError: for an odd number of tokens.
    """
    check_chunks(x.shape[1], jax.lax.axis_size(axes))
    size, is_even = jax.lax.axis_size(axes), jax.lax.axis_index(axes) % 2 == 0

    def send(x: jax.Array, odd: int) -> jax.Array:
        pairs = [(i, min(2 * i + odd, 2 * size - 1 - 2 * i - odd)) for i in range(size)]
        with jax.named_scope(SCOPE):
            return jax.lax.ppermute(x, axes, [(b, a) for a, b in pairs] if back else pairs)

    def swap(one: jax.Array, other: jax.Array) -> list[jax.Array]:
        return [jnp.where(is_even, one, other), jnp.where(is_even, other, one)]

    halves = jnp.split(x, 2, axis=1)
    halves = swap(*halves) if back else halves
    moved = [send(half, odd) for odd, half in enumerate(halves)]
    return jnp.concatenate(moved if back else swap(*moved), axis=1)
