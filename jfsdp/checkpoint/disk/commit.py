"""From what the processes wrote to one checkpoint: digests of every file, everything synced, and its name last."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jfsdp.checkpoint.disk.digest import Digests, hash_files, list_files, write_digests
from jfsdp.checkpoint.disk.files import ARRAYS, sync, write_json


class IncompleteError(Exception):
    """A process did not write its part; it knows why."""


def hash_own(arrays: Path) -> None:
    """Hash what this process wrote, and leave the digests for `commit`."""
    mine = f"ocdbt.process_{jax.process_index()}/"
    names = [name for name in list_files(arrays) if name.partition("/")[2].startswith(mine)]
    marks = {name: _mark(arrays / name) for name in names}
    digests = hash_files(arrays, names)
    found = {name: [digests[name], *marks[name]] for name in names}
    write_json(_digests_of(arrays, jax.process_index()), found)


def _mark(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def commit(partial: Path, path: Path, documents: Mapping[str, Any]) -> None:
    """Write what stands beside the arrays and the digests of all files, and give the checkpoint its name."""
    hashed = _take_digests(partial / ARRAYS)
    for name, value in documents.items():
        write_json(partial / name, value)
    rest = [name for name in list_files(partial) if name not in hashed]
    write_digests(partial, hashed | hash_files(partial, rest))
    for name in list_files(partial):
        sync(partial / name)  # orbax syncs the arrays, and not what it writes beside them
    for directory, _, _ in os.walk(partial):
        sync(Path(directory))
    if path.exists():
        raise ValueError(f"checkpoint {path}: was made by somebody else meanwhile; nothing is overwritten")
    os.rename(partial, path)
    sync(path.parent)


def check_all_wrote(arrays: Path) -> None:
    for index in range(jax.process_count()):
        if not _digests_of(arrays, index).exists():
            raise IncompleteError(index)


def check_merged(part: Path) -> None:
    """Refuse to commit what orbax left in parts: it only warns where it finds nothing to merge, and nothing is read."""
    names = [path.name for path in part.iterdir()]
    if any(name.startswith("ocdbt.process_") for name in names) and "manifest.ocdbt" not in names:
        raise OSError(errno.EIO, "orbax did not merge what the processes wrote", str(part))


def _digests_of(arrays: Path, index: int) -> Path:
    """Return the file in which a process says what it wrote, until all is committed."""
    return arrays / f"digests.{index}.json"


def _take_digests(arrays: Path) -> Digests:
    """Collect the digests that each process took of its own files, as far as these are as they were then."""
    found: Digests = {}
    for index in range(jax.process_count()):
        file = _digests_of(arrays, index)
        try:
            hashed = json.loads(file.read_text())
        except (FileNotFoundError, ValueError) as error:
            raise IncompleteError(index) from error
        for name, (digest, *mark) in hashed.items():
            if digest and (arrays / name).exists() and _mark(arrays / name) == mark:
                found[f"{ARRAYS}/{name}"] = digest
        file.unlink()
    return found
