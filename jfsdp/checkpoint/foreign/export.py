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
from jfsdp.checkpoint.source import Index, Recast, Source, contiguous, grid, read_ahead, total_bytes

MAX_SHARD_BYTES = 5_000_000_000
PIECE_BYTES = 1 << 25
_AHEAD = 2  # pieces that are read while another is written


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


def export_safetensors(
    source: Source,
    directory: Any,
    names: Names,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_nonfinite: bool = False,
) -> Written:
    """Write a model as a directory that `transformers` loads. It appears whole or not at all.

    Memory:  `export_memory_bytes(source, dtype)` on the host: pieces as they are read, and as they are written.

    Of several processes one calls this (the first, say): it writes all files.

    Args:
      source: the parameters under our names, without `params.`.
      directory: must not exist yet; its parent is made if it is missing.
      names: the mapping, such as a job's field `pretrained`.
      config: what `config.json` is to say, such as `pretrained.config_json` returns; `torch_dtype` is added. None: no
        such file.
      dtype: of floating arrays in the files; None: as they are.
      max_shard_bytes: more than this is written as several files and an index; an array is never cut.
      allow_nonfinite: write NaN and infinite values too, and say so in what is returned.

    Returns:
      What was written.

    Raises:
      ValueError: if `directory` exists, leaves have no rule, a dtype cannot be written, or a value leaves its range or
        is not finite.
      OSError: if the disk is full or not writable.
    """
    how: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "allow_nonfinite": allow_nonfinite}
    return write_safetensors(Exported(source, names), directory, config=config, **how)


def export_memory_bytes(source: Source, dtype: Any = None) -> int:
    """Return the most that an export holds on the host at once, besides what the source itself needs to read.

    Three pieces, one that is written and two that are read meanwhile, each as the source puts it together, as it is
    read, and in the dtype and order that is written, or in that dtype twice, if that is more: as it is cast, and in
    that order; each of at most `PIECE_BYTES`, or of one element.
    """
    largest = 0
    for array in source.arrays.values():
        target = _target(array, dtype)
        count = min(math.prod(array.shape), _piece_elements(array, target))
        largest = max(largest, count * (max(2 * array.dtype.itemsize, target.itemsize) + target.itemsize))
    return (_AHEAD + 1) * largest


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
    """Write all arrays of a source under its own names; otherwise as `export_safetensors`, which see.

    Args:
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
    shards = _plan_shards(cast.arrays, max_shard_bytes, weights)
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    check_space(directory, sum(shard.data_bytes for shard in shards))
    with readable_errors(directory):
        temporary.mkdir(parents=True)
        try:
            for shard in shards:
                _write_shard(cast, source.arrays, temporary / shard.file, shard)
            refuse_nonfinite(directory, counted.lines(), allow=allow_nonfinite)
            _write_texts(temporary, shards, config)
            for name, text in (texts or {}).items():
                shutil.copy(text, temporary / name) if isinstance(text, Path) else write_json(temporary / name, text)
            sync(temporary)
            temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(directory.parent)
    num_arrays, total = sum(len(shard.arrays) for shard in shards), sum(shard.data_bytes for shard in shards)
    return Written(directory, tuple(shard.file for shard in shards), num_arrays, total, counted.lines())


@dataclasses.dataclass(frozen=True)
class _Shard:
    """One file to write: its arrays, in the dtype in which and the order in which they lie there."""

    file: str
    arrays: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def data_bytes(self) -> int:
        return total_bytes(self.arrays.values())


def _target(array: Any, dtype: Any) -> np.dtype:
    """Return the dtype in which an array is written."""
    if dtype is None:
        return array.dtype
    try:
        target = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype {dtype!r} is unknown; such as float32, bfloat16, float16") from error
    if not jnp.issubdtype(target, jnp.floating):
        raise ValueError(f"dtype={dtype!r} is not floating; choose float32, bfloat16 or float16")
    return target if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype


def _plan_shards(arrays: Shapes, max_shard_bytes: int, weights: str) -> list[_Shard]:
    """Fill files in the order of the arrays, each up to the limit."""
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
    files = [weights] if len(groups) == 1 else files
    # Wide elements come first, so that each array begins at a multiple of its element, as readers expect.
    aligned = (sorted(group.items(), key=lambda item: -item[1].dtype.itemsize) for group in groups)
    return [_Shard(file, dict(group)) for file, group in zip(files, aligned, strict=True)]


def _write_shard(source: Source, stored: Shapes, path: Path, shard: _Shard) -> None:
    def read(name: str, index: Index) -> np.ndarray:
        return contiguous(source.read(name, index)).reshape(-1).view(np.uint8)

    tasks = (
        (1, functools.partial(read, name, index))
        for name, array in shard.arrays.items()
        for index in grid(array.shape, row_cell(array.shape, _piece_elements(stored[name], array.dtype)))
    )
    with open(path, "wb") as file:
        file.write(_header(shard))
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


def _header(shard: _Shard) -> bytes:
    """Return the 8 bytes of length and the JSON behind them, padded as the safetensors library does."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in shard.arrays.items():
        start, end = end, end + total_bytes([array])
        entries[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_texts(directory: Path, shards: Sequence[_Shard], config: Mapping[str, Any] | None) -> None:
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.arrays}
        total = sum(shard.data_bytes for shard in shards)
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if config is not None:
        written = {array.dtype for shard in shards for array in shard.arrays.values()}
        floating = [str(dtype) for dtype in written if jnp.issubdtype(dtype, jnp.floating)]
        stated = {"torch_dtype": floating[0]} if len(floating) == 1 else {}
        write_json(directory / CONFIG, {**config, **stated})
