"""All step times of a benchmark as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jfsdp.plan.picture import make_figure

from .race import Turn


def draw(turns: Mapping[str, Sequence[Turn]], path: Path, title: str) -> None:
    """Draw every timed step as a dot, a row for each contender, its median as a line."""
    figure = make_figure(8, 1.2 + 0.55 * len(turns))
    axes = figure.add_subplot()
    for row, own in enumerate(turns.values()):
        ms = [1e3 * second for turn in own for second in turn.seconds]
        middle = sorted(ms)[len(ms) // 2]
        axes.plot(ms, [row] * len(ms), "o", alpha=0.35, markersize=4)
        axes.plot([middle, middle], [row - 0.35, row + 0.35], color="black", linewidth=1)
        axes.annotate(f"{middle:.1f}", (middle, row - 0.35), ha="center", va="bottom", fontsize="x-small")
    axes.set(title=title, xlabel="ms of a step", yticks=range(len(turns)), yticklabels=list(turns), xlim=(0, None))
    axes.set_ylim(len(turns) - 0.4, -0.75)  # the first above, with room for its number
    figure.savefig(path)
