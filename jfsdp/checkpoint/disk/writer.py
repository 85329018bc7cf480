"""Writing states through orbax: each process its own pieces, in logical shapes, with digests before the commit.

Orbax commits the files that its handlers wrote, with barriers between processes and threads in the background. jfsdp
adds the leaf type `Pieces`: the parts of a logical array that this process writes, for any storage form of the state.
The directories are regular orbax checkpoints that any orbax reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.future as futures
import tensorstore as ts

from jfsdp.checkpoint.disk.commit import check_all_wrote, check_merged, commit, hash_local_files
from jfsdp.checkpoint.disk.errors import check_open_files, check_space, readable_errors
from jfsdp.checkpoint.disk.files import ARRAYS, UNFINISHED, bytes_below, part_of
from jfsdp.checkpoint.disk.pieces import Pieces
from jfsdp.checkpoint.source import Index, cell_of
from jfsdp.checkpoint.writer import Writer

FILE_BYTES = 128 << 20
"""Approximate size of the files that combine chunks. Chunks wait in memory until a file is full; a core hashes each."""

_LOADING = 8
"""Number of pieces that are loaded at once, if they are read while they are written."""

_TIMEOUT_S = 24 * 3600
"""Time limit of orbax (0.12) for a checkpoint. Its default of 20 minutes is too short for a large checkpoint on a slow
disk, and for a conversion, which reads while it writes."""


class _PiecesHandler(ocp.type_handlers.ArrayHandler):
    """Type handler with which orbax writes `Pieces`; readers see ordinary arrays."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[Any]:
        loading = asyncio.Semaphore(_LOADING)

        async def write_part(store: Any, index: Index, part: Any) -> None:
            if isinstance(part, np.ndarray):
                await store[index].write(part, can_reference_source_data_indefinitely=True)
                return
            async with loading:
                await store[index].write(await asyncio.to_thread(part), can_reference_source_data_indefinitely=True)

        async def write(pieces: Pieces, info: Any) -> None:
            spec = ocp.type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=True,
                global_shape=pieces.shape,
                local_shape=cell_of(pieces.block, pieces.dtype.itemsize, shape=pieces.shape),
                dtype=pieces.dtype,
                process_index=jax.process_index(),
                arg=ocp.SaveArgs(),
            )
            store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
            await asyncio.gather(*[write_part(store, *part) for part in pieces.parts])

        async def write_all() -> None:
            await asyncio.gather(*[write(*pair) for pair in zip(values, infos, strict=True) if all(pair[0].shape)])

        return [futures.CommitFutureAwaitingContractedSignals(write_all(), name="pieces")]


class _StateHandler(ocp.AsyncCheckpointHandler):
    """Writes each part of a state into a separate directory, and hashes the files of this process.

    Attributes:
      error: the first error in the background. `Writer` raises it. If one process raised it in orbax, the others would
        wait at the next barrier (orbax 0.12: for `_TIMEOUT_S`).
    """

    def __init__(self) -> None:
        registry = ocp.type_handlers.create_type_handler_registry(
            (Pieces, _PiecesHandler()),
            (jax.Array, ocp.type_handlers.ArrayHandler()),  # orbax warns if there is none
        )
        self._handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        self.error: BaseException | None = None

    async def async_save(self, directory: Any, args: _SaveState) -> Any:
        parts: dict[str, dict[str, Pieces]] = {}
        for name, pieces in args.arrays.items():
            parts.setdefault(part_of(name), {})[name] = pieces
        commits: list[Any] = []
        self._parts, self.error = tuple(parts), None
        with self.stored_errors():
            for part, arrays in parts.items():
                where = directory / part
                where.mkdir(exist_ok=True)
                save = ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=FILE_BYTES)
                commits += await self._handler.async_save(where, args=save) or []
        return [_Commit(self, commits, Path(directory))]

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("states are written asynchronously, and read by jfsdp.checkpoint.disk.reader")

    restore = save

    def finalize(self, directory: Any) -> None:
        with self.stored_errors():
            check_all_wrote(Path(directory))
            for part in self._parts:
                self._handler.finalize(directory / part)
                check_merged(Path(directory / part))

    @contextlib.contextmanager
    def stored_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error

    def close(self) -> None:
        self._handler.close()


@ocp.args.register_with_handler(_StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SaveState(ocp.args.CheckpointArgs):
    arrays: Mapping[str, Pieces]


@dataclasses.dataclass
class _Commit:
    """Future that orbax waits for in the background: all files of this process are written, and then hashed."""

    handler: _StateHandler
    commits: list[Any]
    directory: Path

    def result(self, timeout: int | None = None) -> None:
        with self.handler.stored_errors():
            for commit in self.commits:
                commit.result(timeout=timeout)
            if self.handler.error is None:
                hash_local_files(self.directory)


class DiskWriter(Writer):
    """Writes to disk through orbax."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S, create_directories_asynchronously=False)
        self._handler = _StateHandler()
        self._orbax = ocp.AsyncCheckpointer(self._handler, async_options=options)

    def prepare(self, path: Any, needed: int) -> Path:
        partial = path.with_name(path.name + UNFINISHED)
        check_space(path, needed - bytes_below(partial))  # an earlier unfinished checkpoint is removed
        with readable_errors(path, needed):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        return partial

    def check_process(self) -> None:
        check_open_files(self._path)

    def begin(self, arrays: Mapping[str, Pieces]) -> Callable[[], Any]:
        self._orbax.save(self._partial / ARRAYS, _SaveState(arrays))

        def wait() -> None:
            self._orbax.wait_until_finished()
            if self._handler.error is not None:
                raise self._handler.error

        return wait

    def commit(self, path: Any, documents: Mapping[str, Any]) -> None:
        commit(self._partial, path, documents)

    def num_bytes(self) -> int:
        return 0 if self._partial is None else bytes_below(self._partial)

    def remove(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def stop(self) -> None:
        self._orbax.close()
