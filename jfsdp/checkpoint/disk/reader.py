"""A checkpoint on disk as a source of arrays."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jfsdp.checkpoint.disk import digest
from jfsdp.checkpoint.disk.files import ARRAYS, content_path, damaged, part_of, read_manifest
from jfsdp.checkpoint.disk.logical_arrays import read_shapes
from jfsdp.checkpoint.disk.paths import absolute_path
from jfsdp.checkpoint.disk.processes import together
from jfsdp.checkpoint.source import Index

CACHE_BYTES = 256 << 20
"""Size of the cache of chunks, when the slices of many devices are read at once and share chunks."""

STREAM_BYTES = 64 << 20
"""Size of the cache when arrays are read once, in pieces. A larger one is slower and fragments memory."""


class CheckpointSource:
    """The arrays of a complete checkpoint. Creation checks the documents; `check` checks the arrays before reading.

    Args:
      cache_bytes: size of the cache of chunks; None: `CACHE_BYTES`.

    Raises:
      ValueError: if there is no complete checkpoint at `path`, or it has another format.
    """

    def __init__(self, path: Any, *, cache_bytes: int | None = None):
        self._cache_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
        self.path = absolute_path(path)
        self.files = content_path(self.path)
        digest.check_documents(self.files)
        self.manifest = read_manifest(self.path)
        self._stores: dict[str, Any] = {}
        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = read_shapes(self.manifest["arrays"])

    @property
    def key_impls(self) -> dict[str, str | None]:
        """The rng implementation of each array that is the data of random keys, by name; None for other arrays."""
        return {name: entry["key_impl"] for name, entry in self.manifest["arrays"].items()}

    def stated(self, *names: str) -> Any:
        """Return the value under nested names in the saved `config`, which may be any JSON; None if there is none."""
        found = self.manifest["config"]
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def check(self, names: Iterable[str]) -> None:
        """Check every file that reading these arrays needs. Processes share the work; every process must call this.

        Cost: one of the processes reads each of these files once.

        Raises:
          ValueError: if files are damaged; lists them.
        """
        parts = sorted({part_of(name) for name in names})

        def check_share() -> list[str]:
            digests = digest.read_digests(self.files)
            files = [name for name in digests if digest.is_needed(name, parts)]
            mine = files[jax.process_index() :: jax.process_count()]
            return digest.find_undigested(parts, digests) or digest.find_damage(self.files, mine, digests)

        digest.raise_damage(self.path, sorted({line for lines in together(check_share) for line in lines}))

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one array.

        Raises:
          ValueError: if it cannot be read.
        """
        shape = tuple(part.stop - part.start for part in index)
        if not math.prod(shape):
            return np.zeros(shape, self.arrays[name].dtype)
        with self._readable_errors(name):
            return np.asarray(self._open(name)[index].read().result())

    @contextlib.contextmanager
    def _readable_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError, IndexError) as error:
            reason = str(error).partition(" [tensorstore_spec")[0]
            raise damaged(self.path, f"{name} cannot be read: {reason}") from error

    def _open(self, name: str) -> Any:
        if name in self._stores:
            return self._stores[name]
        import tensorstore as ts

        # Not a URL, in which the characters % # ? of a path have other meanings.
        base = {"driver": "file", "path": f"{self.path / ARRAYS / part_of(name)}/"}
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
            "fill_missing_data_reads": False,  # a missing chunk is an error, not zeros
        }
        self._stores[name] = ts.open(spec, open=True, read=True, context=self._context).result()
        return self._stores[name]

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the stored chunks. Reading whole chunks is cheapest.

        Raises:
          ValueError: if it cannot be read.
        """
        shape = self.arrays[name].shape
        if not math.prod(shape):
            return shape
        with self._readable_errors(name):
            return tuple(self._open(name).chunk_layout.read_chunk.shape or ())

    @functools.cached_property
    def _context(self) -> Any:
        import tensorstore as ts

        return ts.Context({"cache_pool": {"total_bytes_limit": self._cache_bytes}})
