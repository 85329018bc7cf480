"""Writing checkpoints in the background, to disk or to an object store."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jfsdp.checkpoint.disk.errors import readable_errors
from jfsdp.checkpoint.disk.pieces import Pieces
from jfsdp.checkpoint.disk.processes import in_all, only_first
from jfsdp.objects.path import AnyPath, as_path


class IncompleteError(Exception):
    """Another process did not write its part; that process raises the cause."""


_WRITERS: weakref.WeakSet[Writer] = weakref.WeakSet()


def _finish_all() -> None:
    """Wait for unfinished checkpoints when a program ends without `close`."""
    for writer in list(_WRITERS):
        try:
            if not writer.wait():
                print("jfsdp: the last checkpoint was not written: another process failed", file=sys.stderr)
        except Exception as error:
            print(f"jfsdp: the last checkpoint was not written: {error}", file=sys.stderr)


# `atexit` is too late, because thread pools then accept no more work and orbax still submits some. Python has no other
# hook that is early enough (searched in 3.11 to 3.14).
getattr(threading, "_register_atexit", atexit.register)(_finish_all)


class Writer:
    """Writes checkpoints in the background, one after the other. The program does not end before they are written.

    Args:
      lock: on the directory that is written to, in process 0.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._thread: threading.Thread | None = None
        self._path: Any = None
        self._partial: Any = None
        self._error: BaseException | None = None
        _WRITERS.add(self)

    def start(
        self, path: AnyPath, load: Callable[[], Mapping[str, Pieces]], documents: Mapping[str, Any], num_bytes: int,
        on_commit: Callable[[], Any] = lambda: None, before_commit: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        """Begin to write a checkpoint, which appears at `path` when it is complete. Every process must call this.

        Args:
          load: returns the arrays. If it fails in a process, for example without memory, all raise.
          documents: contents of the JSON files, by file name.
          num_bytes: bytes of the arrays, over all processes.
          before_commit: called in process 0 when all arrays are written. If it raises, nothing appears there.
          on_commit: called in process 0 when the checkpoint is complete.
        """
        self._path, self._needed = path, num_bytes
        self._partial = as_path(only_first(lambda: str(self.prepare(path, num_bytes))))
        in_all(self.check_process)
        arrays = in_all(load)
        with readable_errors(path, num_bytes):
            wait = self.begin(arrays)

        def finish() -> None:
            try:
                wait()
                if jax.process_index() == 0:
                    before_commit()
                    self.commit(path, documents)
                    on_commit()
            except BaseException as error:  # `wait` raises it in the caller's thread
                self._error = error

        self._thread = threading.Thread(target=finish, name="jfsdp-checkpoint")
        self._thread.start()

    def prepare(self, path: AnyPath, needed: int) -> AnyPath:
        """Prepare an unfinished checkpoint of `needed` bytes, in process 0; return where to write it."""
        raise NotImplementedError

    def check_process(self) -> None:
        """Check that this process can write."""

    def begin(self, arrays: Mapping[str, Pieces]) -> Callable[[], Any]:
        """Begin to write the arrays; return a function that waits for this process's part."""
        raise NotImplementedError

    def commit(self, path: AnyPath, documents: Mapping[str, Any]) -> None:
        """Write the documents, and make the checkpoint appear at its path, in process 0."""
        raise NotImplementedError

    def wait(self) -> bool:
        """Wait until the checkpoint is complete; raise this process's error.

        Returns:
          False if another process could not write its part.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, IncompleteError):
            return False
        if error is not None:
            with readable_errors(self._path, self._needed):
                raise error
        return True

    def num_bytes(self) -> int:
        """Return the bytes of the checkpoint in progress that are written, on disk over all processes."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the unfinished checkpoint."""
        raise NotImplementedError

    def remove_unfinished(self) -> None:
        """Remove the unfinished checkpoint; only process 0 does, after its own `wait`."""
        if self._partial is not None and jax.process_index() == 0:
            self.remove()

    def close(self) -> None:
        """Wait, and stop the threads. An unfinished checkpoint is removed."""
        is_complete = False
        try:
            is_complete = self.wait()
        finally:
            if not is_complete:
                self.remove_unfinished()
            self.stop()

    def stop(self) -> None:
        """Stop the threads."""
