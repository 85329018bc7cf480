"""A picture of all candidates, memory against time, and of those that no other beats in both."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jfsdp.plan.picture import check_picture, make_figure
from jfsdp.plan.search.candidates import Candidate, Search

_GIB = 2**30
_WIDTH = 130  # characters of a line under the picture
_MAX_NAMED = 12  # the fastest of the front
_FAR = 1.5  # times the GPU's limit: what needs more is drawn at the edge


def plot_front(search: Search, path: str | Path) -> None:
    """Draw memory against time of everything that a search planned, into a PNG or SVG.

    Raises:
      ValueError: for another ending than .png or .svg, or if nothing was planned.
    """
    path = Path(path)
    check_picture(path)
    planned = [one for one in search.tried if one.is_planned]
    if not planned:
        raise ValueError(f"{path}: no candidate was planned, so there is nothing to draw; see what the search says")
    named = search.front[-_MAX_NAMED:]
    figure = make_figure(10, 6 + 0.2 * len(named))
    axes = figure.subplots()
    _draw_points(axes, search, planned)
    limit = search.limit_bytes / _GIB
    axes.axvline(limit, color="tab:red", linestyle="--", linewidth=1, label=f"limit: {limit:.1f} GiB")
    for number, one in enumerate(named, 1):
        where = one.needed_bytes / _GIB, one.item_s * 1e6
        axes.annotate(str(number), where, xytext=(-3, -15), textcoords="offset points", fontsize="small")
        axes.plot([], [], " ", label=textwrap.fill(f"{number}: {_short(one)}", _WIDTH, subsequent_indent="    "))
    gain = f"; the fastest {search.gain:.2f}x as fast as given" if search.gain else ""
    axes.set(
        title=f"{search.title}: {len(planned)} compiled, {len(search.tried) - len(planned)} not{gain}",
        xlabel="memory per GPU (GiB)",
        ylabel=f"predicted \u00b5s per {search.item} and GPU",
    )
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower left", frameon=False)
    figure.savefig(path)


def _short(one: Candidate) -> str:
    return one.label.replace("xla_gpu_", "").replace("experimental_", "")


def _draw_points(axes: Any, search: Search, planned: list[Candidate]) -> None:
    far = _FAR * search.limit_bytes
    lacking = f"does not fit (what needs over {far / _GIB:.0f} GiB is drawn there)"

    def draw(points: Iterable[Candidate], style: str, **look: Any) -> None:
        pairs = [(min(one.needed_bytes, far) / _GIB, one.item_s * 1e6) for one in points]
        if pairs:
            axes.plot(*zip(*pairs, strict=True), style, **look)

    draw((one for one in planned if one.fits), "o", color="tab:blue", alpha=0.5, label="fits")
    draw((one for one in planned if not one.fits), "x", color="tab:red", alpha=0.6, label=lacking)
    draw(search.front, "-", color="tab:green", linewidth=1.5, label="Pareto front: the numbers")
    draw([search.default] * search.default.is_planned, "s", color="black", fillstyle="none", ms=9, label="as given")
    draw([search.best] if search.best else [], "*", color="tab:orange", ms=16, label="fastest that fits")
