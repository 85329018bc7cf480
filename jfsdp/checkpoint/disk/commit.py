"""Committing a checkpoint: digests of all files, sync to disk, and the rename at the end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jfsdp.checkpoint.disk.digest import Digests, hash_files, list_files, write_digests
from jfsdp.checkpoint.disk.files import ARRAYS, mark_of, sync, write_json
from jfsdp.checkpoint.writer import IncompleteError


def hash_local_files(arrays: Path) -> None:
    """Hash the files that this process wrote, and save the digests for `commit`."""
    mine = f"ocdbt.process_{jax.process_index()}/"
    names = [name for name in list_files(arrays) if name.partition("/")[2].startswith(mine)]
    marks = {name: mark_of(arrays / name) for name in names}
    digests = hash_files(arrays, names)
    found = {name: [digests[name], *marks[name]] for name in names}
    write_json(_digests_of(arrays, jax.process_index()), found)


def commit(partial: Path, path: Path, documents: Mapping[str, Any]) -> None:
    """Write the documents and the digests of all files, sync everything, and rename the checkpoint to its path."""
    hashed = _take_digests(partial / ARRAYS)
    for name, value in documents.items():
        write_json(partial / name, value)
    rest = [name for name in list_files(partial) if name not in hashed]
    write_digests(partial, hashed | hash_files(partial, rest))
    for name in list_files(partial):
        sync(partial / name)  # orbax syncs the arrays, but not its other files
    for directory, _, _ in os.walk(partial):
        sync(Path(directory))
    if path.exists():
        raise ValueError(f"checkpoint {path}: another process created it meanwhile; choose another path")
    os.rename(partial, path)
    sync(path.parent)


def check_all_wrote(arrays: Path) -> None:
    for index in range(jax.process_count()):
        if not _digests_of(arrays, index).exists():
            raise IncompleteError(index)


def check_merged(part: Path) -> None:
    """Check that orbax merged the files of all processes. Otherwise it only warns, and nothing could be read."""
    names = [path.name for path in part.iterdir()]
    if any(name.startswith("ocdbt.process_") for name in names) and "manifest.ocdbt" not in names:
        raise OSError(errno.EIO, "orbax did not merge what the processes wrote", str(part))


def _digests_of(arrays: Path, index: int) -> Path:
    """Return the file with the digests of one process's files, until the commit."""
    return arrays / f"digests.{index}.json"


def _take_digests(arrays: Path) -> Digests:
    """Collect the digests that each process took of its files, except of files that changed since."""
    found: Digests = {}
    for index in range(jax.process_count()):
        file = _digests_of(arrays, index)
        try:
            hashed = json.loads(file.read_text())
        except (FileNotFoundError, ValueError) as error:
            raise IncompleteError(index) from error
        for name, (digest, *mark) in hashed.items():
            if digest and (arrays / name).exists() and [*mark_of(arrays / name)] == mark:
                found[f"{ARRAYS}/{name}"] = digest
        file.unlink()
    return found
