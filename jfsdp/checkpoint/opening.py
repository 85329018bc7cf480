"""Opening a checkpoint where it is: on disk or in an object store."""

from __future__ import annotations

from typing import Any

from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.objects.path import is_address


def open_checkpoint(path: Any, *, cache_bytes: int | None = None) -> CheckpointSource:
    """Open a checkpoint; see `CheckpointSource`."""
    if is_address(path):
        from jfsdp.checkpoint.objects.reader import ObjectSource

        return ObjectSource(path, cache_bytes=cache_bytes)
    return CheckpointSource(path, cache_bytes=cache_bytes)
