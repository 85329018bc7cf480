"""A checkpoint in an object store as a source of arrays, which checks each chunk that it reads."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import threading
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jfsdp.checkpoint.disk import digest
from jfsdp.checkpoint.disk.files import ARRAYS, COMMIT, SUMS, damaged, part_of, read_json
from jfsdp.checkpoint.disk.processes import only_first
from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.checkpoint.objects.writer import index_path, place_name
from jfsdp.checkpoint.source import PIECE_BYTES, Index
from jfsdp.objects.path import StoreError, is_address


def open_checkpoint(path: Any, *, cache_bytes: int | None = None) -> CheckpointSource:
    """Open a checkpoint on disk or in an object store; see `CheckpointSource`."""
    return (ObjectSource if is_address(path) else CheckpointSource)(path, cache_bytes=cache_bytes)


class ObjectSource(CheckpointSource):
    """The arrays of a checkpoint in an object store. A chunk is read once while it is in the cache."""

    def __init__(self, path: Any, *, cache_bytes: int | None = None):
        super().__init__(path, cache_bytes=cache_bytes)
        self._digests = digest.read_digests(self.files)
        sums = hashlib.sha256((self.files / SUMS).read_bytes()).hexdigest()
        if read_json(self.path, COMMIT).get("sums") != sums:
            raise damaged(self.path, f"{COMMIT} and {SUMS} do not belong together")
        self._indices: dict[str, dict[str, Any]] = {}
        self._index_mutex = threading.Lock()
        self._chunk = functools.lru_cache(self._cache_bytes // PIECE_BYTES)(self._read_chunk)

    def check(self, names: Iterable[str]) -> None:
        """Check that every object is there that reading these arrays needs. A read checks their contents.

        Cost: process 0 lists the objects.

        Raises:
          ValueError: if objects are missing; lists them.
        """
        parts = sorted({part_of(name) for name in names})

        def find_missing() -> list[str]:
            there = self.files.walk()
            needed = [name for name in self._digests if digest.is_needed(name, parts)]
            missing = [f"{name} is missing" for name in needed if name not in there]
            return digest.find_undigested(parts, self._digests) or missing

        digest.raise_damage(self.path, only_first(find_missing))

    def _index(self, name: str) -> dict[str, Any]:
        """Return the shape and the entries of an array's chunks."""
        file = index_path(name)
        with self._index_mutex:
            if file not in self._indices:
                digest.raise_damage(self.path, digest.find_damage(self.files, [file], self._digests))
                self._indices[file] = read_json(self.files, file)
            return self._indices[file][name]

    def read(self, name: str, index: Index) -> np.ndarray:
        out = np.empty([part.stop - part.start for part in index], self.arrays[name].dtype)
        if not out.size:
            return out
        cell = self.chunk_shape(name)
        grid = [range(part.start // size, -(-part.stop // size)) for part, size in zip(index, cell, strict=True)]
        for place in itertools.product(*grid):
            dims = [(at * size, size, part) for at, size, part in zip(place, cell, index, strict=True)]
            # Slices may end behind the block and behind the chunk.
            outer = tuple(slice(max(at - part.start, 0), at + size - part.start) for at, size, part in dims)
            inner = tuple(slice(max(part.start - at, 0), part.stop - at) for at, _, part in dims)
            out[outer] = self._chunk(name, place)[inner]
        return out

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._index(name)["shape"])

    def _read_chunk(self, name: str, place: tuple[int, ...]) -> np.ndarray:
        shape, dtype = self.chunk_shape(name), self.arrays[name].dtype
        pack, start, crc = self._index(name)["chunks"].get(place_name(place), ("", 0, 0))
        key, size = f"{ARRAYS}/{part_of(name)}/{pack}", math.prod(shape) * dtype.itemsize
        try:
            data = (self.files / key).read_range(start, start + size)
        except FileNotFoundError:
            raise damaged(self.path, f"{key} is missing") from None
        except StoreError:
            if (self.files / key).stat().st_size >= start + size:
                raise
            data = b""
        if len(data) != size or zlib.crc32(data) != crc:
            raise damaged(self.path, f"{key} has changed since it was written (the CRC-32 of {name} differs)")
        return np.frombuffer(data, dtype).reshape(shape)
