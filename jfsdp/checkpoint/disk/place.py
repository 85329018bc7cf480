"""Directories of checkpoints on a file system: their steps, locks and removal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from jfsdp.checkpoint.disk.errors import check_path, readable_errors
from jfsdp.checkpoint.disk.files import UNFINISHED
from jfsdp.checkpoint.disk.lock import Lock
from jfsdp.checkpoint.writer import Writer

_DELETED, _LOCK = "to-delete", "lock"


def make_writer(lock: Lock | None) -> Writer:
    """Return a writer of checkpoints. In process 0 it needs a lock of their directory or path."""
    from jfsdp.checkpoint.disk.writer import DiskWriter

    return DiskWriter(lock)


def prepare(directory: Path) -> None:
    """Create a directory of checkpoints, if it is missing."""
    check_path(directory)
    with readable_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)


def is_free(path: Path) -> bool:
    """Return whether nothing exists at a path."""
    return not path.exists()


def lock_path(path: Path) -> Lock:
    """Lock a new checkpoint path for this process."""
    check_path(path)
    with readable_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f"{path.name}{UNFINISHED}.lock")
        return Lock(file, f"checkpoint {path}: is being written by", "or choose another path")


def lock(directory: Path) -> Lock:
    """Lock a directory of checkpoints for this process, and remove the incomplete files of a killed writer.

    Raises:
      ValueError: if another run writes to the directory.
    """
    with readable_errors(directory):
        held = Lock(directory / _LOCK, f"checkpoints {directory}: are written by", "or save to another directory")
    for partial in [*directory.glob(f"*{UNFINISHED}"), *directory.glob("*.orbax-checkpoint-tmp*")]:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(directory / _DELETED, ignore_errors=True)
    return held


def has_unfinished(directory: Path) -> bool:
    """Return whether a killed writer may have left incomplete files."""
    return any(directory.glob(f"*{UNFINISHED}"))


def remove(directory: Path, steps: Sequence[int]) -> None:
    """Delete steps. They are moved aside first, so a killed process leaves no incomplete step."""
    aside = directory / _DELETED
    for step in steps:
        aside.mkdir(exist_ok=True)
        os.rename(directory / str(step), aside / str(step))
    shutil.rmtree(aside, ignore_errors=True)


def move(path: Path, target: Path) -> None:
    """Move a checkpoint."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, target)
