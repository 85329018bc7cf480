"""The results as plain data, and as tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .kinds import KINDS
from .options import BenchOptions
from .race import Turn
from .stats import Difference, Ratio, by_round, compare_losses, compare_seconds

_GIB, _WIDTH = 2**30, 200


def collect(options: BenchOptions, turns: Mapping[str, Sequence[Turn]], tokens: int) -> dict[str, dict[str, Any]]:
    """Return what was measured of each contender, as plain data.

    Args:
      tokens: of a global batch (images, where batches hold these).
    """
    differences, first = compare_losses(turns), turns[options.settings[0]]
    base = by_round(first, together=options.together)
    found = {}
    for name, own in turns.items():
        seconds = by_round(own, together=options.together)
        median = statistics.median(second for turn in seconds for second in turn)
        ratio = Ratio(1, 1, 1) if own is first else compare_seconds(seconds, base, options.seed)
        compiling = [turn.compile_s for turn in own if turn.compile_s is not None]
        found[name] = {
            "step_s": median,
            "tokens_per_s": tokens / median,
            "ratio": dataclasses.asdict(ratio),
            "first_step_s": statistics.median(turn.first_s for turn in own),
            "compile_s": statistics.median(compiling) if compiling else None,
            "memory": {kind: max(turn.memory.get(kind, 0) for turn in own) for kind in own[0].memory},
            "loss_difference": dataclasses.asdict(differences[name]) if name in differences else None,
            "seconds": seconds,
            "losses": [turn.losses for turn in own],
        }
    return found


def too_far(options: BenchOptions, turns: Mapping[str, Sequence[Turn]]) -> list[Difference]:
    """Return the contenders that do not compute what the first does."""
    return [found for found in compare_losses(turns).values() if not found.relative <= options.tolerance]


def show(found: Mapping[str, Any], head: Sequence[str]) -> None:
    """Print the tables of what `scripts/bench.py --json` would print."""
    from rich.console import Console

    console = Console(width=_WIDTH)  # rich would cut columns at 80 where the output is a file
    for line in head:
        console.print(line, highlight=False)
    console.print(_contenders(found["settings"]))
    for name, own in found["settings"].items():
        if own["loss_difference"] is not None:
            far = own["loss_difference"]
            text = f"losses of {name}: at most {far['relative']:.1e} from the first's (step {far['step']})"
            console.print(text, highlight=False)
    if found.get("profile"):
        console.print(_kinds(found["profile"]))
        for name, profile in found["profile"].items():
            console.print(_longest(name, profile["longest"]))
    if found.get("plan"):
        plan = found["plan"]
        console.print(
            f"\njfsdp plan, {plan['setting']} on {plan['devices']} x {plan['gpu']}: needs "
            f"{plan['needed_bytes'] / _GIB:.3f} GiB, estimated {1e3 * plan['step_s']:.2f} ms",
            highlight=False,
        )
        console.print(_kernels(plan["kernels"]))


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _contenders(settings: Mapping[str, Any]) -> Any:
    memories = list(dict.fromkeys(kind for own in settings.values() for kind in own["memory"]))
    table = _table(
        *("setting", "ms, median", "tokens/s", "ratio", "95 %", "first step, s", "compiling, s"),
        *(f"{kind}, GiB" for kind in memories),
    )
    for name, own in settings.items():
        ratio, compiling = own["ratio"], own["compile_s"]
        table.add_row(
            name,
            f"{1e3 * own['step_s']:.2f}",
            f"{own['tokens_per_s']:,.0f}",
            f"{ratio['median']:.4f}",
            "-" if ratio["low"] is None else f"{ratio['low']:.4f}..{ratio['high']:.4f}",
            f"{own['first_step_s']:.2f}",
            "-" if compiling is None else f"{compiling:.2f}",
            *(f"{own['memory'][kind] / _GIB:.3f}" if kind in own["memory"] else "-" for kind in memories),
        )
    return table


def _kinds(profiles: Mapping[str, Any]) -> Any:
    table = _table("\nms of a step, profiled", *(f"\n{name}" for name in profiles))
    for kind in KINDS:
        table.add_row(kind, *(f"{profile['kinds'][kind]:.2f}" for profile in profiles.values()))
    table.add_row("the step", *(f"{profile['step_ms']:.2f}" for profile in profiles.values()))
    return table


def _longest(name: str, longest: Sequence[Mapping[str, Any]]) -> Any:
    table = _table(f"\n{name}: longest", "\nms")
    for one in longest:
        table.add_row(f"{one['kind'].split(',')[0]:12} {one['name']}", f"{one['ms']:.2f}")
    return table


def _kernels(kernels: Sequence[Mapping[str, Any]]) -> Any:
    table = _table("kernel", "count", "ms")
    for one in kernels:
        table.add_row(f"{one['kind']:12} {one['name']}", str(one["count"]), f"{1e3 * one['s']:.3f}")
    return table
