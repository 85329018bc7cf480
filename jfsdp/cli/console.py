"""Where the subcommands print their tables."""

from __future__ import annotations

from typing import Any


def make_console() -> Any:
    """Print wide where nobody's terminal wraps: a table in a file or a pipe keeps one line per row."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=240)
