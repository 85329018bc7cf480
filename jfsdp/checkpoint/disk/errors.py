"""Readable errors for disks that are full or not writable, from any library."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jfsdp.compat import warn
from jfsdp.objects.path import StoreError

OPEN_FILES = 48
"""Open files that a save may need. A save of 160 arrays succeeded with 40 left, and failed with 24 (orbax 0.12)."""


@contextlib.contextmanager
def readable_errors(path: Any, needed: int | None = None) -> Iterator[None]:
    """Convert errors of storage libraries about full or unwritable disks to an OSError about the checkpoint.

    Args:
      needed: bytes to be written.
    """
    try:
        yield
    except StoreError:
        raise
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
    """Check that orbax can write to a path: it finds the files of processes by a glob (0.12.8).

    Raises:
      ValueError: if the path contains a `[`.

    Warns:
      UserWarning: for an object store that is mounted as a directory.
    """
    if kind := _mounted_store(path):
        warn(
            f"checkpoint {path}: is in an object store, mounted by {kind}, which renames by copying, and may leave "
            "half of a checkpoint under its name; pass the address of the store, such as s3://BUCKET/PATH"
        )
    if "[" in str(path):
        raise ValueError(f"checkpoint {path}: has a '[' in its path, which orbax reads as a pattern; choose another")


def _mounted_store(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of file system of a path if it is an object store mounted by FUSE, else ""."""
    with contextlib.suppress(OSError):
        rows = (line.split() for line in mounts.read_text().splitlines())
        kinds = {row[1].replace("\\040", " "): row[2] for row in rows}
        kind = kinds.get(max((place for place in kinds if path.is_relative_to(place)), key=len, default=""), "")
        return kind if any(name in kind for name in _STORE_MOUNTS) else ""
    return ""


_STORE_MOUNTS = ("s3fs", "gcsfuse", "mountpoint-s3", "goofys", "geesefs", "rclone", "blobfuse")


def check_space(path: Path, needed: int) -> None:
    """Check that the disk has enough free space.

    Raises:
      OSError: if not; names the bytes needed and free.
    """
    parent = next(p for p in [path, *path.parents] if p.exists())
    free = shutil.disk_usage(parent).free
    needed += needed // 50 + (1 << 20)  # JSON files, and overhead of the file system
    if needed > free:
        reason = f"checkpoint needs about {needed:,} bytes, {free:,} are free; nothing was written"
        raise OSError(errno.ENOSPC, f"{reason}, and earlier ones are untouched", str(path))


def check_open_files(path: Path) -> None:
    """Check that enough file descriptors are left. Orbax fails late and in background threads without them.

    Raises:
      OSError: if not; names the number of open files and the limit.
    """
    descriptors, limit = Path("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir(descriptors)) if descriptors.is_dir() else 0
    if limit != resource.RLIM_INFINITY and limit - used < OPEN_FILES:
        reason = f"checkpoint needs {OPEN_FILES} open files, and {used} of {limit} are open; raise the limit: ulimit -n"
        raise OSError(errno.EMFILE, f"{reason}. Nothing was written", str(path))
