"""What a checkpoint is on disk.

    <path>/                      a step of a run, or what `save` was given
      arrays/params/ ...         orbax: the arrays, a directory for each part of the state
      manifest.json              format, names, logical shapes and dtypes of all arrays, step, metrics, versions
      layout.json                the layout it was saved from, to read
      config.json, extra.json    the caller's: how the run was configured, and where each process stood in the data
      SHA256SUMS                 a digest of every other file; `sha256sum -c SHA256SUMS` checks them without jfsdp

A step is written as `<path>.jfsdp-tmp` and renamed when the last of these files is on the disk, so a directory without
that suffix is whole, whenever a process was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

FORMAT = 2
ARRAYS, MANIFEST, LAYOUT = "arrays", "manifest.json", "layout.json"
CONFIG, EXTRA, SUMS = "config.json", "extra.json", "SHA256SUMS"
UNFINISHED = ".jfsdp-tmp"


class DamagedError(ValueError):
    """A checkpoint that is not as it was written; the message names the files."""


def is_damage(error: BaseException | None) -> bool:
    """Tell whether an error, or one that it was raised from, says that a checkpoint is damaged."""
    return error is not None and (isinstance(error, DamagedError) or is_damage(error.__cause__))


def damaged(path: Any, what: str) -> DamagedError:
    """Return the error for a checkpoint in which something is not as it was written."""
    remedy = "restore another step (--resume STEP), or an older one with fall_back=True (--fall-back)"
    return DamagedError(f"checkpoint {path}: is damaged: {what}; {remedy}")


def inside(directory: Path, name: Any) -> Path:
    """Return the path of a file that a document in a directory names. What links there lead to is the user's affair.

    Raises:
      ValueError: if the name is none, or leads out of the directory: absolute, or by `..`.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or parts[0].startswith("/") or ".." in parts:
        raise ValueError(f"checkpoint {directory}: the name {name!r} leads out of it; fetch or write it again")
    return directory / name


def part_of(name: str) -> str:
    """Return the directory below `arrays` that holds an array: so that who wants parameters alone reads no moments."""
    first, _, rest = name.partition(".")
    return first if rest and first in ("params", "opt_state", "model_state") else "counters"


def make_manifest(
    arrays: Mapping[str, Any],
    name: str,
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    base: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Say what a checkpoint holds.

    Args:
      arrays: the `Logical` arrays by name.
      name: that of its directory: a step of a run is told from a copy of it under another number.
      base: by name, digests of the frozen leaves that are left out; None: none is.
    """
    import jax

    return {
        "format": FORMAT,
        "step": step,
        "name": name,
        "metrics": dict(metrics or {}),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"jax": jax.__version__, "orbax": importlib.metadata.version("orbax-checkpoint")},
        "num_processes": jax.process_count(),
        "arrays": {name: array.to_dict() for name, array in arrays.items()},
        **({} if base is None else {"base": dict(base)}),
    }


def read_manifest(path: Any) -> dict[str, Any]:
    """Read what a checkpoint says about itself: arrays, step, metrics, and from beside it layout, config and extra.

    Raises:
      ValueError: if the directory is no complete checkpoint, is damaged, or of another format.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        manifest = read_json(path, MANIFEST)
    elif (path / SUMS).is_file() or (path / ARRAYS).is_dir():
        raise damaged(path, f"{MANIFEST} is missing")
    elif path in step_paths(path.parent) and not any(path.iterdir()):
        raise damaged(path, "it is empty")
    else:
        steps = [step.name for step in step_paths(path)[-4:]]
        which = f"; it is a run, with steps such as {', '.join(steps)}" if steps else ""
        raise ValueError(f"checkpoint {path}: there is none (no {MANIFEST}); pass what save wrote, or a step{which}")
    found = manifest.get("format")
    if found != FORMAT:
        raise ValueError(f"checkpoint {path}: has format {found}, not {FORMAT}; read it with the jfsdp that wrote it")
    numbers = [name for name in (manifest["name"], path.name) if name.isdecimal()]
    if len(set(numbers)) == 2:
        written, named = numbers
        why = f"it was written as step {written} and is not step {named}; if only its name is wrong, use {written}"
        raise damaged(path, why)
    return manifest | {file.removesuffix(".json"): read_json(path, file) for file in (LAYOUT, CONFIG, EXTRA)}


def step_paths(directory: Path) -> list[Path]:
    """List the complete steps of a run, oldest first."""
    named = (path for path in directory.glob("*") if path.name.isdecimal() and path.name == str(int(path.name)))
    return sorted((path for path in named if path.is_dir()), key=lambda path: int(path.name))


def bytes_below(path: Path) -> int:
    """Sum the sizes of the files below a directory, which others may rename or remove meanwhile."""
    num_bytes = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                num_bytes += os.stat(os.path.join(directory, name)).st_size
    return num_bytes


def read_json(path: Path, name: Any) -> Any:
    """Read one of the documents of a checkpoint.

    Raises:
      ValueError: if it is missing or damaged.
    """
    try:
        return json.loads((path / name).read_bytes())
    except FileNotFoundError:
        raise damaged(path, f"{name} is missing") from None
    except ValueError as error:
        raise damaged(path, f"{name} ({error})") from error


def write_json(path: Path, value: Any) -> None:
    """Write a document, onto the disk and not only into its cache."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, onto the disk and not only into its cache."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Put a file, or the names in a directory, onto the disk, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # else: a file system that syncs no directories
    finally:
        os.close(descriptor)
