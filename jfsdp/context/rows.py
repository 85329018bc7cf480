"""Rows that are split over mesh axis `context`: which axis splits them here, whole rows, and positions.

[Note: where rows are split]
A model is traced in two views. In a step of program `manual`, axis `context` is manual: an array has the tokens of one
device. Elsewhere (program `xla`, `forward`, `init`) an array has whole rows, and XLA splits them. The functions of this
package read the mesh of the trace. Where the axis is manual, they communicate over it. Where it is automatic, attention
makes it manual (`over_context`), and the other functions return their arguments. Without the axis, or if its size is 1,
all of them compute what they would on one device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jfsdp.arguments import checked
from jfsdp.layout.mesh import CONTEXT, axes_of

SCOPE = "jfsdp.context"  # in the names of operations over split rows


def own_axes() -> tuple[str, ...]:
    """Return the mesh axes over which the tokens of an array are split here; see [Note: where rows are split]."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    return tuple(name for name in axes_of(mesh, (CONTEXT,)) if name in manual and mesh.shape[name] > 1)


@checked
def whole_rows(x: Any) -> jax.Array:
    """Return the tokens of all devices of axis `context`, for values that attention needs of whole rows.

    Layout:  [B T/context ...] -> [B T ...]; unchanged where rows are not split.
    Cost:    an all-gather; a reduce-scatter of the gradient.
    """
    axes = own_axes()
    if not axes:
        return x
    with jax.named_scope(SCOPE):
        return jax.lax.all_gather(x, axes, axis=1, tiled=True)


def own_tokens(x: jax.Array) -> jax.Array:
    """Return this device's tokens of whole rows; undoes `whole_rows`. Moves no data between devices.

    Layout:  [B T ...] -> [B T/context ...]; unchanged where rows are not split.
    """
    axes = own_axes()
    if not axes:
        return x
    size = x.shape[1] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis=1)


@checked
def positions(tokens: Any, segment_ids: Any = None) -> jax.Array:
    """Return the positions of tokens in their rows or documents, also if axis `context` splits the rows.

    Layout:  tokens [B T/context ...] -> [1 T/context] int32; with segment ids [B T/context] -> [B T/context] int32
    Cost:    with segment ids an all-gather of 4 bytes per token.

    Args:
      tokens: an array of this shape, or its shape.
      segment_ids: the document of each token; positions are counted from the start of each run of equal ids.
    """
    with jax.named_scope(SCOPE):
        if segment_ids is None:
            axes, size = own_axes(), tokens.shape[1]
            first = jax.lax.axis_index(axes) * size if axes else 0
            return (first + jnp.arange(size, dtype=jnp.int32))[None]
        ids = whole_rows(segment_ids)
        index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        starts = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        return own_tokens(index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1))
