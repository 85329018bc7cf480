"""Draw a simulated schedule: compute, communication and waits of a step and of its largest loops."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfsdp.extras import load
from jfsdp.layout.mesh import SENT_AXES
from jfsdp.plan.hlo.parse import Module, parse_module
from jfsdp.plan.traffic.attribution import group_axes, split_activations

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
_LANES = {"compute": "compute", "wire": "send", **{axis: axis for axis in SENT_AXES}, "host": "host"}
_JOINED = ("matmul", "attention", "memory")  # kinds whose adjacent events are drawn as one bar
_MIN_SHARE = 0.01  # share of the step from which a loop has a panel
_MAX_LOOPS = 2  # loops with a panel
_WIDTH, _FONT = 7.0, 10.5  # inches and points: readable if the picture is scaled to 400 pixels
_LETTER = 0.01  # width of a letter, as a part of the figure's
_NONE: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One computation of a step, which runs `times` per step. Seconds are of one run.

    Attributes:
      name: such as "forward of layers"; empty for the step.
    """

    computation: str
    times: int
    seconds: float
    events: tuple[Event, ...]
    name: str = ""

    @property
    def lanes(self) -> list[str]:
        return [lane for lane in _LANES if any(event.lane == lane for event in self.events)]

    @property
    def title(self) -> str:
        waiting = sum(_seconds(event) for event in self.events if event.kind == "wait") * 1e3
        return f"{self.name}, 1 of {self.times}\n{self.seconds * 1e3:.2f} ms, {waiting:.2f} of it waiting"


def find_panels(timeline: Timeline, names: Mapping[str, str] = _NONE) -> tuple[Panel, ...]:
    """Return the step and its largest loops, in their order.

    Args:
      names: of computations; see `phases`.
    """
    found: dict[str, list[Event]] = {}
    for event in timeline.events:
        found.setdefault(event.computation, []).append(event)
    panels = [  # loops are simulated before the computation that runs them
        Panel(name, of[0].times, max(event.end_s for event in of), tuple(of), names.get(name, name))
        for name, of in found.items()
    ]
    step, total = dataclasses.replace(panels[-1], name=""), lambda panel: panel.seconds * panel.times
    large = [panel for panel in panels[:-1] if total(panel) >= _MIN_SHARE * timeline.step_s]
    zoomed = sorted(large, key=total)[-_MAX_LOOPS:]
    return (step, *(panel for panel in large if panel in zoomed))


def phases(module: Module, units: Mapping[str, str], step: Iterable[Event]) -> dict[str, str]:
    """Name computations: "forward of layers" and "backward of layers", "loss" between them, "tick" of a pipeline.

    Args:
      units: of collectives.
      step: the events of the step.
    """
    found = {}
    for computation in module.computations.values():
        moved = Counter(units[one.name] for one in computation.instructions if one.name in units)
        is_backward = any("transpose(" in one.op_name for one in computation.instructions)
        if computation is not module.entry and any(one.opcode == "while" for one in computation.instructions):
            found[computation.name] = "tick"
        elif moved:
            phase = "backward" if is_backward else "forward"
            found[computation.name] = f"{phase} of {moved.most_common(1)[0][0]}"
    loops = [event.name for event in step if event.kind == "loop"]
    is_forward = [found.get(name, "").startswith("forward") for name in loops]
    between = {name for place, name in enumerate(loops) if any(is_forward[:place]) and not any(is_forward[place:])}
    return dict.fromkeys(between, "loss") | found


def collective_units(ledger: Ledger) -> dict[str, str]:
    """Return the unit of most of the bytes of each collective that moves leaves."""
    sent: dict[str, Counter[str]] = {}
    for part in ledger.parts:
        if part.path:
            sent.setdefault(part.collective.name, Counter())[part.unit or "root"] += int(part.wire_bytes)
    return {name: units.most_common(1)[0][0] for name, units in sent.items()}


def plot_timeline(plan: Plan, path: str | Path) -> None:
    """Draw the simulated schedule of a plan into a PNG or SVG file.

    Raises:
      ValueError: if the file name does not end in .png or .svg.
    """
    if Path(path).suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: a plot is a {' or a '.join(ENDINGS)}; rename it")
    items = (timed.collective for timed in plan.timeline.collectives)
    own = {
        one.name: group_axes(plan.layout, one.group)[0] for one in items if split_activations(plan.layout, one)[0].parts
    }
    units = collective_units(plan.ledger)
    module = parse_module(plan.compiled.text)
    step = [event for event in plan.timeline.events if event.computation == module.entry.name]
    names = phases(module, units, step)
    title = f"{plan.layout.strategy.name} on {plan.cluster.num_devices} x {plan.cluster.gpu.name}"
    draw_timeline(plan.timeline, units, own, names, title).savefig(path)


