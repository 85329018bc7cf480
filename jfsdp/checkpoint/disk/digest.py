"""Digests of all files of a checkpoint, so that a flipped bit is reported and not restored.

TensorStore does not check the values that it reads (orbax 0.12.8: 30 of 30 flips came back as wrong numbers). SHA-256,
in the format of `sha256sum`, takes a core 1 s for 1 to 2 GB; several files are hashed at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jfsdp.checkpoint.disk.files import ARRAYS, SUMS, damaged, file_sizes, inside, write_text
from jfsdp.checkpoint.source import Progress, ignore_progress
from jfsdp.objects.path import AnyPath, StoreError

Digests = dict[str, str]
_THREADS = min(8, os.cpu_count() or 1)


def list_files(path: AnyPath) -> list[str]:
    """List the files below a directory, as paths relative to it, except the file of digests."""
    return [name for name in file_sizes(path) if name != SUMS]


def hash_files(path: AnyPath, names: Iterable[str], on_done: Progress = ignore_progress) -> Digests:
    """Hash files in parallel. A file that cannot be read gets an empty digest.

    Args:
      on_done: called with each file's name and bytes.
    """

    def one(name: str) -> tuple[str, str]:
        try:
            with (path / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                on_done(name, file.tell())
                return name, digest
        except StoreError:
            raise
        except OSError:
            on_done(name, 0)
            return name, ""

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(pool.map(one, names))


def write_digests(path: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of a checkpoint's files."""
    write_text(path / SUMS, digest_lines(digests))


def digest_lines(digests: Mapping[str, str]) -> str:
    """Return the lines of the file of digests, followed by a digest of these lines."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return f"{lines}# {_digest(lines)}\n"


def read_digests(path: AnyPath) -> Digests:
    """Read the digests of a checkpoint's files.

    Raises:
      ValueError: if the file of digests is missing or damaged, or names a file outside the checkpoint.
    """
    try:
        lines, mark, digest = (path / SUMS).read_text(encoding="utf-8").rpartition("# ")
    except FileNotFoundError:
        raise damaged(path, f"{SUMS} is missing") from None
    except ValueError:
        lines, mark, digest = "", "", ""
    if not mark or digest != f"{_digest(lines)}\n":
        raise damaged(path, f"{SUMS} has changed since it was written")
    digests = {name: digest for digest, name in (line.split("  ", 1) for line in lines.splitlines())}
    for name in digests:
        inside(path, name)
    return digests


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_needed(name: str, parts: Iterable[str]) -> bool:
    """Return whether reading these parts of the state needs a file. Files that belong to no part are always needed."""
    folder, _, below = name.partition("/")
    part, _, file = below.partition("/")
    return folder != ARRAYS or not file or part in parts


def find_undigested(parts: Iterable[str], digests: Mapping[str, str]) -> list[str]:
    """Return a line for each part of the state without any digest."""
    missing = (part for part in parts if not any(name.startswith(f"{ARRAYS}/{part}/") for name in digests))
    return [f"{SUMS} names no file of {ARRAYS}/{part}" for part in missing]


def find_damage(
    path: AnyPath, names: Iterable[str], digests: Mapping[str, str], on_done: Progress = ignore_progress
) -> list[str]:
    """Compare files with their digests; return a line for each file that is missing or differs."""
    found = hash_files(path, names, on_done)
    problems = []
    for name, digest in found.items():
        if not digest:
            reason = "cannot be read" if (path / name).exists() else "is missing"
            problems.append(f"{name} {reason}")
        elif digest != digests[name]:
            problems.append(f"{name} has changed since it was written (its SHA-256 differs)")
    return problems


def check_documents(path: AnyPath) -> None:
    """Check the JSON files of a checkpoint before their contents are used.

    Raises:
      ValueError: if files are damaged; names them. Without digests, nothing is checked.
    """
    if (path / SUMS).is_file():
        digests = read_digests(path)
        raise_damage(path, find_damage(path, [name for name in digests if is_needed(name, ())], digests))


def raise_damage(path: Any, problems: Sequence[str]) -> None:
    """Raise an error with the problems, if there are any."""
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise damaged(path, shown)
