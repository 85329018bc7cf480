"""Sources: named arrays that can be read by slices.

Checkpoints of jfsdp, safetensors files, PyTorch checkpoints and live states are sources for code that restores,
converts, compares or exports. A source has names, logical shapes and dtypes, known before anything is read, and reads
one slice of one array at a time. A source under other names is a source too.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.layout.codec import Codec, coded_shapes, scales_of

Index = tuple[slice, ...]
Progress = Callable[[str, int], None]  # called with the name of an array or file, and the bytes processed
_T = TypeVar("_T")


def ignore_progress(name: str, num_bytes: int) -> None:
    """Ignore progress."""


class Source(Protocol):
    """Arrays by name, read by slices. Several threads may read at once."""

    @property
    def arrays(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return the logical shape and dtype of every array, by name."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one array, in its stored dtype, into new memory.

        Args:
          index: a slice per dim, with start and stop inside the array and no step; `()` for a scalar.
        """
        ...


def total_bytes(arrays: Iterable[Any]) -> int:
    """Return the bytes of arrays, or of their shapes and dtypes."""
    return sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in arrays)


def read_whole(source: Source, name: str) -> np.ndarray:
    """Read a whole array."""
    return source.read(name, tuple(slice(0, size) for size in source.arrays[name].shape))


PIECE_BYTES = 16 << 20
"""Approximate maximum size of the pieces in which arrays are streamed."""


def pieces_of(array: Any) -> Iterator[Index]:
    """Split an array into pieces of at most `PIECE_BYTES`, like the chunks of checkpoints."""
    return grid(array.shape, cell_of(array.shape, array.dtype.itemsize))


def are_equal(source: Source, first: str, second: str) -> bool:
    """Compare two arrays bit by bit, in pieces."""
    one, other = source.arrays[first], source.arrays[second]
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return all(source.read(first, at).tobytes() == source.read(second, at).tobytes() for at in pieces_of(one))


