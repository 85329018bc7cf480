"""A picture of a simulated schedule: what computes, what is on the wire meanwhile, what the GPU waits for."""

from __future__ import annotations

import dataclasses
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfsdp.extras import load
from jfsdp.layout.mesh import MODEL_AXES
from jfsdp.plan.traffic.attribution import group_axes, is_own

if TYPE_CHECKING:
    from jfsdp.plan.plan import Plan
    from jfsdp.plan.time.timeline import Event, Timeline
    from jfsdp.plan.traffic.ledger import Ledger

COLORS = {
    "matmul": "tab:blue",
    "attention": "tab:cyan",
    "memory": "silver",
    "loop": "whitesmoke",
    "wait": "red",
    "all-gather": "tab:green",
    "reduce-scatter": "tab:orange",
    "all-reduce": "tab:purple",
    "host": "tab:olive",
}
ENDINGS = (".png", ".svg")
_LANES = ("compute", "wire", *MODEL_AXES, "host")
_JOINED = ("matmul", "attention", "memory")  # kinds of which neighbours are drawn as one bar
_LEAST = 0.01  # of the step: what takes less has no panel
_WIDTH = 11.0  # inches
_LETTER = 0.007  # of a panel's width
_LEGEND = 8  # entries in a row
_NONE: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One computation of a step, which runs `times` per step; seconds are those of one run. The step has no letter."""

    letter: str
    computation: str
    times: int
    seconds: float
    events: tuple[Event, ...]

    @property
    def lanes(self) -> list[str]:
        return [lane for lane in _LANES if any(event.lane == lane for event in self.events)]

    @property
    def title(self) -> str:
        waiting = f"{sum(_seconds(event) for event in self.events if event.kind == 'wait') * 1e3:.2f} ms"
        if self.letter:
            return f"{self.letter}, {self.times} times: {self.seconds * 1e3:.2f} ms each, {waiting} of it waiting"
        return f"the step: {self.seconds * 1e3:.1f} ms, {waiting} of it waiting outside of loops"


def find_panels(timeline: Timeline) -> tuple[Panel, ...]:
    """Return the step, then the computations that it runs and that take a part of it worth drawing, in their order."""
    found: dict[str, list[Event]] = {}
    for event in timeline.events:
        found.setdefault(event.computation, []).append(event)
    *inner, step = found.items()  # what is run is simulated before what runs it
    panels = [Panel("", name, of[0].times, max(event.end_s for event in of), tuple(of)) for name, of in (step, *inner)]
    large = [panel for panel in panels[1:] if panel.seconds * panel.times >= _LEAST * timeline.step_s]
    lettered = zip(string.ascii_uppercase, large, strict=False)
    return (panels[0], *(dataclasses.replace(panel, letter=letter) for letter, panel in lettered))


def collective_units(ledger: Ledger) -> dict[str, str]:
    """Return for each collective that moves leaves the unit of most of its bytes."""
    sent: dict[str, Counter[str]] = {}
    for part in ledger.parts:
        if part.path:
            sent.setdefault(part.collective.name, Counter())[part.unit or "root"] += int(part.wire_bytes)
    return {name: units.most_common(1)[0][0] for name, units in sent.items()}


def plot_timeline(plan: Plan, path: str | Path) -> None:
    """Draw the simulated schedule of a plan into a PNG or SVG.

    Raises:
      ValueError: for another ending than .png or .svg.
    """
    if Path(path).suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: a plot is a {' or a '.join(ENDINGS)}; rename it")
    collectives = (timed.collective for timed in plan.timeline.collectives)
    own = {one.name: group_axes(plan.layout, one.group)[0] for one in collectives if is_own(plan.layout, one)}
    draw_timeline(plan.timeline, collective_units(plan.ledger), own).savefig(path)


def draw_timeline(timeline: Timeline, units: Mapping[str, str], own: Mapping[str, str] = _NONE) -> Any:
    """Return a figure with a panel for the step and for each loop, and in each a lane for every stream in use.

    Args:
      units: the units of collectives, which stand in the bars that have room.
      own: by collective that the model's own shardings cost the axis, `tensor` or `pipe`, which has a lane next to the
        other collectives, though the clock runs all on one stream.
    """
    moved = [
        dataclasses.replace(event, lane=own[event.name]) if event.lane == "wire" and event.name in own else event
        for event in timeline.events
    ]
    panels = find_panels(dataclasses.replace(timeline, events=tuple(moved)))
    num_lanes = [len(panel.lanes) for panel in panels]
    size = _WIDTH, 0.6 + 0.75 * len(num_lanes) + 0.3 * sum(num_lanes)
    figure = load("matplotlib.figure").Figure(figsize=size, dpi=120, layout="constrained")  # needs no display
    rows = figure.subplots(len(num_lanes), squeeze=False, height_ratios=num_lanes)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        _draw_panel(axes, panel, units, {panel.computation: panel for panel in panels})
    rows[-1].set_xlabel("ms")
    shown = {bars.get_label(): bars for axes in rows for bars in axes.collections}
    handles = [shown[kind] for kind in sorted(shown, key=lambda kind: [*COLORS, kind].index(kind))]
    columns = min(len(handles), _LEGEND)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
    return figure


def _draw_panel(axes: Any, panel: Panel, units: Mapping[str, str], panels: Mapping[str, Panel]) -> None:
    heights = {lane: len(panel.lanes) - place for place, lane in enumerate(panel.lanes)}
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event in _joined(panel.events):
        begin, width = event.begin_s * 1e3, _seconds(event) * 1e3
        bars.setdefault((event.lane, event.kind), []).append((begin, width))
        text = _label(event, units, panels)
        if text and len(text) * _LETTER * panel.seconds * 1e3 < width:
            axes.text(begin + width / 2, heights[event.lane], text, ha="center", va="center", fontsize="x-small")
    for (lane, kind), spans in bars.items():
        edge = {"loop": "gray", "wait": "red"}.get(kind, "none" if lane == "compute" else "white")
        look = {"facecolor": COLORS.get(kind, "tab:brown"), "edgecolor": edge, "linewidth": 0.6}
        axes.broken_barh(spans, (heights[lane] - 0.4, 0.8), label=kind, **look)
    axes.set_yticks(list(heights.values()), list(heights))
    axes.set(xlim=(0, panel.seconds * 1e3), ylim=(0.5, len(heights) + 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(panel.title, loc="left", fontsize="medium")


def _label(event: Event, units: Mapping[str, str], panels: Mapping[str, Panel]) -> str:
    """Return the unit of a collective, or how often a loop runs which computation."""
    if event.kind == "loop" and event.name in panels:
        return f"{round(_seconds(event) / panels[event.name].seconds)} x {panels[event.name].letter}"
    return units.get(event.name, "") if event.lane == "wire" else ""


def _joined(events: Iterable[Event]) -> list[Event]:
    """Make one bar of those of one kind that compute one right after the other."""
    found: list[Event] = []
    for event in sorted(events, key=lambda event: (event.lane, event.begin_s)):
        last = found[-1] if found else None
        if last and last.kind == event.kind in _JOINED and event.begin_s - last.end_s < 1e-9:
            found[-1] = dataclasses.replace(last, end_s=event.end_s)
        else:
            found.append(event)
    return found


def _seconds(event: Event) -> float:
    return event.end_s - event.begin_s
