"""What somebody at the terminal sees: a progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


class Display:
    """Shows messages and records; this one, of a process that does not write, shows nothing."""

    def say(self, text: str) -> None:
        """Print a line for good."""

    def show(self, record: Mapping[str, Any]) -> None:
        """Show the record of a logged step."""

    def advance(self, step: int) -> None:
        """Show that a step was dispatched."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def make_display(total: int, first: int, is_writer: bool) -> Display:
    """Return the display for this process: silent if it is not the one that writes."""
    if not is_writer:
        return Display()
    return Bar(total, first) if sys.stdout.isatty() else Lines(total)


class Lines(Display):
    """Prints one plain line per logged step."""

    def __init__(self, total: int):
        self._total = total

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, record: Mapping[str, Any]) -> None:
        width = len(str(self._total))
        print(f"step {record['step']:>{width}}/{self._total}  {describe(record)}", flush=True)


class Bar(Display):
    """Draws a progress bar with the figures of the last logged step; evaluations stay above it."""

    def __init__(self, total: int, first: int):
        from rich import progress

        columns = [
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeRemainingColumn(),
        ]
        self._progress = progress.Progress(*columns)
        self._task = self._progress.add_task("", total=total, completed=first, figures="compiling")
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, record: Mapping[str, Any]) -> None:
        self._progress.update(self._task, figures=describe(record))
        if record["eval_loss"] is not None:
            self.say(f"step {record['step']}: {describe(record)}")

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        self._progress.stop()


def describe(record: Mapping[str, Any]) -> str:
    """Say a record in one line: `loss 2.3126  lr 0.0003  12,345 tokens/s  MFU 41.2 %  3.1 GiB`.

    A dash stands for what is not known.
    """
    (name,) = (name for name in record if name.endswith("s_per_s"))
    rate, mfu, items = record[name], record["mfu"], name.removesuffix("_per_s")
    held_out = "" if record["eval_loss"] is None else f"held-out loss {record['eval_loss']:.4f}{accuracy(record)}  "
    return (
        f"loss {record['loss']:.4f}  {held_out}lr {record['learning_rate']:.3g}  "
        f"{'-' if rate is None else format(rate, ',.0f')} {items}/s  "
        f"MFU {'-' if mfu is None else format(100 * mfu, '.1f') + ' %'}  {record['memory_bytes'] / 2**30:.2f} GiB"
    )


def harmless(text: str) -> str:
    """Return text of a model or of a file for a terminal: what would steer one is replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def accuracy(record: Mapping[str, Any]) -> str:
    """Say the held-out accuracy of a record: `, accuracy 97.21 %`; nothing where it is not known."""
    correct = record.get("eval_correct")
    return "" if correct is None else f", accuracy {100 * correct:.2f} %"
