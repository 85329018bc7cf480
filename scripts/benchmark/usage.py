"""What a process has taken of its machine. Imports neither JAX nor PyTorch."""

from __future__ import annotations

import os
import re
from pathlib import Path


def resident_peak() -> int:
    """Return the most bytes of memory that this process has had resident (VmHWM), its libraries included."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def use_cores(count: int) -> None:
    """Keep this process and its threads on the first so many of the cores that it may use."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
