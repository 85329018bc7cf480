"""Writing the arrays of any source as safetensors files, in pieces."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.checkpoint.disk.errors import check_space, readable_errors
from jfsdp.checkpoint.disk.files import sync, write_json
from jfsdp.checkpoint.finite import Counted, refuse_nonfinite
from jfsdp.checkpoint.foreign.mapping import Exported, Names, Shapes
from jfsdp.checkpoint.foreign.safetensors import CODES, CONFIG, DTYPES, INDEX, WEIGHTS
from jfsdp.checkpoint.source import Index, Recast, Source, contiguous, float_dtype, grid, read_ahead, total_bytes
from jfsdp.objects.path import is_address

MAX_SHARD_BYTES = 5_000_000_000
PIECE_BYTES = 1 << 25
_AHEAD = 2  # pieces that are read while another one is written
MEMORY_BYTES = (_AHEAD + 1) * 3 * PIECE_BYTES
"""Maximum host memory of an export, in addition to its source: each piece as read, and twice in the new dtype."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Result of an export: the files with weights, the number of arrays, and their bytes without headers.

    Attributes:
      nonfinite: a line for each array with NaN or infinite values, under its name in the files.
    """

    directory: Path
    files: tuple[str, ...]
    num_arrays: int
    total_bytes: int
    nonfinite: tuple[str, ...] = ()


def export_safetensors(source: Source, directory: Any, names: Names, **options: Any) -> Written:
    """Write a model as a directory that `transformers` loads. It appears completely or not at all.

    Memory:  `MEMORY_BYTES` on the host: pieces as read and as written.

    One process calls this and writes all files.

    Args:
      source: the parameters under the model's names, without `params.`.
      directory: a new directory; its parent is created if it is missing.
      names: the mapping, such as a job's field `pretrained`.
      options: of `write_safetensors`: `config`, `dtype`, `max_shard_bytes`, `allow_nonfinite`.

    Raises:
      ValueError: as `write_safetensors`, and if leaves have no rule.
      OSError: if the disk is full or not writable.
    """
    return write_safetensors(Exported(source, names), directory, **options)


def write_safetensors(
    source: Source,
    directory: Any,
    *,
    config: Mapping[str, Any] | None = None,
    texts: Mapping[str, Any] | None = None,
    weights: str = WEIGHTS,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_nonfinite: bool = False,
) -> Written:
    """Write all arrays of a source under its own names; otherwise like `export_safetensors`.

    Args:
      config: contents of `config.json`, such as the result of `pretrained.config_json`; `torch_dtype` is added. None:
        no such file.
      dtype: dtype of floating arrays in the files; None: unchanged.
      max_shard_bytes: more bytes than this are written as several files and an index; arrays are not split.
      allow_nonfinite: write NaN and infinite values, and list them in the result.
      texts: further files by name: contents as JSON, or the path of a file to copy.
      weights: name of the file with the arrays, if one suffices.

    Raises:
      ValueError: if `directory` exists, a dtype cannot be written, or a value exceeds its range or is not finite.
      OSError: if the disk is full or not writable.
    """
    if is_address(directory):
        raise ValueError(f"{directory}: exports are written to a file system; copy them with the client of the store")
    directory = Path(directory).expanduser().absolute()
    if directory.exists():
        raise ValueError(f"{directory}: already exists and is not overwritten; choose another path, or remove it")
    counted = Counted(source)
    cast = Recast(counted, {name: _target(array, dtype) for name, array in source.arrays.items()})
    shards, total = _plan_shards(cast.arrays, max_shard_bytes, weights), total_bytes(cast.arrays.values())
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    check_space(directory, total)
    texts = dict(texts or {})
    if len(shards) > 1:
        weight_map = {name: file for file, arrays in shards.items() for name in arrays}
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    if config is not None:
        floating = {str(x.dtype) for x in cast.arrays.values() if jnp.issubdtype(x.dtype, jnp.floating)}
        texts[CONFIG] = {**config, **({"torch_dtype": floating.pop()} if len(floating) == 1 else {})}
    with readable_errors(directory):
        temporary.mkdir(parents=True)
        try:
            for file, arrays in shards.items():
                _write_file(cast, source.arrays, temporary / file, arrays)
            refuse_nonfinite(directory, counted.lines(), allow=allow_nonfinite)
            for name, text in texts.items():
                shutil.copy(text, temporary / name) if isinstance(text, Path) else write_json(temporary / name, text)
            sync(temporary)
            temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(directory.parent)
    return Written(directory, tuple(shards), len(cast.arrays), total, counted.lines())


def _target(array: Any, dtype: Any) -> np.dtype:
    """Return the dtype in which an array is written."""
    target = None if dtype is None else float_dtype(dtype)
    return target if target and jnp.issubdtype(array.dtype, jnp.floating) else array.dtype


def _plan_shards(arrays: Shapes, max_shard_bytes: int, weights: str) -> dict[str, Shapes]:
    """Assign arrays to files in their order, each up to the limit; return each file's arrays, in file order."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1; {MAX_SHARD_BYTES} is usual")
    groups: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    filled = 0
    for name, array in arrays.items():
        if array.dtype not in CODES:
            known = ", ".join(map(str, DTYPES.values()))
            raise ValueError(f"{name}: safetensors has no dtype {array.dtype}; choose one of {known}")
        size = total_bytes([array])
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = array
        filled += size
    files = [f"model-{place + 1:05d}-of-{len(groups):05d}.safetensors" for place in range(len(groups))]
    if len(groups) == 1:
        files = [weights]
    # Wide elements come first, so that each array begins at a multiple of its item size, as readers expect.
    aligned = [dict(sorted(group.items(), key=lambda item: -item[1].dtype.itemsize)) for group in groups]
    return dict(zip(files, aligned, strict=True))


def _write_file(source: Source, stored: Shapes, path: Path, arrays: Shapes) -> None:
    def read(name: str, index: Index) -> np.ndarray:
        return contiguous(source.read(name, index)).reshape(-1).view(np.uint8)

    tasks = (
        (1, functools.partial(read, name, index))
        for name, array in arrays.items()
        for index in grid(array.shape, row_cell(array.shape, _piece_elements(stored[name], array.dtype)))
    )
    with open(path, "wb") as file:
        file.write(_header(arrays))
        for piece in read_ahead(tasks, _AHEAD + 1, threads=_AHEAD):
            file.write(piece.data)
        file.flush()
        os.fsync(file.fileno())


def row_cell(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return the shape of pieces of at most `limit` elements that are contiguous in memory (row-major)."""
    cell = [1] * len(shape)
    for dim in reversed(range(len(shape))):
        cell[dim] = max(min(shape[dim], limit // math.prod(cell)), 1)
        if cell[dim] < shape[dim]:
            break
    return tuple(cell)


def _piece_elements(array: Any, target: np.dtype) -> int:
    return max(PIECE_BYTES // max(array.dtype.itemsize, target.itemsize), 1)


def _header(arrays: Shapes) -> bytes:
    """Return the header: 8 bytes of length, and JSON, padded as by the safetensors library."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + total_bytes([array])
        entries[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
