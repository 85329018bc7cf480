"""Safetensors files: headers, and their arrays as a source that reads byte ranges."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from io import FileIO
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jfsdp.checkpoint.disk.files import inside
from jfsdp.checkpoint.source import Index
from jfsdp.objects.path import AnyPath, ObjectPath, as_path, is_address, read_at

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"

# By the codes in headers.
DTYPES: dict[str, np.dtype] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8)},
    "BOOL": np.dtype(np.bool_),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

# Gaps between wanted ranges that are smaller than this are read too, since a disk reads whole pages.
_GAP_BYTES = 4096
_GAP_OF_REQUESTS = 1 << 20  # in an object store, where a request takes as long as a megabyte
# Approximate size of the pieces in which ranges with gaps are read.
_SPAN_BYTES = 1 << 24
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Location, shape and dtype of one array."""

    file: AnyPath
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype


class SafetensorsSource:
    """The arrays of safetensors files, read by byte ranges. Files are not kept open or mapped into memory.

    A slice of leading dims is one range. Other slices have one range per run of bytes, and gaps below a page are read
    with them.

    Args:
      path: a file, an index (`model.safetensors.index.json`) next to its files, or a directory with either.

    Raises:
      ValueError: if there are no weights, a file of the index is missing, or a file is damaged or truncated.
    """

    def __init__(self, path: Any):
        self.path = as_path(path)
        self._stored: dict[str, _Stored] = {}
        files = weight_files(self.path)
        for file in files:
            found = _read_header(file)
            check_index(file, files, found)
            self._stored |= found

        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(stored.shape, stored.dtype) for name, stored in self._stored.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one array; see `Source`."""
        stored = self._stored[name]
        out = np.empty([part.stop - part.start for part in index], stored.dtype)
        if out.size:
            if isinstance(stored.file, ObjectPath):
                _read_slice(stored.file, stored, index, out)
                return out
            with open(stored.file, "rb", buffering=0) as file:
                _read_slice(file, stored, index, out)
        return out


def weight_files(path: AnyPath) -> dict[AnyPath, list[str] | None]:
    """Return the files with the weights, each with its names according to an index (None: no index).

    Raises:
      ValueError: if there are none, or a file of the index is missing or outside the index's directory.
    """
    if path.is_dir():
        path = next((path / name for name in (WEIGHTS, INDEX) if (path / name).exists()), path)
    if path.is_dir() or not path.exists():
        raise ValueError(f"{path}: {_problem(path)}; pass {WEIGHTS}, {INDEX}, their directory, or a file")
    if path.suffix != ".json":
        return {path: None}
    try:
        weight_map = dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is not an index of weights ({error!r}); download it again") from error
    files: dict[AnyPath, Any] = {}
    for name, file in weight_map.items():
        files.setdefault(inside(path.parent, file), []).append(name)
    if not files:
        raise ValueError(f"{path}: is an index without arrays; download it again")
    if missing := sorted(file.name for file in files if not file.exists()):
        raise ValueError(f"{path}: names {', '.join(missing)}, which are missing next to it; download them")
    return files


def _problem(path: AnyPath) -> str:
    if not path.exists():
        return "does not exist"
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    return f"has no safetensors weights of a usual name (there are {', '.join(others[:8]) or 'no weights at all'})"


def check_index(file: AnyPath, files: Mapping[AnyPath, Collection[str] | None], found: Collection[str]) -> None:
    """Check that a file has all arrays that its index names, and none that belong to another file.

    The file may have arrays that the index does not name, such as `rotary_emb.inv_freq`, which `transformers` computes.
    Mappings of names refuse those that they do not know.

    Raises:
      ValueError: if not; names the file and the arrays.
    """
    if (named := files[file]) is None:
        return
    elsewhere = {name for names in files.values() for name in names or ()} - {*named}
    lacking, extra = {*named} - {*found}, elsewhere & {*found}
    if lacking or extra:
        missing, others = (", ".join(sorted(names)[:8]) or "none" for names in (lacking, extra))
        raise ValueError(f"{file}: differs from its index (missing: {missing}; of another file: {others}); download it")


def _read_header(file: AnyPath) -> dict[str, _Stored]:
    """Read the location of each array of a file. The safetensors library first checks that the header fits the file."""
    from safetensors import SafetensorError, safe_open

    length = int.from_bytes(read_at(file, 0, 8), "little")
    try:
        if not is_address(file):
            with safe_open(file, framework="numpy"):
                pass
        header = json.loads(read_at(file, 8, min(length, _MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        if 8 + length + max(ends, default=0) != file.stat().st_size:
            raise ValueError("the header does not fit the size")
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {_damage(file)} ({error}); download or write it again") from error
    header.pop("__metadata__", None)
    found: dict[str, _Stored] = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{file}: {name} has dtype {entry['dtype']}; supported are {', '.join(DTYPES)}")
        begin = 8 + length + entry["data_offsets"][0]
        found[name] = _Stored(file, begin, tuple(entry["shape"]), DTYPES[entry["dtype"]])
    return found


def _damage(file: AnyPath) -> str:
    if read_at(file, 0, 24).startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS and not the file itself (`git lfs pull`)"
    return f"is not a complete safetensors file: damaged, or cut off at {file.stat().st_size:,} bytes"


def _read_slice(file: FileIO | ObjectPath, stored: _Stored, index: Index, out: np.ndarray) -> None:
    """Fill `out` (contiguous) with a slice, range by range."""
    shape = stored.shape
    steps = [math.prod(shape[dim + 1 :]) * stored.dtype.itemsize for dim in range(len(shape))]
    dim = len(shape)  # the slice contains all of the dims from this one on
    while dim and index[dim - 1] == slice(0, shape[dim - 1]):
        dim -= 1
    if dim <= 1:
        _read_into(file, stored.start + (index[0].start * steps[0] if index else 0), out)
        return
    # Each row of dim `dim - 1` is one run of bytes.
    for outer in np.ndindex(*out.shape[: dim - 2]):
        offset = sum((part.start + place) * step for part, place, step in zip(index, (*outer, 0, 0), steps))
        _read_rows(file, stored.start + offset, steps[dim - 2], out[outer].reshape(out.shape[dim - 2], -1))


def _read_rows(file: FileIO | ObjectPath, start: int, step: int, out: np.ndarray) -> None:
    """Read rows that begin `step` bytes apart. If the gaps are short, several rows are read at once with the gaps."""
    run = out.shape[1] * out.itemsize
    gap = _GAP_OF_REQUESTS if isinstance(file, ObjectPath) else _GAP_BYTES
    count = max(_SPAN_BYTES // step, 1) if step - run < gap else 1
    for first in range(0, len(out), count):
        rows, at = out[first : first + count], start + first * step
        if len(rows) == 1:
            _read_into(file, at, rows)
            continue
        span = np.empty(len(rows) * step, np.uint8)
        _read_into(file, at, span[: (len(rows) - 1) * step + run])
        rows.view(np.uint8)[...] = span.reshape(len(rows), step)[:, :run]


def _read_into(file: FileIO | ObjectPath, start: int, out: np.ndarray) -> None:
    """Fill a contiguous array with the bytes of a file from `start`."""
    view = out.reshape(-1).view(np.uint8).data
    if isinstance(file, ObjectPath):
        data = file.read_range(start, start + len(view))
        if len(data) != len(view):
            raise ValueError(f"{file}: ended at byte {start + len(data):,} during reading; write it again")
        view[:] = data
        return
    while view:
        count = os.preadv(file.fileno(), [view], start)
        if not count:
            raise ValueError(f"{file.name!s}: ended at byte {start:,} during reading; download or write it again")
        view, start = view[count:], start + count
