"""Print a run: facts, lines, and on a terminal one live line below them. Make texts safe for a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from typing import Any

_FIRST_S, _TOLD_S = 2, 30  # seconds of a wait before a terminal shows it, and before a log does


class Display:
    """Prints lines, and on a terminal one live line below them. Threads may share it.

    Args:
      is_writer: whether this process prints at all.
    """

    def __init__(self, is_writer: bool) -> None:
        self.is_writer, self.is_live = is_writer, is_writer and sys.stdout.isatty()
        self._lock, self._told_s, self._line, self._shown_s = threading.Lock(), _TOLD_S, "", 0.0

    def say(self, text: str) -> None:
        """Print a line for good."""
        with self._lock:
            if self.is_writer:
                print("\r\x1b[2K" * self.is_live + text, flush=True)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Print facts for good, wrapped at the width of a terminal."""
        self.say(format_facts(facts, shutil.get_terminal_size().columns if self.is_live else None))

    def show(self, text: str) -> None:
        """Replace the live line, ten times a second at most; without a terminal do nothing."""
        now = time.monotonic()
        if text and now - self._shown_s < 0.1:
            return
        self._line, self._shown_s = text, now
        self._draw(text)

    def wait(self, what: str, seconds: float) -> None:
        """Show the current stage and its seconds; a step's follow the live line.

        A log has a line for a stage that is not a step after 30 s, and each time that doubles.
        """
        is_step = what.startswith("step ")
        if seconds < _FIRST_S:
            self._told_s = _TOLD_S
        elif self.is_live:
            self._draw(f"{self._line}  {what}: {seconds:.0f} s".strip() if is_step else f"{what}: {seconds:.0f} s")
        elif seconds >= self._told_s and not is_step:
            self._told_s *= 2
            self.say(f"{what}: {seconds:.0f} s so far")

    def _draw(self, text: str) -> None:
        with self._lock:
            if self.is_live:
                print(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def format_facts(facts: Mapping[str, str], width: int | None) -> str:
    """Write a line for each fact, its name first; a text longer than `width` continues below where it began."""
    indent = max(9, *map(len, facts)) + 2  # at least the indent of a run's start: the program is printed later
    names = {name: f"{name:{indent}}" for name in facts}
    if width is None:
        return "\n".join(names[name] + text for name, text in facts.items())
    wrap = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(wrap.fill(names[name] + text) for name, text in facts.items())


def time_left(seconds: float) -> str:
    """Write seconds as `1 h 5 min`, `3 min` or `40 s`."""
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def describe(record: Mapping[str, Any]) -> str:
    """Say a record in one line: `loss 2.3126  lr 0.0003  12,345 tokens/s  MFU 41.2%  3.1 GiB`.

    A dash stands for an unknown rate; an unknown MFU is left out.
    """
    (name,) = (name for name in record if name.endswith("s_per_s"))
    rate, mfu, items = record[name], record["mfu"], name.removesuffix("_per_s")
    return (
        f"loss {record['loss']:.4f}  lr {record['learning_rate']:.3g}  "
        f"{'-' if rate is None else format(rate, ',.0f')} {items}/s  "
        f"{'' if mfu is None else f'MFU {mfu:.1%}  '}{record['memory_bytes'] / 2**30:.2f} GiB"
    )


def harmless(text: str) -> str:
    """Return text of a model or of a file for a terminal: what would steer one is replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def accuracy(record: Mapping[str, Any]) -> str:
    """Say the held-out accuracy of a record: `, accuracy 97.21 %`; nothing where it is not known."""
    correct = record.get("eval_correct")
    return "" if correct is None else f", accuracy {100 * correct:.2f} %"