def cell_of(block: tuple[int, ...], itemsize: int, *, shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the shape of the pieces, of at most `PIECE_BYTES`, into which a block is split.

    Leading dims are split first, since layers are read one by one. Then the longer of the last two is split, since a
    matrix is read by rows, and by columns if it is stored transposed.

    Args:
      shape: shape of the array that contains the block. Dims that the block covers only partly are divided without
        remainder, so that no piece lies in two blocks.
    """
    sizes, whole = list(block), shape or block
    while math.prod(sizes) * itemsize > PIECE_BYTES:
        leading = (dim for dim in range(len(sizes) - 2) if sizes[dim] > 1)
        cut = [-(-n // 2) if n_of == n_all else _largest_divisor(n) for n, n_of, n_all in zip(sizes, block, whole)]
        last = range(len(sizes))[-2:]
        # A prime dim can only be split into single rows, which are too many pieces: then the other dim is split.
        dim = next(leading, max(last, key=lambda dim: (sizes[dim] > 1, cut[dim] / sizes[dim] > 1 / 8, sizes[dim])))
        sizes[dim] = cut[dim]
    return tuple(sizes)


def _largest_divisor(size: int) -> int:
    """Return the largest proper divisor."""
    return next((size // low for low in range(2, math.isqrt(size) + 1) if size % low == 0), 1)


def grid(shape: tuple[int, ...], cell: tuple[int, ...]) -> Iterator[Index]:
    """Yield the index of each piece of an array; none if it is empty."""
    if not math.prod(shape):
        return
    starts = (range(0, size, step) for size, step in zip(shape, cell, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(slice(at, min(at + step, size)) for at, step, size in zip(corner, cell, shape, strict=True))


def contiguous(block: np.ndarray) -> np.ndarray:
    """Return a block as C-contiguous memory. Transposed blocks are copied in tiles, three times as fast as by numpy."""
    if block.ndim < 2 or block.strides[-1] <= block.itemsize or block.flags.c_contiguous:
        return np.ascontiguousarray(block).reshape(block.shape)
    out = np.empty(block.shape, block.dtype)
    for index in grid(block.shape, (1,) * (block.ndim - 2) + (_TILE, _TILE)):
        out[index] = block[index]
    return out


_TILE = 64


def read_ahead(tasks: Iterable[tuple[int, Callable[[], _T]]], limit: int, *, threads: int) -> Iterator[_T]:
    """Run tasks in threads and yield their results, in order.

    Args:
      tasks: each with its size.
      limit: maximum sum of the sizes of running and finished tasks, including the one whose result the caller
        processes. A single task may be larger.
    """
    pool, running, in_flight = ThreadPoolExecutor(threads), deque[tuple[int, Future[_T]]](), 0
    try:
        for size, task in itertools.chain(tasks, [(limit + 1, None)]):  # the last waits for all, empty ones too
            while running and in_flight + size > limit:
                done, future = running.popleft()
                yield future.result()
                in_flight -= done
            if task is not None:
                running.append((size, pool.submit(task)))
                in_flight += size
    finally:
        pool.shutdown(cancel_futures=True)


class Joined:
    """The arrays of several sources, whose names differ."""

    def __init__(self, *sources: Source):
        self._source = {name: source for source in sources for name in source.arrays}
        self.arrays = {name: source.arrays[name] for name, source in self._source.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._source[name].read(name, index)


class Renamed:
    """Some arrays of a source under other names.

    Args:
      names: new name -> name in the source.
    """

    def __init__(self, source: Source, names: Mapping[str, str]):
        self._source, self._names = source, names
        self.arrays = {name: source.arrays[old] for name, old in names.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._source.read(self._names[name], index)


def subset(source: Source, names: Iterable[str]) -> Renamed:
    """Return a source with some of the arrays of another."""
    return Renamed(source, {name: name for name in names})


class Watched:
    """A source that reports every read."""

    def __init__(self, source: Source, progress: Progress):
        self._source, self._progress, self.arrays = source, progress, source.arrays

    def read(self, name: str, index: Index) -> np.ndarray:
        block = self._source.read(name, index)
        self._progress(name, block.nbytes)
        return block


class Recast:
    """A source that reads some of its arrays in other dtypes."""

    def __init__(self, source: Source, dtypes: Mapping[str, Any]):
        self._source, self._dtypes = source, dtypes
        self.arrays = {
            name: jax.ShapeDtypeStruct(array.shape, dtypes.get(name, array.dtype))
            for name, array in source.arrays.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one array.

        Raises:
          ValueError: if a value is beyond the range of the dtype.
        """
        block = self._source.read(name, index)
        if name not in self._dtypes:
            return block
        with np.errstate(over="ignore"):
            cast = block.astype(self._dtypes[name], copy=False)
        if cast.dtype.itemsize <= block.dtype.itemsize and count_nonfinite(cast):
            was_finite = np.isfinite(block)
            if (was_finite & ~np.isfinite(cast)).any():
                largest = float(np.abs(block[was_finite]).astype(np.float64).max())
                problem = f"values up to {largest:.4g} are beyond the range of {cast.dtype}"
                raise ValueError(f"{name}: {problem}; use float32")
        return cast


def float_dtype(dtype: Any) -> np.dtype:
    """Return a dtype to which floating arrays may be cast.

    Raises:
      ValueError: if the dtype is unknown, not floating, or below 16 bits.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype {dtype!r} is unknown; use one such as float32, bfloat16, float16") from error
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise ValueError(f"dtype {dtype!r} cannot store weights without a scale; use one such as float32, bfloat16")
    return found


class Encoded:
    """A source that reads some of its arrays as quantization codes, with their scales as further arrays.

    Reading codes or scales reads the values.

    Args:
      codecs: by the name of the quantized array.
    """

    def __init__(self, source: Source, codecs: Mapping[str, Codec]):
        self._source, self._codecs = source, codecs
        self._scales = {scales_of(name): name for name in codecs}
        self.arrays = {**source.arrays, **coded_shapes(codecs, source.arrays)}

    def read(self, name: str, index: Index) -> np.ndarray:
        values = self._scales.get(name, name)
        if values not in self._codecs:
            return self._source.read(name, index)
        codec = self._codecs[values]
        *rest, last = index
        step = codec.per_item if name == values else codec.block  # values per item requested
        start = last.start * step // codec.block * codec.block
        stop = -(-last.stop * step // codec.block) * codec.block
        skipped = last.start - start // step
        out = np.empty([part.stop - part.start for part in index], self.arrays[name].dtype)
        rows = tuple(part.stop - part.start for part in rest)
        for piece in grid(rows, cell_of(rows, _ENCODING_BYTES * (stop - start))):
            there = (slice(x.start + at.start, x.start + at.stop) for x, at in zip(rest, piece, strict=True))
            block = self._source.read(values, (*there, slice(start, stop)))
            found = codec.encode(block, np)[0] if name == values else codec.scales(block, np)
            out[piece] = found[..., skipped : skipped + last.stop - last.start]
        return out


_ENCODING_BYTES = 24  # that numpy allocates per value while encoding


def count_nonfinite(values: np.ndarray) -> int:
    """Count infinite and NaN values, in parts, since a mask of the whole array would be another copy."""
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return 0
    flat = values.reshape(-1) if values.flags.c_contiguous else values.T.reshape(-1)
    parts = (flat[start : start + _CHECKED_ELEMENTS] for start in range(0, flat.size, _CHECKED_ELEMENTS))
    return flat.size - sum(int(np.count_nonzero(_finite(part))) for part in parts)


def _finite(values: np.ndarray) -> np.ndarray:
    """Return the mask of finite values; 16-bit dtypes by their exponents, for which `isfinite` is far slower."""
    if values.dtype.itemsize != 2:
        return np.isfinite(values)
    exponent = np.asarray(np.inf, values.dtype).view(np.uint16)
    return (values.view(np.uint16) & exponent) != exponent


_CHECKED_ELEMENTS = 1 << 16