def draw_timeline(
    timeline: Timeline,
    units: Mapping[str, str],
    own: Mapping[str, str] = _NONE,
    names: Mapping[str, str] = _NONE,
    title: str = "",
) -> Any:
    """Return a figure with the step, and below it one run of its largest loops, with a lane for every stream in use.

    Args:
      units: the unit of each collective, shown in bars that are wide enough.
      own: the axis (`tensor`, say) of each collective of activations. Each axis has a separate lane, although the
        simulation runs all collectives on one stream.
      names: of computations, for titles.
      title: text before the seconds of the step.
    """
    moved = [
        dataclasses.replace(event, lane=own[event.name]) if event.lane == "wire" and event.name in own else event
        for event in timeline.events
    ]
    step, *loops = find_panels(dataclasses.replace(timeline, events=tuple(moved)), names)
    heights = [len(step.lanes), *([max(len(panel.lanes) for panel in loops)] if loops else [])]
    figure = load("matplotlib.figure").Figure(figsize=(_WIDTH, 1.6 + 0.5 * sum(heights)), dpi=120, layout="constrained")
    grid = figure.add_gridspec(len(heights), max(1, len(loops)), height_ratios=heights)
    top = figure.add_subplot(grid[0, :])
    _draw_panel(top, step, units, names, 1.0)
    top.set_title(f"{title}: {step.seconds * 1e3:,.1f} ms".removeprefix(": "), loc="left", fontsize=_FONT + 1)
    for place, panel in enumerate(loops):
        axes = figure.add_subplot(grid[1, place])
        _draw_panel(axes, panel, units, names, 1 / len(loops))
        axes.set_title(panel.title, loc="left", fontsize=_FONT)
        _point(figure, top, step, axes, panel)
    shown = {bars.get_label(): bars for axes in figure.axes for bars in axes.collections}
    handles = [shown[kind] for kind in sorted(shown, key=lambda kind: [*COLORS, kind].index(kind)) if kind != "loop"]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=_FONT, frameon=False)
    return figure


def _point(figure: Any, top: Any, step: Panel, axes: Any, panel: Panel) -> None:
    """Draw an arrow from the longest box of a loop in the step to its panel."""
    boxes = [event for event in step.events if event.name == panel.computation]
    if boxes:
        box = max(boxes, key=_seconds)
        begin, end = ((box.begin_s + box.end_s) * 500, top.get_ylim()[1] - 0.95), (0.5, 1.5)
        how = {"coordsA": "data", "coordsB": "axes fraction", "axesA": top, "axesB": axes}
        arrow = load("matplotlib.patches").ConnectionPatch(begin, end, **how, arrowstyle="-|>", color="dimgray")
        figure.add_artist(arrow)


def _draw_panel(axes: Any, panel: Panel, units: Mapping[str, str], names: Mapping[str, str], width: float) -> None:
    """Draw the lanes of one computation; `width` is the panel's share of the figure."""
    heights = {lane: len(panel.lanes) - place for place, lane in enumerate(panel.lanes)}
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event in _joined(panel.events):
        begin, length = event.begin_s * 1e3, _seconds(event) * 1e3
        bars.setdefault((event.lane, event.kind), []).append((begin, length))
        text = _label(event, units, names)
        if text and max(map(len, text.split("\n"))) * _LETTER * panel.seconds * 1e3 < length * width:
            middle = begin + length / 2, heights[event.lane]
            axes.text(*middle, text, ha="center", va="center", fontsize=_FONT - 1.5, linespacing=0.95)
    for (lane, kind), spans in bars.items():
        edge = {"loop": "gray", "wait": "red"}.get(kind, "none" if lane == "compute" else "white")
        look = {"facecolor": COLORS.get(kind, "tab:brown"), "edgecolor": edge, "linewidth": 0.6}
        axes.broken_barh(spans, (heights[lane] - 0.4, 0.8), label=kind, **look)
    axes.set_yticks(list(heights.values()), [_LANES[lane] for lane in heights], fontsize=_FONT)
    axes.set(xlim=(0, panel.seconds * 1e3), ylim=(0.5, len(heights) + 0.5))
    axes.tick_params(axis="x", labelsize=_FONT - 1.5)
    axes.set_xlabel("ms", fontsize=_FONT - 1.5, loc="right", labelpad=-2)
    axes.spines[["top", "right"]].set_visible(False)


def _label(event: Event, units: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return the unit of a collective, or the name of a loop."""
    if event.kind == "loop":
        return names.get(event.name, "").replace(" of ", "\nof ")
    return units.get(event.name, "") if event.lane == "wire" else ""


def _joined(events: Iterable[Event]) -> list[Event]:
    """Merge adjacent compute events of the same kind into one."""
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
