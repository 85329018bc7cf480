"""Writing checkpoints to an object store.

    <path>/COMMIT              the name of the prefix with the objects of this checkpoint, and the digest of SHA256SUMS
    <path>/<random>/           the files of a checkpoint, as on disk (see disk/files.py), with arrays of another form:
      arrays/params/0-12.bin   a pack: chunks of arrays, one after the other, without compression; here the 12th pack of
                               process 0
      arrays/params/index.json of each array the shape of its chunks; of each chunk its pack, its offset and its CRC-32

[Note: commits in an object store]
Every save writes under a new random prefix, so nothing is written over, and late writes of a dead process change
nothing. Each process hashes a chunk in memory before it is sent, and reports name, size, digest and the store's tag of
its objects. Process 0 compares the reports with the store's listing, writes documents and digests, renews its lease,
and then creates COMMIT if there is none. Readers see only checkpoints with a COMMIT; removal begins with it.
A process that is paused between the renewal and COMMIT for longer than a lease lasts finds out at its next renewal,
right after COMMIT, and removes it again. The next process that has the lease removes prefixes that no COMMIT names, an
hour after their last object, so a COMMIT request that arrives late, from a dead process, still names whole objects.

Arrays are not written by orbax, which has no driver for S3, nor by tensorstore, which does not return the bytes that it
writes: a digest would need to read them again, and reads would not be checked. Packs keep the number of objects small:
a state of many arrays on many devices has hundreds of thousands of chunks.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import math
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jfsdp.checkpoint.disk.digest import digest_lines
from jfsdp.checkpoint.disk.files import ARRAYS, COMMIT, INDEX, SUMS, content_path, json_text, part_of
from jfsdp.checkpoint.disk.pieces import Pieces
from jfsdp.checkpoint.source import Index, cell_of, grid
from jfsdp.checkpoint.writer import IncompleteError, Writer
from jfsdp.compat import coordination_store
from jfsdp.objects.path import ChangedError, ObjectPath, StoreError

PACK_BYTES = 32 << 20
"""Size of an object with chunks of arrays; chunks are not cut."""

_TIMEOUT_MS = 24 * 3600 * 1000
_THREADS = 8
"""Number of packs that are sent at once. Each takes about twice its bytes of memory."""

Sent = tuple[int, str, str]  # size, digest and the store's tag of an object
Chunk = tuple[str, str, int, Callable[[], Any]]  # the array, the place of the chunk in its grid, size, its bytes


class ObjectWriter(Writer):
    """Writes to an object store."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="jfsdp-upload")
        self._num_bytes, self._may_be_there = 0, False

    def prepare(self, path: Any, needed: int) -> ObjectPath:
        return path / uuid.uuid4().hex  # nothing is written over

    def begin(self, arrays: Mapping[str, Pieces]) -> Callable[[], Any]:
        self._num_bytes, self._may_be_there = 0, False
        self._cells = {name: chunk_shape(pieces) for name, pieces in arrays.items()}
        parts: dict[str, list[Chunk]] = {}
        for name, pieces in arrays.items():
            parts.setdefault(part_of(name), []).extend(_chunks(name, pieces))
        index, tasks = jax.process_index(), []
        for part, chunks in parts.items():
            for number, pack in enumerate(_packs(chunks)):
                name = f"{index}-{number}.bin"
                tasks.append(self._pool.submit(self._send_pack, self._partial, part, name, pack))
        return functools.partial(self._finish, tasks)

    def _send_pack(self, partial: ObjectPath, part: str, pack: str, chunks: list[Chunk]) -> tuple[str, Sent, list[Any]]:
        """Send a pack; return its name, its size, digest and tag, and the entries of its chunks."""
        parts = [load() for *_, load in chunks]
        offsets = itertools.accumulate((len(data) for data in parts), initial=0)
        entries = [
            (name, place, [pack, offset, zlib.crc32(data)])
            for (name, place, _, _), data, offset in zip(chunks, parts, offsets, strict=False)
        ]
        name = f"{ARRAYS}/{part}/{pack}"
        return name, self._send(partial / name, b"".join(parts)), entries

    def _send(self, path: ObjectPath, data: bytes) -> Sent:
        tag = path.write_bytes(data)
        self._num_bytes += len(data)
        return len(data), hashlib.sha256(data).hexdigest(), tag["e_tag"]

    def _finish(self, tasks: list[Future[Any]]) -> None:
        """Wait for this process's packs, and report them to process 0."""
        store, index, count = coordination_store()
        key = f"jfsdp/saves/{self._partial.name}"
        try:
            report = [task.result() for task in tasks]
            if index:
                (self._partial / f"report.{index}.json").write_bytes(json_text(report))
                store.key_value_set(f"{key}/{index}", "written")
        except BaseException:
            for task in tasks:
                task.cancel()
            futures.wait(tasks)  # so that nothing is sent after the prefix is removed
            if index:
                store.key_value_set(f"{key}/{index}", "failed")
            raise
        self._report = report
        for other in range(1, count) if index == 0 else ():
            # If that process dies, JAX ends this one.
            if store.blocking_key_value_get(f"{key}/{other}", _TIMEOUT_MS) == "failed":
                raise IncompleteError(other)
            report = self._partial / f"report.{other}.json"
            self._report += json.loads(report.read_bytes())
            report.unlink()

    def commit(self, path: Any, documents: Mapping[str, Any]) -> None:
        partial, digests = self._partial, {}
        arrays: dict[str, Any] = {name: {"shape": cell, "chunks": {}} for name, cell in self._cells.items()}
        there = partial.walk()
        for pack, (size, digest, tag), entries in self._report:
            found = there.get(pack)
            if found and found["e_tag"] != tag:  # some stores list their tags in another form
                found = (partial / pack).entry()
            if found is None or (found["size"], found["e_tag"]) != (size, tag):
                raise OSError(errno.EIO, "the store has another object than was sent", str(partial / pack))
            digests[pack] = digest
            for name, place, entry in entries:
                arrays[name]["chunks"][place] = entry
        indices: dict[str, dict[str, Any]] = {}
        for name, array in arrays.items():
            indices.setdefault(index_path(name), {})[name] = array
        for name, value in {**documents, **indices}.items():
            digests[name] = self._send(partial / name, json_text(value))[1]
        sums = digest_lines(digests).encode()
        self._send(partial / SUMS, sums)
        self._lock.check()
        commit = {"content": partial.name, "sums": hashlib.sha256(sums).hexdigest()}
        self._may_be_there = True
        try:
            (path / COMMIT).create(json_text(commit))
        except FileExistsError:
            raise ValueError(f"checkpoint {path}: another process created it meanwhile; choose another path") from None
        except StoreError:
            if content_path(path) != partial:  # otherwise only the answer was lost
                raise
        try:
            self._lock.check()
        except ChangedError:  # this process was paused, and another one has the lease
            (path / COMMIT).unlink()
            raise

    def num_bytes(self) -> int:
        return self._num_bytes

    def remove(self) -> None:
        if not self._may_be_there:  # a COMMIT without an answer may still arrive; the next run cleans up
            self._partial.remove_below()

    def stop(self) -> None:
        self._pool.shutdown()


