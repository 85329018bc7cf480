"""One kind of error for disks that are full or cannot be written, whatever library noticed it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPEN_FILES = 48
"""As many as a save may open at a time; with 40 left, one of 160 arrays went well (orbax 0.12), and with 24 not."""


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
    errno.EMFILE: ("Too many open files",),
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
        raise ValueError(f"checkpoint {path}: has a '[' in its path, which orbax takes for a pattern; choose another")


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


def check_open_files(path: Path) -> None:
    """Refuse to begin with few file descriptors left: orbax meets their end in threads of its own, at great length.

    Raises:
      OSError: naming how many are open, and the limit.
    """
    there, limit = Path("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir(there)) if there.is_dir() else 0
    if limit != resource.RLIM_INFINITY and limit - used < OPEN_FILES:
        reason = f"checkpoint takes {OPEN_FILES} open files, and {used} of {limit} are open; raise the limit: ulimit -n"
        raise OSError(errno.EMFILE, f"{reason}. Nothing was written", str(path))
