"""Files of a checkpoint.

    <path>/                      a step of a run, or the path passed to `save`
      arrays/params/ ...         orbax: the arrays, a directory for each part of the state
      manifest.json              format, names, logical shapes and dtypes of all arrays, step, metrics, versions
      layout.json                the layout of the saved state, for human readers
      config.json, extra.json    the caller's data: configuration of the run, and each process's position in the data
      SHA256SUMS                 a digest of every other file; `sha256sum -c SHA256SUMS` checks them without jfsdp

A step is written to `<path>.jfsdp-tmp` and renamed after the last of these files is on disk. So a directory without
that suffix is complete, even if the process was killed.
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

from jfsdp.objects.path import AnyPath, ObjectPath, as_path

FORMAT = 2
ARRAYS, MANIFEST, LAYOUT = "arrays", "manifest.json", "layout.json"
CONFIG, EXTRA, SUMS, COMMIT = "config.json", "extra.json", "SHA256SUMS", "COMMIT"
INDEX = "index.json"  # in an object store: the chunks of the arrays of a part
UNFINISHED = ".jfsdp-tmp"


class DamagedError(ValueError):
    """A checkpoint whose files have changed since they were written; the message names them."""


def is_damage(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a `DamagedError`."""
    return error is not None and (isinstance(error, DamagedError) or is_damage(error.__cause__))


def damaged(path: Any, what: str) -> DamagedError:
    """Return the error for a damaged checkpoint."""
    remedy = "restore another step (--resume STEP), or an older one with fall_back=True (--fall-back)"
    return DamagedError(f"checkpoint {path}: is damaged: {what}; {remedy}")


def content_path(path: AnyPath) -> Any:
    """Return where the files of a checkpoint are: at its path, or in an object store where its COMMIT says.

    Raises:
      ValueError: if COMMIT is damaged.
    """
    try:
        found = json.loads(data := (path / COMMIT).read_bytes())
        if json_text(found) != data:
            raise ValueError("has changed since it was written")
        return inside(path, found["content"])
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (ValueError, LookupError, TypeError) as error:
        raise damaged(path, f"{COMMIT} ({error})") from error


def inside(directory: AnyPath, name: Any) -> Any:
    """Return the path of a file that a document in a directory names. Links in the directory are followed.

    Raises:
      ValueError: if the name is empty, absolute, or leaves the directory with `..`.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or parts[0].startswith("/") or ".." in parts:
        raise ValueError(f"checkpoint {directory}: the name {name!r} leads out of it; download or write it again")
    return directory / name


def part_of(name: str) -> str:
    """Return the directory below `arrays` that contains an array. Reading parameters then reads no optimizer states."""
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
    """Return the manifest of a checkpoint.

    Args:
      arrays: the `Logical` arrays by name.
      name: the directory's name, which identifies a step that is copied under another number.
      base: digests of the omitted frozen leaves by name; None: no leaves are omitted.
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
    """Read the manifest of a checkpoint, together with its layout, config and extra.

    Raises:
      ValueError: if the directory is not a complete checkpoint, is damaged, or has another format.
    """
    path = as_path(path)
    files = content_path(path)
    if (files / MANIFEST).is_file():
        manifest = read_json(files, MANIFEST)
    elif files != path or (files / SUMS).is_file() or (files / ARRAYS).is_dir():
        raise damaged(path, f"{MANIFEST} is missing")
    elif path in step_paths(path.parent) and not any(path.iterdir()):
        raise damaged(path, "the directory is empty")
    else:
        steps = [step.name for step in step_paths(path)[-4:]]
        hint = f"; it is a run, with steps such as {', '.join(steps)}" if steps else ""
        raise ValueError(f"checkpoint {path}: there is none (no {MANIFEST}); pass a saved checkpoint or a step{hint}")
    found = manifest.get("format")
    if found != FORMAT:
        raise ValueError(f"checkpoint {path}: has format {found}, not {FORMAT}; read it with the jfsdp that wrote it")
    numbers = [name for name in (manifest["name"], path.name) if name.isdecimal()]
    if len(set(numbers)) == 2:
        written, named = numbers
        reason = f"it was written as step {written} and is not step {named}; if only its name is wrong, use {written}"
        raise damaged(path, reason)
    return manifest | {file.removesuffix(".json"): read_json(files, file) for file in (LAYOUT, CONFIG, EXTRA)}


def step_paths(directory: AnyPath) -> list[Any]:
    """List the complete steps of a run, oldest first: on disk by their names, in an object store by their COMMIT."""
    named = (path for path in directory.glob("*") if path.name.isdecimal() and path.name == str(int(path.name)))
    in_store = isinstance(directory, ObjectPath)
    complete = (path for path in named if ((path / COMMIT).is_file() if in_store else path.is_dir()))
    return sorted(complete, key=lambda path: int(path.name))


def file_sizes(path: AnyPath) -> dict[str, int]:
    """Return the sizes of the files below a directory, which other processes may rename or remove meanwhile.

    Returns:
      By path relative to the directory, sorted.
    """
    if isinstance(path, ObjectPath):
        return {name: entry["size"] for name, entry in path.walk().items()}
    sizes = {}
    for directory, _, names in os.walk(path):
        for file in (Path(directory, name) for name in names):
            with contextlib.suppress(OSError):
                sizes[file.relative_to(path).as_posix()] = file.stat().st_size
    return dict(sorted(sizes.items()))


def mark_of(file: Path) -> tuple[int, int]:
    """Return the size of a file and the time of its last change, by which a change is seen."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def bytes_below(path: AnyPath) -> int:
    """Sum the sizes of the files below a directory."""
    return sum(file_sizes(path).values())


def read_json(path: AnyPath, name: Any) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
      ValueError: if it is missing or damaged.
    """
    try:
        return json.loads((path / name).read_bytes())
    except FileNotFoundError:
        raise damaged(path, f"{name} is missing") from None
    except ValueError as error:
        raise damaged(path, f"{name} ({error})") from error


def json_text(value: Any) -> bytes:
    """Return the contents of a JSON file."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file and sync it to disk."""
    write_text(path, json_text(value).decode())


def write_text(path: Path, text: str) -> None:
    """Write a text file and sync it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Sync to disk a file, or the names in a directory, that any process wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # other errors: the file system does not sync directories
    finally:
        os.close(descriptor)
