"""The picture of a timeline: its panels, lanes, bars and labels; no pixels."""

import dataclasses
import re
import types
from typing import Any

import matplotlib
import pytest

from jfsdp.plan.time.chart import draw_timeline, find_panels, plot_timeline
from tests.plan.test_timeline import COPY, DOT, done, loop, start, timeline


@pytest.fixture(scope="module")
def clock():
    """A loop whose second gather is waited for, between a matmul and two copies."""
    before, line = loop("layer", 3, start("g"), start("h"), f"%a {DOT}", done("g"), done("h"))
    return timeline(f"%first {DOT}", line, f"%c {COPY}", f"%d {COPY}", before=before)


def bars(axes):
    """The bars of a panel by lane and kind, as (begin, end) in milliseconds."""
    lanes = dict(zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels()), strict=True))
    found = {}
    for collection in axes.collections:
        boxes = [path.get_extents() for path in collection.get_paths()]
        lane = lanes[(boxes[0].y0 + boxes[0].y1) / 2]
        found[lane, collection.get_label()] = [(round(box.x0), round(box.x1)) for box in boxes]
    return found


def test_the_step_comes_first_and_then_each_loop_with_its_times(clock):
    panels = find_panels(clock)
    assert [(one.letter, one.computation, one.times, one.seconds) for one in panels] == [
        ("", "main", 1, 48),
        ("A", "layer", 3, 12),
    ]
    assert [one.lanes for one in panels] == [["compute"], ["compute", "wire"]]


def test_what_runs_over_tensor_has_a_lane_of_its_own(clock):
    _, layer = draw_timeline(clock, {"g": "layers"}, {"h": "tensor", "a": "tensor"}).axes
    assert bars(layer) == {
        ("compute", "matmul"): [(0, 10_000)],
        ("compute", "wait"): [(10_000, 12_000)],
        ("wire", "all-gather"): [(0, 6_000)],
        ("tensor", "all-gather"): [(6_000, 12_000)],
    }
    assert [label.get_text() for label in layer.get_yticklabels()] == ["compute", "wire", "tensor"]


def test_the_picture_of_a_plan_knows_which_collectives_run_over_tensor(clock, tmp_path):
    layout = types.SimpleNamespace(mesh_sizes=(("fsdp", 4), ("tensor", 2)))
    groups = {"g": (0, 2, 4, 6), "h": (0, 1)}
    collectives = [dataclasses.replace(one.collective, group=groups[one.collective.name]) for one in clock.collectives]
    timed = [types.SimpleNamespace(collective=one) for one in collectives]
    timeline, ledger = dataclasses.replace(clock, collectives=tuple(timed)), types.SimpleNamespace(parts=())
    path = tmp_path / "step.svg"
    plan: Any = types.SimpleNamespace(timeline=timeline, layout=layout, ledger=ledger, pipeline=None)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_timeline(plan, path)
    assert re.findall(">(compute|wire|tensor)<", path.read_text()) == ["compute", "compute", "wire", "tensor"]
