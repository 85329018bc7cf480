"""Where the subcommands print their tables, and how they show that long work goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from jfsdp.trainer.display import format_facts

BROKEN = 4  # the exit status of what is damaged, differs, or does not do what it says
GIB = 1 << 30


def make_console(width: int | None = None) -> Any:
    """Print wide where nobody's terminal wraps: a table in a file or a pipe keeps one line per row.

    Args:
      width: columns, also on a terminal of fewer; None: those of the terminal.
    """
    console = Console(highlight=False, markup=False, soft_wrap=False, width=width)
    return console if width or console.is_terminal else Console(highlight=False, markup=False, width=240)


def make_table(*columns: str, right: Collection[str] = ()) -> Any:
    """Make a table without lines.

    Args:
      right: the columns of numbers, which end at the right.
    """
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def print_facts(console: Any, facts: Mapping[str, str]) -> None:
    """Print a line for each fact, its name first."""
    width = console.width if console.is_terminal else None
    console.print(format_facts(facts, width), soft_wrap=True)


def print_verdict(console: Any, is_good: bool, verdict: str, rest: str) -> None:
    """Print what a command found, in green or in red on a terminal."""
    console.print(Text.assemble((verdict, f"bold {'green' if is_good else 'red'}"), f"  {rest}"))


@contextlib.contextmanager
def progress_of(
    is_quiet: bool, what: str, memory_bytes: int, total_bytes: int | None
) -> Iterator[Callable[[str, int], None]]:
    """Say how much memory the work takes at most, and show on the error stream how far it is.

    Args:
      is_quiet: say and show nothing; for JSON.
      total_bytes: of all that will be handled; None where nobody knows.

    Returns:
      `f(name, num_bytes)`, to be called with each thing that is done; from any thread.
    """
    if is_quiet:
        yield lambda name, num_bytes: None
        return
    print(f"{what}: takes at most {memory_bytes / GIB:.2f} GiB of memory beside the program itself", file=sys.stderr)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda name, num_bytes: bar.update(task, advance=num_bytes, description=name[-60:])


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done until it is done; only on a terminal.

    Returns:
      `f(text)`, to be called with what begins.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text)
