"""Console output of subcommands: results, progress, tables and verdicts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from jfsdp.trainer.display import format_facts
from jfsdp.trainer.help_groups import Options, option

BROKEN = 4  # exit status for damaged or differing checkpoints, and for audits with findings
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reporting(Options):
    """Base class of commands with a result that can be printed as JSON."""

    json: bool = option(False, "output")
    """Print JSON."""

    def report(self, found: Any, show: Callable[[], Any]) -> None:
        """Print the result as JSON, or call `show`."""
        print(json.dumps(_finite(found), indent=1)) if self.json else show()

    @contextlib.contextmanager
    def progress_of(
        self, what: str, memory_bytes: int, total_bytes: int | None
    ) -> Iterator[Callable[[str, int], None]]:
        """Print the memory limit of an operation, and show its progress, on stderr; nothing with `json`.

        Args:
          total_bytes: of the whole operation; None: unknown.

        Returns:
          `f(name, num_bytes)`, to be called for each finished item, from any thread.
        """
        if self.json:
            yield lambda name, num_bytes: None
            return
        print(
            f"{what}: takes at most {memory_bytes / GIB:.2f} GiB of memory besides the program itself", file=sys.stderr
        )
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total_bytes)
            yield lambda name, num_bytes: bar.update(task, advance=num_bytes, description=name[-60:])

    @contextlib.contextmanager
    def phases(self) -> Iterator[Callable[[str], None]]:
        """Show the current phase on stderr, if it is a terminal; nothing with `json`.

        Returns:
          `f(text)`, to be called at the beginning of each phase.
        """
        if self.json or not sys.stderr.isatty():
            yield lambda text: None
            return
        with Console(stderr=True).status("starting") as status:
            yield lambda text: status.update(text)


def _finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON does not have, by text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def make_console(width: int | None = None) -> Any:
    """Return a console that is wide unless it is a terminal, so that tables in files and pipes have one line per row.

    Args:
      width: columns, even if the terminal has fewer; None: the terminal's.
    """
    console = Console(highlight=False, markup=False, soft_wrap=False, width=width)
    return console if width or console.is_terminal else Console(highlight=False, markup=False, width=240)


def make_table(*columns: str, right: Collection[str] = ()) -> Any:
    """Return a table without lines.

    Args:
      right: right-aligned columns.
    """
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def print_facts(console: Any, facts: Mapping[str, str]) -> None:
    """Print a line with name and text for each fact."""
    console.print(format_facts(facts, console.width if console.is_terminal else None), soft_wrap=True)


def print_wrapped(text: str, *, stderr: bool = False) -> None:
    """Print a text. A terminal wraps it between words."""
    console = Console(highlight=False, stderr=stderr)
    console.print(Text(text), soft_wrap=not console.is_terminal)


def print_verdict(console: Any, is_good: bool, verdict: str, rest: str) -> None:
    """Print a command's verdict, green or red on a terminal, and further text."""
    console.print(Text.assemble((verdict, f"bold {'green' if is_good else 'red'}"), f"  {rest}"))
