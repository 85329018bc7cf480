"""Verification of a checkpoint: digests of files, chunks of arrays, non-finite values."""

from __future__ import annotations

import dataclasses
from typing import Any

from jfsdp.checkpoint.disk.digest import find_damage, find_undigested, list_files, read_digests
from jfsdp.checkpoint.disk.files import ARRAYS, COMMIT, SUMS, DamagedError, bytes_below, part_of
from jfsdp.checkpoint.disk.paths import absolute_path
from jfsdp.checkpoint.finite import Counted
from jfsdp.checkpoint.objects.reader import open_checkpoint
from jfsdp.checkpoint.source import PIECE_BYTES, Progress, grid, ignore_progress

MEMORY_BYTES = 16 * PIECE_BYTES
"""Maximum host memory of verification, in addition to the program: a few chunks, and as much again in fragments."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Attributes:
      problems: one line per problem; empty if the checkpoint is intact and all values are finite.
      is_damaged: whether a file is damaged; False if the only problems are non-finite values.
      remarks: harmless irregularities.
      num_files, num_bytes, num_arrays: what was verified.
    """

    problems: tuple[str, ...]
    is_damaged: bool
    remarks: tuple[str, ...]
    num_files: int
    num_bytes: int
    num_arrays: int

    @property
    def is_ok(self) -> bool:
        return not self.problems


def verify(path: Any, *, progress: Progress = ignore_progress) -> Verified:
    """Check every file against its digest, then read every chunk of every array and count non-finite values.

    Memory:  `MEMORY_BYTES`.

    Args:
      path: one checkpoint.
      progress: called with the name of a file or array and the bytes verified.

    Raises:
      ValueError: if there is no checkpoint.
    """
    path = absolute_path(path)
    try:
        source = open_checkpoint(path, cache_bytes=0)
        digests = read_digests(source.files)
    except ValueError as error:
        is_there = any((path / name).exists() for name in (COMMIT, SUMS, ARRAYS))
        if not is_there and not isinstance(error, DamagedError):
            raise
        return Verified((str(error),), True, (), 0, 0, 0)
    parts = {part_of(name) for name in source.arrays}
    problems = find_undigested(sorted(parts), digests) + find_damage(source.files, digests, digests, progress)
    files = list_files(source.files)
    remarks = [f"{name} is not part of the checkpoint" for name in files if name not in digests]
    counted = Counted(source)
    for name in source.arrays if not problems else ():
        try:
            for index in grid(source.arrays[name].shape, source.chunk_shape(name)):
                progress(name, counted.read(name, index).nbytes)
        except ValueError as error:
            problems.append(str(error))
    num_bytes = bytes_below(source.files)
    lines = (*problems, *counted.lines())
    return Verified(lines, bool(problems), tuple(remarks), len(files), num_bytes, len(source.arrays))
