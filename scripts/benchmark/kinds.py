"""The kinds of operations of a profile, and what overlapping ones get of the time. Imports neither JAX nor PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MATMUL, ATTENTION, ELEMENTWISE, COPY = "matmul", "attention", "norm, loss, elementwise", "copies alone"
COLLECTIVE, OPTIMIZER, IDLE = "collectives", "optimizer and clipping", "idle, or not named"
KINDS = (MATMUL, ATTENTION, ELEMENTWISE, COPY, COLLECTIVE, OPTIMIZER, IDLE)
TOP = 12


def share_time(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Give each moment to the operations that run at it, in equal parts.

    Args:
      spans: begin, end and name of each run of an operation on one device.

    Returns:
      Time by name, in the unit of the spans; the sum is the time in which anything runs.
    """
    edges = sorted(edge for begin, end, name in spans for edge in ((begin, 1, name), (end, -1, name)))
    running: dict[str, int] = {}
    found: dict[str, float] = {}
    count, last = 0, 0.0
    for when, change, name in edges:
        for other, times in running.items():
            found[other] = found.get(other, 0.0) + (when - last) * times / count
        running[name] = running.get(name, 0) + change
        if not running[name]:
            del running[name]
        count, last = count + change, when
    return found


def as_profile(ms: Mapping[str, float], kind_of: Mapping[str, str], wall_ms: float, steps: int) -> dict[str, Any]:
    """Return a profile as plain data: ms of a step by kind, and the operations that took longest.

    Args:
      ms: of all steps, by operation.
      wall_ms: of all steps.
    """
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for name, value in ms.items():
        kinds[kind_of[name]] += value / steps
    kinds[IDLE] = max(wall_ms / steps - sum(kinds.values()), 0.0)
    longest = sorted(ms.items(), key=lambda item: -item[1])[:TOP]
    return {
        "step_ms": wall_ms / steps,
        "kinds": kinds,
        "longest": [{"kind": kind_of[name], "name": name, "ms": value / steps} for name, value in longest],
    }
