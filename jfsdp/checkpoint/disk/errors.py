"""One kind of error for disks that are full or cannot be written, whatever library noticed it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def readable_errors(path: Any, needed: int | None = None) -> Iterator[None]:
    """Turn what storage libraries raise for a full or unwritable disk into an OSError that says what still stands.

    Args:
      needed: bytes that were to be written.
    """
    try:
        yield
    except Exception as error:
        for code, phrases in _DISK_ERRORS.items():
            if getattr(error, "errno", None) == code or any(phrase in str(error) for phrase in phrases):
                size = f"; it needs about {needed:,} bytes" if needed is not None and code == errno.ENOSPC else ""
                reason = f"checkpoint was not written ({phrases[0]}){size}; earlier checkpoints are untouched"
                raise OSError(code, reason, str(path)) from error
        raise


_DISK_ERRORS: dict[int, tuple[str, ...]] = {
    errno.ENOSPC: ("No space left on device", "ENOSPC", "RESOURCE_EXHAUSTED"),
    errno.EACCES: ("Permission denied", "PERMISSION_DENIED"),
    errno.EROFS: ("Read-only file system",),
    errno.EDQUOT: ("Disk quota exceeded",),
}


def check_path(path: Path) -> None:
    """Refuse a path that orbax cannot write to (0.12.8): it looks for what processes wrote by a pattern of names.

    Raises:
      ValueError: if there is a `[` in it.
    """
    if "[" in str(path):
        raise ValueError(
            f"checkpoint {path}: has a '[' in its path, which orbax takes for a pattern; choose another path"
        )


def check_space(path: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
      OSError: naming the bytes needed and free.
    """
    parent = next(p for p in [path, *path.parents] if p.exists())
    free = shutil.disk_usage(parent).free
    needed += needed // 50 + (1 << 20)  # what stands beside the arrays, and what a file system needs itself
    if needed > free:
        reason = f"checkpoint needs about {needed:,} bytes, {free:,} are free; nothing was written"
        raise OSError(errno.ENOSPC, f"{reason}, and earlier ones are untouched", str(path))


def check_writable(directory: Path) -> None:
    """Make a directory, and write into it, so that a read-only place is noticed before hours of training.

    Raises:
      OSError: naming the directory and the reason.
    """
    with readable_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0" * 4096)
            os.fsync(file.fileno())
