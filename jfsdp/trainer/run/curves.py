"""The loss curve as an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def save_loss_curve(path: Path, records: Sequence[Mapping[str, Any]], levels: Mapping[str, float], item: str) -> None:
    """Draw training and held-out loss over steps.

    Args:
      records: lines of metrics.jsonl.
      levels: horizontal lines by name, such as the entropies of the corpus.
      item: what losses are means over.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, records, "loss", "training loss", linewidth=1)
    _draw(axes, records, "eval_loss", "held-out loss", marker="o", markersize=4)
    for number, (name, value) in enumerate(levels.items()):
        axes.axhline(value, linestyle="--", linewidth=0.8, color=f"C{number + 2}", label=f"{name} entropy {value:.3f}")
    axes.set(xlabel="step", ylabel=f"nats per {item}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _draw(axes: Any, records: Sequence[Mapping[str, Any]], key: str, label: str, **style: Any) -> None:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
