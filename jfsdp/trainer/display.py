"""Terminal output of a run: facts, lines, and one live line below them."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from typing import Any

_FIRST_S, _LOGGED_S = 2, 30  # seconds of a wait before a terminal shows it, and before a log does


class Display:
    """Prints lines, and on a terminal one live line below them. Thread-safe.

    Args:
      is_writer: whether this process prints.
    """

    def __init__(self, is_writer: bool) -> None:
        self.is_writer, self.is_live = is_writer, is_writer and sys.stdout.isatty()
        self._lock, self._logged_s, self._line, self._shown_s = threading.Lock(), _LOGGED_S, "", 0.0

    def say(self, text: str) -> None:
        """Print a permanent line."""
        with self._lock:
            if self.is_writer:
                print("\r\x1b[2K" * self.is_live + text, flush=True)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Print facts as permanent lines, wrapped at the width of the terminal."""
        self.say(format_facts(facts, shutil.get_terminal_size().columns if self.is_live else None))

    def show(self, text: str) -> None:
        """Replace the live line, at most ten times a second. Without a terminal, do nothing."""
        now = time.monotonic()
        if text and now - self._shown_s < 0.1:
            return
        self._line, self._shown_s = text, now
        self._draw(text)

    def wait(self, what: str, seconds: float) -> None:
        """Show the current stage and its seconds. The seconds of a step follow the live line.

        A log gets a line after 30 s, and whenever the time has doubled, except for steps.
        """
        is_step = what.startswith("step ")
        if seconds < _FIRST_S:
            self._logged_s = _LOGGED_S
        elif self.is_live:
            self._draw(f"{self._line}  {what}: {seconds:.0f} s".strip() if is_step else f"{what}: {seconds:.0f} s")
        elif seconds >= self._logged_s and not is_step:
            self._logged_s *= 2
            self.say(f"{what}: {seconds:.0f} s so far")

    def _draw(self, text: str) -> None:
        with self._lock:
            if self.is_live:
                print(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def format_facts(facts: Mapping[str, str], width: int | None) -> str:
    """Return one line per fact, name first. Text beyond `width` continues on indented lines."""
    indent = max(9, *map(len, facts)) + 2  # 9: later facts, such as the program, align with the first ones
    names = {name: f"{name:{indent}}" for name in facts}
    if width is None:
        return "\n".join(names[name] + text for name, text in facts.items())
    wrap = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(wrap.fill(names[name] + text) for name, text in facts.items())


def time_left(seconds: float) -> str:
    """Return seconds as `1 h 5 min`, `3 min` or `40 s`."""
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def describe(record: Mapping[str, Any]) -> str:
    """Return a record as one line: `loss 2.3126  lr 0.0003  12,345 tokens/s  MFU 41.2%  3.1 GiB`.

    An unknown rate is a dash. An unknown MFU is omitted.
    """
    (name,) = (name for name in record if name.endswith("s_per_s"))
    rate, mfu, items = record[name], record["mfu"], name.removesuffix("_per_s")
    return (
        f"loss {record['loss']:.4f}  lr {record['learning_rate']:.3g}  "
        f"{'-' if rate is None else format(rate, ',.0f')} {items}/s  "
        f"{'' if mfu is None else f'MFU {mfu:.1%}  '}{record['memory_bytes'] / 2**30:.2f} GiB"
    )


def harmless(text: str) -> str:
    """Replace control characters in the text of a model or a file, so that it is safe to print."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def accuracy(record: Mapping[str, Any]) -> str:
    """Return the evaluation accuracy of a record as `, accuracy 97.21 %`; "" if it is unknown."""
    correct = record.get("eval_correct")
    return "" if correct is None else f", accuracy {100 * correct:.2f} %"
