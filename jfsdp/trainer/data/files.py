"""Find the files that a `data` argument names, and say which were left out and why."""

from __future__ import annotations

import collections
import dataclasses
import glob
import os
import sysconfig
from pathlib import Path

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages"})

# What differs between two installations of one Python version: packages that distributions split off or leave out, the
# compiled modules, and files that the build or the administrator writes.
_STDLIB_DIRECTORIES = frozenset({"test", "tests", "idlelib", "lib2to3", "distutils", "turtledemo", "ensurepip"})
_STDLIB_DIRECTORIES |= frozenset({"tkinter", "lib-dynload", "venv"})
_STDLIB_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize", "python-config")


@dataclasses.dataclass(frozen=True)
class FoundFiles:
    """The files of a corpus, in a fixed order, before any of them is opened.

    Attributes:
      root: directory that the names below are relative to.
      names: POSIX paths relative to `root`, sorted; the identity of a document starts with them.
      num_seen: files looked at, kept or not.
      skipped: how many files (or whole directories) were left out, by reason.
    """

    root: Path
    names: tuple[str, ...]
    num_seen: int
    skipped: dict[str, int]


def standard_library_path() -> Path:
    """Return the directory of this Python's own library sources.

    `data="stdlib"` reads its `*.py` files, without third-party packages, tests, `idlelib`, `lib2to3`, `distutils`,
    `turtledemo`, `ensurepip`, `tkinter`, `venv` and the generated `_sysconfigdata*`, `sitecustomize`, `usercustomize`
    and `python-config`: what is left is the same on every machine with the same Python release, but for patches of a
    distribution. The state of an iterator carries a digest of the contents, so a difference does not go unnoticed.
    """
    return Path(sysconfig.get_path("stdlib"))


def find_files(data: str) -> FoundFiles:
    """List the files named by `data`; opens none of them.

    Args:
      data: "stdlib", a directory (read recursively), one file, or a glob (`**` crosses directories). A directory called
        stdlib is written `./stdlib`.

    Raises:
      ValueError: if nothing is there, or a directory cannot be listed; names the path and the remedy.
    """
    if data == "stdlib":
        return _walk(standard_library_path(), is_stdlib=True)
    path = Path(data).expanduser()
    if path.is_dir():
        return _walk(path)
    if path.exists():
        return FoundFiles(path.parent, (path.name,), 1, {})
    if glob.has_magic(data):
        return _glob(str(path))
    raise ValueError(
        f"data {data!r}: no such file or directory (working directory {os.getcwd()}); pass a directory, a file, "
        "a quoted glob such as 'corpus/**/*.txt', or 'stdlib' for Python's own sources"
    )


def _walk(root: Path, *, is_stdlib: bool = False) -> FoundFiles:
    names, skipped, num_seen = [], collections.Counter(), 0
    for directory, subdirectories, files in os.walk(root, onerror=_raise_unlistable):
        pruned = {name: _reason_to_prune(Path(directory, name), is_stdlib) for name in subdirectories}
        subdirectories[:] = [name for name, reason in pruned.items() if reason is None]
        num_seen += len(files)
        found = {file: _reason_to_skip(Path(directory, file), is_stdlib=is_stdlib) for file in files}
        skipped.update(filter(None, [*pruned.values(), *found.values()]))
        kept = [Path(directory, file) for file, reason in found.items() if reason is None]
        names += [path.relative_to(root).as_posix() for path in kept]
    return FoundFiles(root, tuple(sorted(names)), num_seen, dict(skipped))


def _glob(pattern: str) -> FoundFiles:
    fixed = pattern[: min(pattern.find(c) for c in "*?[" if c in pattern)]
    root = Path(os.path.dirname(fixed) or ".")
    paths = [Path(p) for p in glob.glob(pattern, recursive=True) if not os.path.isdir(p)]
    reasons = {path: _reason_to_skip(path, takes_tokens=pattern.endswith(".bin")) for path in paths}
    names = sorted(path.relative_to(root).as_posix() for path, reason in reasons.items() if reason is None)
    return FoundFiles(root, tuple(names), len(paths), dict(collections.Counter(filter(None, reasons.values()))))


def _reason_to_prune(path: Path, is_stdlib: bool) -> str | None:
    skipped = _SKIPPED_DIRECTORIES | _STDLIB_DIRECTORIES if is_stdlib else _SKIPPED_DIRECTORIES
    if path.name.startswith(".") or path.name in skipped:
        return "excluded directory"
    # Following links could walk in a circle, or read a document twice.
    return "linked directory" if path.is_symlink() else None


def _reason_to_skip(path: Path, *, is_stdlib: bool = False, takes_tokens: bool = False) -> str | None:
    if path.name.startswith("."):
        return "hidden"
    if is_stdlib and path.suffix != ".py":
        return "extension"
    if is_stdlib and path.name.startswith(_STDLIB_FILES):
        return "generated"
    if path.suffix == ".bin" and not takes_tokens:
        return "token file (ask for it with a glob such as '*.bin')"
    # A broken link, socket or pipe: opening a pipe would wait for ever.
    return None if path.is_file() else "not a regular file"


def _raise_unlistable(error: OSError):
    raise ValueError(
        f"{error.filename}: directory cannot be listed ({error.strerror}); make it readable for every "
        "process, or name a glob that leaves it out"
    ) from error
