"""Write a state through orbax: each process what it owns, in logical shapes, with digests before the commit.

Orbax commits what its handlers wrote (barriers between processes, threads in the background); what is ours is the leaf
that it writes, `Pieces`: the parts of a logical array that this process owns, whatever the form in which the state
stores them. The directories that come out are orbax's own, and any orbax reads them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.future as futures
import tensorstore as ts

from jfsdp.checkpoint.disk.commit import IncompleteError, check_all_wrote, check_merged, commit, hash_own
from jfsdp.checkpoint.disk.files import ARRAYS, bytes_below, part_of
from jfsdp.checkpoint.disk.pieces import Pieces
from jfsdp.checkpoint.source import Index, cell_of

FILE_BYTES = 128 << 20
"""Chunks are gathered into files of about this size: they wait in memory until one is full, and a core hashes each."""

_LOADING = 8
"""So many pieces are loaded at once where they are read while they are written."""

_TIMEOUT_S = 24 * 3600
"""Orbax (0.12) gives up a checkpoint that takes longer than this, by itself after 20 minutes: too few for a large one
on a slow disk, and for a conversion, which reads while it writes."""


class _PiecesHandler(ocp.type_handlers.ArrayHandler):
    """What orbax calls to write `Pieces`; to who reads them they are arrays like any other."""

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
    """Writes each part of a state into its own directory, and hashes what this process wrote.

    Attributes:
      error: what went wrong in the background. It is kept, and raised by `Writer`: one that orbax sees in one process
        leaves the others waiting at its next barrier (orbax 0.12: for `_TIMEOUT_S`).
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
        with self.kept_errors():
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
        with self.kept_errors():
            check_all_wrote(Path(directory))
            for part in self._parts:
                self._handler.finalize(directory / part)
                check_merged(Path(directory / part))

    @contextlib.contextmanager
    def kept_errors(self) -> Iterator[None]:
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
    """What orbax waits for in the background: that everything of this process is written, and hashed after that."""

    handler: _StateHandler
    commits: list[Any]
    directory: Path

    def result(self, timeout: int | None = None) -> None:
        with self.handler.kept_errors():
            for commit in self.commits:
                commit.result(timeout=timeout)
            if self.handler.error is None:
                hash_own(self.directory)


_WRITERS: weakref.WeakSet[Writer] = weakref.WeakSet()


def _finish_all() -> None:
    """Wait for what is still being written when a program ends without `close`."""
    for writer in list(_WRITERS):
        try:
            if not writer.wait():
                print("jfsdp: the last checkpoint was not written: another process failed", file=sys.stderr)
        except Exception as error:
            print(f"jfsdp: the last checkpoint was not written: {error}", file=sys.stderr)


# `atexit` is too late: by then thread pools take no more work, and orbax gives them some. Python has no other place
# that is early enough (looked for in 3.11 to 3.14).
getattr(threading, "_register_atexit", atexit.register)(_finish_all)


class Writer:
    """Writes checkpoints one after the other, each in the background. No program ends before they are written."""

    def __init__(self) -> None:
        options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S, create_directories_asynchronously=False)
        self._handler = _StateHandler()
        self._orbax = ocp.AsyncCheckpointer(self._handler, async_options=options)
        self._thread: threading.Thread | None = None
        self._partial: Path | None = None
        self._error: BaseException | None = None
        _WRITERS.add(self)

    def start(
        self, partial: Path, path: Path, arrays: Mapping[str, Pieces], documents: Mapping[str, Any],
        on_commit: Callable[[], Any] = lambda: None, before_commit: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        """Begin to write a checkpoint; it stands at `path` once it is complete. Every process calls this.

        Args:
          partial: the directory to write into, beside `path`; process 0 has made it.
          documents: by file name, what stands beside the arrays.
          before_commit: called in process 0 when all arrays are written; what it raises leaves no checkpoint.
          on_commit: called in process 0 once the checkpoint is complete.
        """
        self._partial = partial
        self._orbax.save(partial / ARRAYS, _SaveState(arrays))

        def finish() -> None:
            try:
                self._orbax.wait_until_finished()
                if self._handler.error is not None:
                    raise self._handler.error
                if jax.process_index() == 0:
                    before_commit()
                    commit(partial, path, documents)
                    on_commit()
            except BaseException as error:  # raised by `wait`, in the thread that is listened to
                self._error = error

        self._thread = threading.Thread(target=finish, name="jfsdp-checkpoint")
        self._thread.start()

    def wait(self) -> bool:
        """Wait until what was begun is complete; raise what went wrong with it in this process.

        Returns:
          False where another process could not write its part.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, IncompleteError):
            return False
        if error is not None:
            raise error
        return True

    def num_bytes(self) -> int:
        """Return how many bytes of what is being written are on disk, of all processes that share it."""
        return 0 if self._partial is None else bytes_below(self._partial)

    def remove_unfinished(self) -> None:
        """Remove what was half written; process 0 does, after its own `wait`."""
        if self._partial is not None and jax.process_index() == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def close(self) -> None:
        """Wait, and stop the threads. What did not become whole is removed."""
        try:
            if not self.wait():
                self.remove_unfinished()
        except Exception:
            self.remove_unfinished()
            raise
        finally:
            self._orbax.close()
