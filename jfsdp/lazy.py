"""Packages whose public names are imported on first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`, read from the `if TYPE_CHECKING` block of its file.

    The imports in that block are the only list of public names and their modules, so a package needs its source files,
    which wheels have. Submodules that the package imports from itself are also found, but are not in `__all__`.
    """
    (block,) = [node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    public = [name for name, home in homes.items() if home != package]
    return get, lambda: sorted({*vars(sys.modules[package]), *homes}), public
