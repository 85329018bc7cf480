"""Between leaves and the arrays that hold them at rest; outside this file nobody asks what such an array looks like.

Each leaf is an array of its own, or several stand in one buffer: see [Note: what a buffer looks like] in
layout/flat.py. Everything here is a reshape, a slice or a concatenation inside each device's own part: no byte moves
between devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.engine.engine import pad_all, unpad_all
from jfsdp.layout.flat import Buffer, View
from jfsdp.layout.layout import Layout


def unpack(buffer: Buffer, value: jax.Array, gone: int = 0) -> dict[str, jax.Array]:
    """Return the leaves in a buffer, or in part of its chunks. Moves no data between devices.

    Args:
      value: [layers, chunks * chunk], or [layers, parts, chunks * chunk]: the whole buffer or any number of its chunks.
      gone: how many layer dims are gone from it.

    Returns:
      By name, the leaves in their stored shape, or what these chunks hold of them.
    """
    lead = value.shape[: buffer.stacked - gone]
    assert value.ndim == len(buffer.shape) - gone, f"{buffer.path}: {value.shape} without {gone} layer dims"
    num = value.shape[-1] // buffer.chunk if buffer.chunk else 1
    chunks = value.reshape(*lead, buffer.num_parts, num, buffer.chunk)
    leaves = {}
    for view in buffer.views:
        piece = jax.lax.slice_in_dim(chunks, view.start, view.start + view.size, axis=-1)
        piece = piece.reshape(*lead, buffer.num_parts, num, *view.shape)
        grid = [*lead, *_sizes(view, buffer.num_parts, num)]
        leaves[view.path] = piece.transpose(_order(view, len(lead))).reshape(*grid)
    return leaves


def pack(buffer: Buffer, leaves: Mapping[str, jax.Array], gone: int = 0) -> jax.Array:
    """Return the buffer of leaves in their stored shape, or the chunks of parts of them; undoes `unpack`.

    Moves no data between devices.
    """
    num_lead, pieces = buffer.stacked - gone, []
    for view in buffer.views:
        leaf = leaves[view.path]
        lead, order, num = leaf.shape[:num_lead], _order(view, num_lead), 1
        if view.dim is not None:
            num = leaf.shape[num_lead + view.dim] // _sizes(view, buffer.num_parts, 1)[view.dim]
        grid = [*lead, buffer.num_parts, num, *view.shape]
        piece = leaf.reshape([grid[place] for place in order]).transpose(np.argsort(order))
        pieces.append(piece.reshape(*lead, buffer.num_parts, num, view.size))
    chunks = jnp.concatenate(pieces, axis=-1)
    parts = [cut.parts for cut in buffer.cuts]
    return chunks.reshape(*chunks.shape[:num_lead], *parts, chunks.shape[-2] * buffer.chunk)


def _order(view: View, num_lead: int) -> list[int]:
    """Return an order of [layers, parts, chunks, *view.shape]: parts, then chunks, before the dims that they part."""
    order = [*range(num_lead)]
    before: dict[int, list[int]] = {}
    before.setdefault(view.cut or 0, []).append(num_lead)
    before.setdefault(view.dim or 0, []).append(num_lead + 1)
    for dim in range(max(len(view.shape), 1)):
        order += [*before.get(dim, ()), *([num_lead + 2 + dim] if view.shape else [])]
    return order


def _sizes(view: View, num_parts: int, num_chunks: int) -> list[int]:
    """Return the sizes of a leaf without its layer dims, or of what these chunks hold of it."""
    sizes = list(view.shape)
    for dim, num in ((view.cut, num_parts), (view.dim, num_chunks)):
        if dim is not None:
            sizes[dim] *= num
    return sizes


def one_to_rest(layout: Layout, name: str, leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Return the array at rest of this name, of the leaves that it holds, in their stored shape or parts of it."""
    stored = layout.by_path[name]
    return pack(stored, leaves) if isinstance(stored, Buffer) else leaves[name]


def to_rest(layout: Layout, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays at rest of leaves by name, in their stored shape: all leaves of a buffer, or none.

    What is at rest already stays. Moves no data between devices.
    """
    there = [buffer for buffer in _buffers(layout) if buffer.views[0].path in leaves]
    at_rest = {name: value for name, value in leaves.items() if layout.stored_name.get(name, name) == name}
    return at_rest | {buffer.path: pack(buffer, leaves) for buffer in there}


def to_leaves(layout: Layout, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves in arrays at rest by name; undoes `to_rest`. Leaves among them stay.

    Moves no data between devices.
    """
    opened = dict(stored)
    for buffer in _buffers(layout):
        if buffer.path in opened:
            opened |= unpack(buffer, opened.pop(buffer.path))
    return opened


def rest_of(layout: Layout, shards: Mapping[str, int]) -> dict[str, int]:
    """Return the arrays at rest that hold the leaves of a call, with the number of layer dims gone.

    Raises:
      ValueError: if the call takes some leaves of a buffer and not the others, or layers of an undeclared stack.
    """
    stored = {layout.stored_name[path]: gone for path, gone in shards.items()}
    for buffer in _buffers(layout):
        missing = [view.path for view in buffer.views if view.path not in shards]
        if buffer.path in stored and missing:
            raise ValueError(
                f"{missing[0]}: a call of unit {buffer.unit!r} leaves it out, and it is stored in one buffer with what "
                "the call takes; make units of the modules that are called, or use storage='per_parameter'"
            )
        if (gone := stored.get(buffer.path, 0)) > buffer.stacked:
            raise ValueError(
                f"{buffer.holds[0]}: is stored in one array with others, without its layer dim, but unit "
                f"{buffer.unit!r} is called inside a scan over it; declare the layer dim: "
                f"units=[jfsdp.Unit(..., stacked={gone})]"
            )
    return stored


def open_full(layout: Layout, full: Mapping[str, jax.Array], gone: Mapping[str, int]) -> dict[str, jax.Array]:
    """Return gathered weights leaf by leaf, in their logical shape. Moves no data between devices."""
    if not layout.packed:
        return dict(full)
    opened: dict[str, jax.Array] = {}
    for buffer in _buffers(layout):
        if buffer.path in full:
            opened |= unpack(buffer, full[buffer.path], gone[buffer.path])
    return unpad_all([(layout.by_path[path], gone[layout.stored_name[path]]) for path in opened], opened)


def close_grads(layout: Layout, grads: Mapping[str, jax.Array], gone: Mapping[str, int]) -> dict[str, jax.Array]:
    """Return gradients of logical leaves in the form in which they are stored. Moves no data between devices."""
    if not layout.packed:
        return dict(grads)
    padded = pad_all([(layout.by_path[path], gone[layout.stored_name[path]]) for path in grads], grads)
    names = {layout.stored_name[path] for path in grads}
    buffers = [buffer for buffer in _buffers(layout) if buffer.path in names]
    return {buffer.path: pack(buffer, padded, gone[buffer.path]) for buffer in buffers}


def _buffers(layout: Layout) -> list[Buffer]:
    return [stored for stored in layout.packed if isinstance(stored, Buffer)]
