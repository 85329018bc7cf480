"""A checkpoint on disk as a source of arrays: named, checked, and read by slices."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.checkpoint.disk.digest import check_documents, find_damage, find_unnamed, is_of, raise_damage, read_digests
from jfsdp.checkpoint.disk.files import ARRAYS, damaged, part_of, read_manifest
from jfsdp.checkpoint.disk.paths import local_path
from jfsdp.checkpoint.disk.processes import together
from jfsdp.checkpoint.source import Index

CACHE_BYTES = 256 << 20
"""What is kept of chunks that several slices need, when many devices' slices are read at once."""

STREAM_BYTES = 64 << 20
"""The same where an array is read once, piece after piece: more makes it slower, and holds memory in fragments."""


class CheckpointSource:
    """The arrays of a complete checkpoint. Making it checks the documents; `check`, before they are read, the arrays.

    Args:
      cache_bytes: of chunks that were read, how much is kept; None: `CACHE_BYTES`.

    Raises:
      ValueError: if there is no complete checkpoint at `path`, or it is of another format.
    """

    def __init__(self, path: Any, *, cache_bytes: int | None = None):
        self._cache_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
        self.path = local_path(path)
        check_documents(self.path)
        self.manifest = read_manifest(self.path)
        self._stores: dict[str, Any] = {}
        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(tuple(entry["shape"]), jnp.dtype(entry["dtype"]))
            for name, entry in self.manifest["arrays"].items()
        }

    @property
    def key_impls(self) -> dict[str, str | None]:
        """By name, the rng implementation of arrays that are the data of keys."""
        return {name: entry["key_impl"] for name, entry in self.manifest["arrays"].items()}

    def stated(self, *names: str) -> Any:
        """Return what is under nested names in the `config` it was saved with, which may be any JSON; None: nothing."""
        found = self.manifest["config"]
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def check(self, names: Iterable[str]) -> None:
        """Check every file that reading these arrays needs; the processes share the work. Every process calls this.

        Cost: each of these files is read once by one of the processes.

        Raises:
          ValueError: listing the files that are damaged.
        """
        parts = sorted({part_of(name) for name in names})

        def check_share() -> list[str]:
            digests = read_digests(self.path)
            files = [name for name in digests if is_of(name, parts)]
            mine = files[jax.process_index() :: jax.process_count()]
            return find_unnamed(parts, digests) or find_damage(self.path, mine, digests)

        raise_damage(self.path, sorted({line for lines in together(check_share) for line in lines}))

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

        # Not a URL: in one, the characters % # ? of a path mean something else.
        base = {"driver": "file", "path": f"{self.path / ARRAYS / part_of(name)}/"}
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
            "fill_missing_data_reads": False,  # a chunk that is gone is an error, and not zeros
        }
        self._stores[name] = ts.open(spec, open=True, read=True, context=self._context).result()
        return self._stores[name]

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the pieces in which an array is stored: to read whole ones is cheapest.

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
