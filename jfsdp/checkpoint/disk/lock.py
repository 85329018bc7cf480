"""A lock file, so that two processes do not write into one directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
from pathlib import Path
from typing import IO


class Lock:
    """An exclusive lock on a file, from construction until `release` or the end of the process.

    Args:
      what: beginning of the error, before the owner, such as "checkpoint x: is being written by".
      remedy: end of the error, after the advice to wait.

    Raises:
      ValueError: if another process has the lock; names that process.
    """

    def __init__(self, path: Path, what: str, remedy: str):
        self._path = path
        self._file = path.open("ab+", buffering=0)
        if not _lock(self._file) or not self._is_at_path():
            self._file.seek(0)
            owner = self._file.read().decode().strip() or "another process"
            self._file.close()
            raise ValueError(f"{what} {owner}; wait for it, {remedy}")
        self._file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk: the lock file does not name its process
            self._file.write(f"process {os.getpid()} on {platform.node()}".encode())

    def release(self) -> None:
        """Release the lock and remove the file if its directory is writable. A file that remains does not lock."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._file.close()

    def _is_at_path(self) -> bool:
        """Return whether the locked file is still at its path; the previous owner may have just removed it."""
        try:
            return os.fstat(self._file.fileno()).st_ino == self._path.stat().st_ino
        except FileNotFoundError:
            return False


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            raise  # other errors: the file system has no locks, and users must avoid two writers
    return True
