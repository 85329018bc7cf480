"""Arrays of any source written as safetensors files, piece by piece: host memory for a piece, whatever the model."""

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

MAX_SHARD_BYTES = 5_000_000_000
PIECE_BYTES = 1 << 25
_AHEAD = 2  # pieces that are read while another is written
MEMORY_BYTES = (_AHEAD + 1) * 3 * PIECE_BYTES
"""The most host memory that an export takes, besides its source: each piece as read, and twice in the new dtype."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What an export wrote: the files with weights, their arrays and the bytes of these, without headers.

    Attributes:
      nonfinite: a line for each array with NaN or infinite values, under its name there.
    """

    directory: Path
    files: tuple[str, ...]
    num_arrays: int
    total_bytes: int
    nonfinite: tuple[str, ...] = ()


def export_safetensors(source: Source, directory: Any, names: Names, **options: Any) -> Written:
    """Write a model as a directory that `transformers` loads. It appears whole or not at all.

    Memory:  `MEMORY_BYTES` on the host: pieces as read and as written.

    Of several processes one calls this (the first, say): it writes all files.

    Args:
      source: the parameters under our names, without `params.`.
      directory: must not exist yet; its parent is made if it is missing.
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
    """Write all arrays of a source under its own names; otherwise as `export_safetensors`.

    Args:
      config: what `config.json` is to say, such as `pretrained.config_json` returns; `torch_dtype` is added. None: no
        such file.
      dtype: of floating arrays in the files; None: as they are.
      max_shard_bytes: more than this is written as several files and an index; an array is never cut.
      allow_nonfinite: write NaN and infinite values too, and say so in what is returned.
      texts: more files, by name: what they say as JSON, or the path of a file to copy.
      weights: the file of the arrays, where one is enough.

    Raises:
      ValueError: if `directory` exists, a dtype cannot be written, or a value leaves its range or is not finite.
      OSError: if the disk is full or not writable.
    """
    directory = Path(directory).expanduser().absolute()
    if directory.exists():
        raise ValueError(f"{directory}: exists already, and nothing is overwritten; choose another path, or remove it")
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
    """Fill files in the order of the arrays, each up to the limit; return each file's arrays, in file order."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1; {MAX_SHARD_BYTES} is usual")
    groups: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    filled = 0
    for name, array in arrays.items():
        if array.dtype not in CODES:
            known = ", ".join(map(str, DTYPES.values()))
            raise ValueError(f"{name}: has dtype {array.dtype}, which safetensors lacks; choose one of {known}")
        size = total_bytes([array])
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = array
        filled += size
    files = [f"model-{place + 1:05d}-of-{len(groups):05d}.safetensors" for place in range(len(groups))]
    if len(groups) == 1:
        files = [weights]
    # Wide elements come first, so that each array begins at a multiple of its element, as readers expect.
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


def row_cell(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the shape of pieces of at most `most` elements that follow one another in memory (row-major)."""
    cell = [1] * len(shape)
    for dim in reversed(range(len(shape))):
        cell[dim] = max(min(shape[dim], most // math.prod(cell)), 1)
        if cell[dim] < shape[dim]:
            break
    return tuple(cell)


def _piece_elements(array: Any, target: np.dtype) -> int:
    return max(PIECE_BYTES // max(array.dtype.itemsize, target.itemsize), 1)


def _header(arrays: Shapes) -> bytes:
    """Return the 8 bytes of length and the JSON behind them, padded as the safetensors library does."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + total_bytes([array])
        entries[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
