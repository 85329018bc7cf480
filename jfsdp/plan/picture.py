"""Pictures without a screen: which files they may be, and a figure to draw on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jfsdp.extras import load

ENDINGS = (".png", ".svg")


def check_picture(path: Path) -> None:
    """Refuse a file that is no picture.

    Raises:
      ValueError: for another ending than .png or .svg.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: a plot is a {' or a '.join(ENDINGS)}; rename it")


def make_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of inches, which needs no display and which nobody need close."""
    Figure = load("matplotlib.figure").Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")
