"""The loss curve as an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def save_loss_curve(path: Path, records: Sequence[Mapping[str, Any]], item: str) -> None:
    """Draw training and held-out loss over steps.

    Args:
      records: lines of metrics.jsonl.
      item: what losses are means over.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, records, "loss", "training loss", linewidth=1)
    _draw(axes, records, "eval_loss", "held-out loss", marker="o", markersize=4)
    axes.set(xlabel="step", ylabel=f"nats per {item}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _draw(axes: Any, records: Sequence[Mapping[str, Any]], key: str, label: str, **style: Any) -> None:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
