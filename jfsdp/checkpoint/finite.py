"""Non-finite values, counted while arrays are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jfsdp.checkpoint.source import Index, Source, count_nonfinite


class Counted:
    """A source that counts the values it reads, and the non-finite ones among them."""

    def __init__(self, source: Source):
        self._source, self.arrays = source, source.arrays
        self._lock, self._counts = threading.Lock(), dict[str, tuple[int, int]]()

    def read(self, name: str, index: Index) -> np.ndarray:
        block = self._source.read(name, index)
        found = count_nonfinite(block)
        with self._lock:
            bad, total = self._counts.get(name, (0, 0))
            self._counts[name] = bad + found, total + block.size
        return block

    def lines(self) -> tuple[str, ...]:
        """Return a line for each array with non-finite values, with their number and the number of values read."""
        counts = sorted(self._counts.items())
        return tuple(f"{name}: {bad:,} of {total:,} elements are not finite" for name, (bad, total) in counts if bad)


def refuse_nonfinite(where: Any, lines: Sequence[str], *, allow: bool) -> None:
    """Raise an error if there are non-finite values and they are not allowed.

    Raises:
      ValueError: with the first 8 lines.
    """
    if lines and not allow:
        more = f"; and {len(lines) - 8} more arrays" if len(lines) > 8 else ""
        remedy = "use weights without NaN and infinite values, or pass allow_nonfinite=True (--allow-nonfinite)"
        raise ValueError(f"{where}: {'; '.join(lines[:8])}{more}; {remedy}")
