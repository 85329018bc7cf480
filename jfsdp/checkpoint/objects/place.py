"""Prefixes of checkpoints in an object store: their steps, leases and removal. See the note in writer.py."""

from __future__ import annotations

from collections.abc import Sequence

from jfsdp.checkpoint.disk.files import COMMIT, content_path
from jfsdp.checkpoint.writer import Writer
from jfsdp.objects.lease import Lease
from jfsdp.objects.path import ObjectPath

_LEASE = "lease"
GARBAGE_S = 3600.0
"""Seconds after which the objects of an incomplete save are removed. A request may arrive late, but not so late."""


def make_writer(lock: Lease | None) -> Writer:
    """Return a writer of checkpoints. In process 0 it needs a lease of their prefix or path."""
    from jfsdp.checkpoint.objects.writer import ObjectWriter

    return ObjectWriter(lock)


def prepare(directory: ObjectPath) -> None:
    """Check that the store answers."""
    directory.is_dir()


def is_free(path: ObjectPath) -> bool:
    """Return whether a path has no complete checkpoint."""
    return not (path / COMMIT).is_file()


def lock_path(path: ObjectPath) -> Lease:
    """Lease a new checkpoint path for this process."""
    lease = Lease(path / _LEASE, f"checkpoint {path}: is being written by", "or choose another path")
    _clean(path, lease.path)
    return lease


def lock(directory: ObjectPath) -> Lease:
    """Lease a prefix of checkpoints for this process, and remove the objects of incomplete saves.

    Raises:
      ValueError: if another run writes there.
    """
    lease = Lease(directory / _LEASE, f"checkpoints {directory}: are written by", "or save to another prefix")
    for path in directory.iterdir():
        if path.name.isdecimal():
            _clean(path, lease.path)
    return lease


def _clean(path: ObjectPath, lease: ObjectPath) -> None:
    """Remove what incomplete saves left at a path, an hour later by the clock of the store."""
    content, now = content_path(path), lease.entry()["last_modified"]
    for part in path.iterdir():
        if part.name not in (COMMIT, _LEASE, content.name):
            last = max(entry["last_modified"] for entry in part.walk().values())
            if (now - last).total_seconds() >= GARBAGE_S:
                part.remove_below()


def has_unfinished(directory: ObjectPath) -> bool:
    """Return whether a killed writer may have left incomplete saves; it takes as long to find out as to remove them."""
    return directory.is_dir()


def remove(directory: ObjectPath, steps: Sequence[int]) -> None:
    """Delete steps, each beginning with its COMMIT, so a killed process leaves no incomplete step."""
    for step in steps:
        (directory / str(step) / COMMIT).unlink()
        (directory / str(step)).remove_below()


def move(path: ObjectPath, target: ObjectPath) -> None:
    """Move a checkpoint, by copies inside the store."""
    content = content_path(path)
    for name in content.walk():
        (content / name).copy(target / content.name / name)
    (path / COMMIT).copy(target / COMMIT)
    remove(path.parent, [int(path.name)])