def index_path(name: str) -> str:
    """Return the path of the index with an array, relative to the files of the checkpoint."""
    return f"{ARRAYS}/{part_of(name)}/{INDEX}"


def place_name(place: Iterable[int]) -> str:
    """Return the name of a chunk: its place in the grid of the array's chunks."""
    return ".".join(map(str, place))


def chunk_shape(pieces: Pieces) -> tuple[int, ...]:
    """Return the shape of an array's chunks, such that none is in the pieces of two devices."""
    return cell_of(pieces.block, pieces.dtype.itemsize, shape=pieces.shape)


def _chunks(name: str, pieces: Pieces) -> Iterator[Chunk]:
    cell = chunk_shape(pieces)
    size = math.prod(cell) * pieces.dtype.itemsize
    for index, part in pieces.parts:
        for inner in grid(tuple(one.stop - one.start for one in index), cell):
            place = ((one.start + at.start) // size for one, at, size in zip(index, inner, cell, strict=True))
            yield name, place_name(place), size, functools.partial(_bytes_of, part, inner, cell)


def _packs(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Group chunks to packs of at most `PACK_BYTES`."""
    pack, total = list[Chunk](), 0
    for chunk in chunks:
        if pack and total + chunk[2] > PACK_BYTES:
            yield pack
            pack, total = [], 0
        pack.append(chunk)
        total += chunk[2]
    if pack:
        yield pack


def _bytes_of(part: Any, index: Index, cell: tuple[int, ...]) -> memoryview:
    """Return the bytes of a chunk. At the end of an array it is filled up with zeros."""
    block = (part if isinstance(part, np.ndarray) else part())[index]
    if block.shape != cell:
        block, inner = np.zeros(cell, block.dtype), block
        block[tuple(map(slice, inner.shape))] = inner
    return memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8))
