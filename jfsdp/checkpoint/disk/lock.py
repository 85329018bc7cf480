"""A file that one process holds as long as it lives, so that two runs do not write into one place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
from pathlib import Path
from typing import IO


class Lock:
    """A lock file, held from when this is made until `release`, or until the process ends.

    Args:
      what: what the error says before the holder, such as "checkpoint x: is being written by".
      remedy: what it says besides waiting.

    Raises:
      ValueError: if another process holds it; names that.
    """

    def __init__(self, path: Path, what: str, remedy: str):
        self._path = path
        self._file = path.open("ab+", buffering=0)
        if not _lock(self._file) or not self._is_still():
            self._file.seek(0)
            holder = self._file.read().decode().strip() or "another process"
            self._file.close()
            raise ValueError(f"{what} {holder}; wait for it, {remedy}")
        self._file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk: the lock does not name its process
            self._file.write(f"process {os.getpid()} on {platform.node()}".encode())

    def release(self) -> None:
        """Give the lock up and remove the file, if its directory can still be written: only an open file locks."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._file.close()

    def _is_still(self) -> bool:
        """Tell whether the locked file is the one at its path: the holder before may just have removed it."""
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
            raise  # else: a file system without locks, on which users have to take care themselves
    return True
