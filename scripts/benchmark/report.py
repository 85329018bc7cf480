"""Results of the benchmark: medians, ratios, memory peaks, differences of losses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .race import Turn

_GIB, _WIDTH = 2**30, 200


def collect(turns: Mapping[str, Sequence[Turn]], tokens: int) -> dict[str, dict[str, Any]]:
    """Return the measurements of each contender as plain data.

    Ratios compare with the first contender: the ratio of median step times in each round, and the median, minimum and
    maximum over rounds. The loss difference is the largest relative difference from the first contender.

    Args:
      tokens: tokens of a global batch (or rows, if they are not tokens).
    """
    base = next(iter(turns.values()))
    found = {}
    for name, rounds in turns.items():
        medians = [statistics.median(turn.seconds) for turn in rounds]
        ratios = [one / statistics.median(turn.seconds) for one, turn in zip(medians, base, strict=True)]
        step_s = statistics.median(second for turn in rounds for second in turn.seconds)
        ours, theirs = (np.array([turn.losses for turn in side]) for side in (rounds, base))
        far = np.where(np.isfinite(ours) & np.isfinite(theirs), abs(ours - theirs) / abs(theirs), np.inf)
        place = np.unravel_index(int(far.argmax()), far.shape)
        found[name] = {
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
            "first_step_s": statistics.median(turn.first_s for turn in rounds),
            "memory": {kind: max(turn.memory.get(kind, 0) for turn in rounds) for kind in rounds[0].memory},
            "loss_difference": {
                "relative": float(far[place]),
                "step": int(place[1]) + 1,
                "loss": float(ours[place]),
                "first_loss": float(theirs[place]),
            },
            "seconds": [turn.seconds for turn in rounds],
            "losses": [turn.losses for turn in rounds],
        }
    return found


def describe(name: str, difference: Mapping[str, Any]) -> str:
    """Describe the difference of a contender's losses from the first contender's."""
    return (
        f"{name}: the loss of step {difference['step']} is {difference['loss']:.6f} and not "
        f"{difference['first_loss']:.6f}, a relative difference of {difference['relative']:.2e}"
    )


def show(settings: Mapping[str, Any], title: str) -> None:
    """Print the results of `scripts/bench.py --json` as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=_WIDTH)  # rich would truncate columns at 80 if the output is a file
    console.print(title, highlight=False)
    memories = list(dict.fromkeys(kind for result in settings.values() for kind in result["memory"]))
    columns = ("setting", "ms, median", "tokens/s", "ratio", "least..greatest", "first step, s", "losses differ by")
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate((*columns, *(f"{kind}, GiB" for kind in memories))):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for name, result in settings.items():
        ratio = result["ratio"]
        table.add_row(
            name,
            f"{1e3 * result['step_s']:.2f}",
            f"{result['tokens_per_s']:,.0f}",
            f"{ratio['median']:.4f}",
            f"{ratio['low']:.4f}..{ratio['high']:.4f}",
            f"{result['first_step_s']:.2f}",
            f"{result['loss_difference']['relative']:.1e}",
            *(f"{result['memory'][kind] / _GIB:.3f}" if kind in result["memory"] else "-" for kind in memories),
        )
    console.print(table)
