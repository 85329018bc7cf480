"""What a path means: a place on a file system, and there a checkpoint, a run with several, or a step of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jfsdp.checkpoint.disk.files import ARRAYS, MANIFEST, SUMS, step_paths


def local_path(path: Any) -> Path:
    """Return a path as an absolute one, with `~` as the home directory.

    Raises:
      ValueError: for the address of an object store.
    """
    if not str(path) or "\0" in str(path):
        raise ValueError(f"checkpoint {path!r}: is no path; name a directory")
    if "://" in str(path):
        raise ValueError(f"checkpoint {path}: is an address; object stores are not supported, use a shared file system")
    return Path(path).expanduser().absolute()


def existing_path(path: Any, what: str = "") -> Path:
    """Return a path at which something is.

    Args:
      what: of a model of the Hugging Face Hub is needed, as an option of its download; everything unless given.

    Raises:
      ValueError: if nothing is there; where the path could be a name of the Hub, with the command that downloads it.
    """
    found = Path(path).expanduser()
    if found.exists():
        return found
    name, remedy = str(path), ""
    if re.fullmatch(r"[\w-]+|\w[\w.-]*/\w[\w.-]*", name):
        command = f"hf download {name}{what} --local-dir {name.rpartition('/')[2]}"
        remedy = f"; a model of the Hugging Face Hub: pip install huggingface_hub; {command}, and give its directory"
    raise ValueError(f"{name}: there is no such file or directory{remedy}")


def find_checkpoints(path: Any) -> list[Path]:
    """Return the checkpoints that a path names, oldest first: itself, or all steps of a run.

    Raises:
      ValueError: if there is none.
    """
    path = local_path(path)
    if any((path / name).exists() for name in (MANIFEST, SUMS, ARRAYS)):
        return [path]
    for directory in (path, path / "checkpoints"):
        if steps := step_paths(directory):
            return steps
    what = "is not there" if not path.exists() else "is no checkpoint and holds none"
    raise ValueError(f"checkpoint {path}: {what}; pass a checkpoint, a step of a run, or the directory of a run")


def find_checkpoint(path: Any) -> Path:
    """Return the checkpoint that a path names; of a run the newest.

    Raises:
      ValueError: if there is none.
    """
    return find_checkpoints(path)[-1]
