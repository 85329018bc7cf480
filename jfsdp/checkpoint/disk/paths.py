"""Paths of checkpoints: a checkpoint, a run with several, or a step of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jfsdp.arguments import did_you_mean
from jfsdp.checkpoint.disk.files import ARRAYS, COMMIT, MANIFEST, SUMS, step_paths
from jfsdp.objects.path import AnyPath, as_path


def absolute_path(path: Any) -> Any:
    """Return a path as an absolute `Path`, with `~` expanded, or as an `ObjectPath`.

    Raises:
      ValueError: if the path is invalid.
    """
    if not str(path) or "\0" in str(path):
        raise ValueError(f"checkpoint {path!r}: is not a path; name a directory")
    found = as_path(path)
    return found.absolute() if isinstance(found, Path) else found


def existing_path(path: Any, what: str = "") -> Any:
    """Return a path that exists.

    Args:
      what: option for the download of a model from the Hugging Face Hub that restricts the files; default all.

    Raises:
      ValueError: if the path does not exist; if it may be a name on the Hub, with the command that downloads the model.
    """
    found = as_path(path)
    if found.exists():
        return found
    name, remedy = str(path), ""
    if re.fullmatch(r"[\w-]+|\w[\w.-]*/\w[\w.-]*", name):
        command = f"hf download {name}{what} --local-dir {name.rpartition('/')[2]}"
        remedy = f"; for a model of the Hugging Face Hub: pip install huggingface_hub; {command}; pass its directory"
    near = [file.name for file in found.parent.iterdir()] if found.name and found.parent.is_dir() else []
    raise ValueError(f"{name}: there is no such file or directory{did_you_mean(found.name, near)}{remedy}")


def find_checkpoints(path: Any) -> list[Any]:
    """Return the checkpoints at a path, oldest first: itself, or all steps of a run.

    Raises:
      ValueError: if there is none.
    """
    path = absolute_path(path)
    if any((path / name).exists() for name in (MANIFEST, COMMIT, SUMS, ARRAYS)):
        return [path]
    for directory in (path, path / "checkpoints"):
        if steps := step_paths(directory):
            return steps
    what = "does not exist" if not path.exists() else "is not a checkpoint and contains none"
    raise ValueError(f"checkpoint {path}: {what}; pass a checkpoint, a step of a run, or the directory of a run")


def find_checkpoint(path: Any) -> AnyPath:
    """Return the checkpoint at a path, or the newest of a run.

    Raises:
      ValueError: if there is none.
    """
    return find_checkpoints(path)[-1]
