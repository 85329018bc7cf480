"""Flat storage: the leaves of a unit in one buffer, so that one collective moves them.

[Note: what a buffer looks like]
    leaves   a [4 6], b [8]      each split 4 ways over the devices of its finest stage
    device 0                     | a[0] | b[0:2] |
    device 1                              | a[1] | b[2:4] |
    ...
    buffer                       | a[0] | b[0:2] | a[1] | b[2:4] | ...

A device's chunk is its part of each leaf, flattened and concatenated. PyTorch FSDP1 concatenates whole leaves first and
splits afterwards, so that a leaf may begin in the middle of one chunk and end in the next. Here every chunk has its
leaves at the same positions, for two reasons. All devices run one program, in which a leaf's part of a chunk must be
the same everywhere. And a chunk consists of the shards of leaves, which a state has by name, so that nothing moves
between devices. The cost is padding by leaf, where FSDP1 pads once per buffer, and a copy of a device's shards before
each gather, as in FSDP2.

A buffer of leaves that an axis cuts has one more dim, [layers, parts, chunks * chunk]: device (t, n) has chunk n of
part t, which consists of the n-th piece of each leaf's part t.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import FLAT, PER_PARAMETER, Buffer, Leaf, View
from jfsdp.layout.mesh import EXPERT, PIPE
from jfsdp.layout.split_dim import DEFAULT_MIN_SIZE


def in_buffers(layout: Layout) -> Layout:
    """Put the leaves of every unit into buffers, one for each combination of dtype, stages and cuts.

    Raises:
      ValueError: for a pipeline.
    """
    if layout.num_stages > 1:
        raise ValueError(
            f"storage={FLAT!r}: the leaves of a unit are stored in one array, which mesh axis {PIPE!r} (size "
            f"{layout.num_stages}) cannot cut into layers; use storage='per_parameter'"
        )
    if cut := [leaf for leaf in layout.leaves if leaf.row_cuts]:
        raise ValueError(
            f"storage={FLAT!r}: {cut[0].path} is cut over mesh axis {EXPERT!r} (size "
            f"{layout.num_shards([EXPERT])}), which flat storage does not support; use storage='per_parameter'"
        )
    if coded := [leaf for leaf in layout.leaves if leaf.gather_wire or leaf.reduce_wire]:
        raise ValueError(
            f"storage={FLAT!r}: {coded[0].path} has a wire format ({coded[0].gather_wire or coded[0].reduce_wire}), "
            "whose blocks would straddle the leaves of a buffer; use storage='per_parameter'"
        )
    groups: dict[tuple[object, ...], list[Leaf]] = {}
    for leaf in layout.leaves:
        cuts = tuple(cut.axis for cut in leaf.cuts)
        key = leaf.unit, leaf.shape[: leaf.stacked], leaf.dtype, leaf.trainable, leaf.stages, leaf.dim is None, cuts
        groups.setdefault(key, []).append(leaf)
    buffers = []
    for leaves in groups.values():
        name = _name(leaves[0].unit, sum(buffer.unit == leaves[0].unit for buffer in buffers))
        buffers.append(_make_buffer(layout, name, leaves))
    return dataclasses.replace(layout, buffers=tuple(buffers))


@dataclasses.dataclass(frozen=True)
class StorageForm:
    """A storage form: the minimum size of leaves that are split, and a function that stores a layout in this form."""

    min_size: int
    store: Callable[[Layout], Layout]


STORAGE_FORMS = {PER_PARAMETER: StorageForm(DEFAULT_MIN_SIZE, lambda layout: layout), FLAT: StorageForm(0, in_buffers)}


def storage_form(name: str) -> StorageForm:
    """Return a storage form.

    Raises:
      ValueError: for an unknown name.
    """
    if name not in STORAGE_FORMS:
        raise ValueError(f"storage {name!r} is unknown; the storage forms are {', '.join(STORAGE_FORMS)}")
    return STORAGE_FORMS[name]


def _name(unit: str, num_before: int) -> str:
    name = f"{unit}.flat_param" if unit else "flat_param"
    return f"{name}_{num_before + 1}" if num_before else name


def _make_buffer(layout: Layout, name: str, leaves: Sequence[Leaf]) -> Buffer:
    first = leaves[0]
    num_chunks = 1
    if first.dim is not None:
        num_chunks = max(layout.num_shards(stage.axes) for _, stage in first.stages if stage is not None)
    views, start = [], 0
    for leaf in leaves:
        shape, dim = list(leaf.cut_shape[leaf.stacked :]), None
        cut = leaf.cuts[0].dim - leaf.stacked if leaf.cuts else None
        if leaf.dim is not None:
            dim = leaf.dim - leaf.stacked
            shape[dim] //= num_chunks
        size = math.prod(shape)
        views.append(View(leaf.path, start, size, tuple(shape), dim, math.prod(leaf.shape[leaf.stacked :]), cut))
        start += size
    own = [dataclasses.replace(cut, dim=first.stacked, reason="its leaves") for cut in first.cuts]
    lead = (*first.shape[: first.stacked], *[cut.parts for cut in own])
    return Buffer(
        path=name,
        shape=(*lead, num_chunks * start),
        dtype=first.dtype,
        unit=first.unit,
        stacked=first.stacked,
        trainable=first.trainable,
        dim=None if first.dim is None else len(lead),
        padding=0,
        reason=f"flat: {len(leaves)} leaves in {num_chunks} chunks of {start}",
        stages=first.stages,
        cuts=tuple(own),
        views=tuple(views),
    )


def move_together(
    layout: Layout,
    pairs: Sequence[tuple[Leaf, int]],
    values: Mapping[str, jax.Array],
    move: Callable[[Leaf, int, jax.Array], jax.Array],
) -> dict[str, jax.Array]:
    """Move leaves: each separately, or the leaves of a buffer as one array.

    Args:
      pairs: each leaf with the number of layer dims that scans have removed.
      values: by name, in their stored shape or parts of it.
      move: `f(leaf or buffer, sliced, value)`.

    Returns:
      By name, the moved leaves of `pairs`.

    Raises:
      ValueError: if a call takes only some leaves of a buffer, or layers of an undeclared stack.
    """
    if not layout.buffers:
        return {leaf.path: move(leaf, sliced, values[leaf.path]) for leaf, sliced in pairs}
    moved: dict[str, jax.Array] = {}
    buffers = {layout.buffer_of[leaf.path]: sliced for leaf, sliced in pairs}
    for buffer, sliced in buffers.items():
        if missing := [view.path for view in buffer.views if view.path not in values]:
            raise ValueError(
                f"{missing[0]}: a call of unit {buffer.unit!r} does not take it, but it moves in one buffer with "
                "leaves that the call takes; make units of the modules that are called, or use storage='per_parameter'"
            )
        if sliced > buffer.stacked:
            raise ValueError(
                f"{buffer.views[0].path}: moves in one array with other leaves, without its layer dim, but unit "
                f"{buffer.unit!r} is called inside a scan over it; declare the layer dim: "
                f"units=[jfsdp.Unit(..., stacked={sliced})]"
            )
        moved |= unpack(buffer, move(buffer, sliced, pack(buffer, values, sliced)), sliced)
    return moved


def unpack(buffer: Buffer, value: jax.Array, sliced: int = 0) -> dict[str, jax.Array]:
    """Return the leaves in a buffer, or in part of its chunks. Moves no data between devices.

    Args:
      value: [layers, chunks * chunk], or [layers, parts, chunks * chunk]: the whole buffer or any number of its chunks.
      sliced: the number of layer dims that are removed.

    Returns:
      By name, the leaves in their stored shape, or their parts in these chunks.
    """
    lead = value.shape[: buffer.stacked - sliced]
    assert value.ndim == len(buffer.shape) - sliced, f"{buffer.path}: {value.shape} without {sliced} layer dims"
    num = value.shape[-1] // buffer.chunk if buffer.chunk else 1
    chunks = value.reshape(*lead, buffer.num_parts, num, buffer.chunk)
    leaves = {}
    for view in buffer.views:
        piece = jax.lax.slice_in_dim(chunks, view.start, view.start + view.size, axis=-1)
        piece = piece.reshape(*lead, buffer.num_parts, num, *view.shape)
        grid = [*lead, *_sizes(view, buffer.num_parts, num)]
        leaves[view.path] = piece.transpose(_order(view, len(lead))).reshape(*grid)
    return leaves


def pack(buffer: Buffer, leaves: Mapping[str, jax.Array], sliced: int = 0) -> jax.Array:
    """Return the buffer of leaves in their stored shape, or the chunks of parts of them; the inverse of `unpack`.

    Moves no data between devices.
    """
    num_lead, pieces = buffer.stacked - sliced, []
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
    """Return an order of [layers, parts, chunks, *view.shape]: parts, then chunks, before the dims that they split."""
    order = [*range(num_lead)]
    before: dict[int, list[int]] = {}
    before.setdefault(view.cut or 0, []).append(num_lead)
    before.setdefault(view.dim or 0, []).append(num_lead + 1)
    for dim in range(max(len(view.shape), 1)):
        order += [*before.get(dim, ()), *([num_lead + 2 + dim] if view.shape else [])]
    return order


def _sizes(view: View, num_parts: int, num_chunks: int) -> list[int]:
    """Return the sizes of a leaf without its layer dims, or of its part in these chunks."""
    sizes = list(view.shape)
    for dim, num in ((view.cut, num_parts), (view.dim, num_chunks)):
        if dim is not None:
            sizes[dim] *= num
    return sizes
