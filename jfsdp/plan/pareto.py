"""Which candidates no other beats in both memory and time, and a picture of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from jfsdp.plan.search import Candidate, Search

_GIB = 2**30
_KINDS = ("png", "svg")
_FAR = 1.5  # times the GPU's limit: what needs more is drawn at the edge


class Point(Protocol):
    """What a front needs of a candidate."""

    @property
    def needed_bytes(self) -> int: ...

    @property
    def item_s(self) -> float: ...


P = TypeVar("P", bound=Point)


def pareto_front(points: Iterable[P]) -> tuple[P, ...]:
    """Return the points that none beats in memory without being slower; leanest first. Of equal ones, the first."""
    front: list[P] = []
    for point in sorted(points, key=lambda point: (point.needed_bytes, point.item_s)):
        if not front or point.item_s < front[-1].item_s:
            front.append(point)
    return tuple(front)


def plot_front(search: Search, path: str | Path) -> None:
    """Draw memory against time of everything that a search planned, into a PNG or SVG.

    Raises:
      ValueError: for another ending than .png or .svg, or if nothing was planned.
    """
    path = Path(path)
    if path.suffix.lower().lstrip(".") not in _KINDS:
        raise ValueError(f"{path}: a plot is a .png or a .svg; rename it")
    planned = [one for one in search.tried if one.is_planned]
    if not planned:
        raise ValueError(f"{path}: no candidate was planned, so there is nothing to draw; see what the search says")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    limit = search.limit_bytes / _GIB
    _draw_points(axes, search, planned, limit)
    axes.axvline(limit, color="tab:red", linestyle="--", linewidth=1)
    axes.annotate(
        f"limit {limit:.0f} GiB", (limit, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right",
        fontsize="small", color="tab:red",
    )  # fmt: skip
    gain = f", {search.gain:.2f}x the default" if search.gain else ""
    axes.set(
        title=f"{search.title}: {len(planned)} planned, {len(search.tried) - len(planned)} not{gain}",
        xlabel="memory per GPU (GiB)",
        ylabel=f"predicted microseconds per {search.item} and GPU",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper right" if search.best is None else "best")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_points(axes: Any, search: Search, planned: list[Candidate], limit: float) -> None:
    def at(points: Iterable[Candidate]) -> tuple[list[float], list[float]]:
        pairs = [(min(one.needed_bytes / _GIB, _FAR * limit), one.item_s * 1e6) for one in points]
        return [x for x, _ in pairs], [y for _, y in pairs]

    axes.plot(*at(one for one in planned if one.fits), "o", color="tab:blue", alpha=0.5, label="fits")
    axes.plot(*at(one for one in planned if not one.fits), "x", color="tab:red", alpha=0.6, label="does not fit")
    if search.front:
        axes.plot(*at(search.front), "-", color="tab:green", linewidth=1.5, label="Pareto front")
    if search.default.is_planned:
        axes.plot(*at([search.default]), "s", color="black", markersize=8, fillstyle="none", label="as given")
    if search.best:
        label = f"fastest that fits: {search.best.label}"
        axes.plot(*at([search.best]), "*", color="tab:orange", markersize=16, label=label)
    for number, one in enumerate(search.front, 1):
        (x,), (y,) = at([one])
        axes.annotate(str(number), (x, y), xytext=(-4, -12), textcoords="offset points", fontsize="small")
        axes.plot([], [], " ", label=f"{number}  {one.label}")
