"""Conversion of a checkpoint: other dtypes, layers stacked or listed, a selection of arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.checkpoint import source as sources
from jfsdp.checkpoint.disk.files import CONFIG, EXTRA, LAYOUT, MANIFEST, make_manifest
from jfsdp.checkpoint.disk.logical_arrays import Logical
from jfsdp.checkpoint.disk.paths import absolute_path
from jfsdp.checkpoint.disk.reader import STREAM_BYTES
from jfsdp.checkpoint.finite import Counted, refuse_nonfinite
from jfsdp.checkpoint.layers import ConvertedLayers, list_names, stack_names
from jfsdp.checkpoint.objects.reader import open_checkpoint
from jfsdp.layout.select import select_leaves

MEMORY_BYTES = STREAM_BYTES + 2 * 5 * 8 * sources.PIECE_BYTES
"""Maximum host memory of writing from a source: 8 pieces at once, each in 5 copies (stored, read, cast, encoded, and
gathered into a file), and as much again in fragments that malloc keeps (measured: half of that)."""


def choose_dtypes(arrays: Mapping[str, jax.ShapeDtypeStruct], casts: Sequence[str]) -> dict[str, Any]:
    """Return the dtype of each array to cast, from texts such as `bfloat16` (all parameters) and `opt_state=float32`.

    Later texts take precedence. Only floating arrays are cast.

    Raises:
      ValueError: if a dtype is unknown, or a pattern matches nothing.
    """
    chosen: dict[str, Any] = {}
    for cast in casts:
        pattern, equals, dtype = cast.rpartition("=")
        wanted = sources.float_dtype(dtype)
        names = select_leaves("dtype", pattern if equals else "params", arrays, {})
        chosen |= {name: wanted for name in names if jnp.issubdtype(arrays[name].dtype, jnp.floating)}
    return chosen


def convert(
    path: Any,
    target: Any,
    *,
    casts: Sequence[str] = (),
    stack: str | None = None,
    unstack: str | None = None,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    progress: sources.Progress = sources.ignore_progress,
) -> tuple[str, ...]:
    """Write a converted copy of a checkpoint, in one process. Files read are checked against their digests.

    Restoring on another mesh, strategy, engine, storage or form of layers needs no conversion.

    Memory:  `MEMORY_BYTES`, regardless of the size of the checkpoint.

    Args:
      path: one checkpoint.
      target: a new directory.
      casts: as `choose_dtypes`.
      stack: name of a list of layers to stack, such as "layers" for `layers.0.attn` or `layers_0.attn`.
      unstack: name of a stack of layers to convert to a list; "h_" converts `h` to `h_0` and so on, as in flax.linen.
      only, skip: patterns of names, as in `restore`.
      progress: called with the array's name and the bytes of each piece read.

    Returns:
      A line for each array with NaN or infinite values, which are written unchanged.

    Raises:
      ValueError: if there is no checkpoint, it is damaged, `target` exists, or an argument matches nothing.
      OSError: if the disk is full or not writable.
    """
    from jfsdp.checkpoint.store import choose

    source = open_checkpoint(path, cache_bytes=STREAM_BYTES)
    if source.path in absolute_path(target).parents:
        raise ValueError(f"checkpoint {source.path}: {target} is inside it; choose a path outside")
    names = choose(source.arrays, only, skip)
    source.check(names)
    view: sources.Source = sources.Watched(sources.subset(source, names), progress)
    if stack is not None:
        view = _under(view, stack_names(view.arrays, stack))
    if unstack is not None:
        view = _under(view, list_names(view.arrays, unstack))
    view = sources.Recast(view, choose_dtypes(view.arrays, casts))
    manifest = {key: source.manifest[key] for key in ("step", "metrics", "base") if key in source.manifest}
    manifest["converted"] = {"from": str(source.path), "casts": list(casts), "stack": stack, "unstack": unstack}
    documents = {LAYOUT: source.manifest["layout"], CONFIG: source.manifest["config"], EXTRA: source.manifest["extra"]}
    return write_source(target, view, manifest, documents, key_impls=source.key_impls)


def _under(source: sources.Source, names: Sequence[str]) -> sources.Source:
    """Return a source under names, with its lists converted to stacks and its stacks to lists where needed."""
    return sources.subset(ConvertedLayers(source, names), names)


def write_source(
    target: Any,
    source: sources.Source,
    manifest: Mapping[str, Any],
    documents: Mapping[str, Any],
    *,
    key_impls: Mapping[str, str | None] | None = None,
    allow_nonfinite: bool = True,
) -> tuple[str, ...]:
    """Write the arrays of a source as a checkpoint.

    Memory:  `MEMORY_BYTES`, in addition to the memory of the source.

    Args:
      manifest, documents: data saved with the arrays; format, date, versions and names are added.
      allow_nonfinite: False raises and writes nothing if a value is NaN or infinite.

    Returns:
      A line for each array with such values.

    Raises:
      ValueError: if `target` exists, another process writes it, or there are non-finite values that are not allowed.
      OSError: if the disk is full or not writable.
    """
    from jfsdp.checkpoint.disk.pieces import Pieces
    from jfsdp.checkpoint.store import open_writer, wait_for

    target, counted, impls = absolute_path(target), Counted(source), key_impls or {}

    def read(name: str, index: sources.Index) -> np.ndarray:
        return sources.contiguous(counted.read(name, index))

    pieces: dict[str, Pieces] = {}
    for name, array in source.arrays.items():
        cell = sources.cell_of(array.shape, array.dtype.itemsize)
        parts = [(index, functools.partial(read, name, index)) for index in sources.grid(array.shape, cell)]
        pieces[name] = Pieces(array.shape, np.dtype(array.dtype), cell, parts)  # parts are read when they are written
    described = {name: Logical(x.shape, x.dtype, impls.get(name)) for name, x in source.arrays.items()}
    documents = {MANIFEST: make_manifest(described, target.name) | dict(manifest), **documents}
    needed = sources.total_bytes(source.arrays.values())
    with open_writer(target) as writer:
        check = functools.partial(refuse_nonfinite, target, allow=allow_nonfinite)
        writer.start(target, lambda: pieces, documents, needed, before_commit=lambda: check(counted.lines()))
        wait_for(writer)
    return counted.lines()
