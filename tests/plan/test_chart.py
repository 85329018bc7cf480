"""The picture of a timeline: its panels, lanes, bars and labels; no pixels."""

import dataclasses
import re
import types
from typing import Any

import matplotlib
import pytest

from jfsdp.plan.time.chart import draw_timeline, find_panels, phases, plot_timeline
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


def test_the_step_comes_first_and_then_its_loops_by_name(clock):
    panels = find_panels(clock, {"layer": "forward of layers"})
    assert [(one.name, one.computation, one.times, one.seconds) for one in panels] == [
        ("", "main", 1, 48),
        ("forward of layers", "layer", 3, 12),
    ]
    assert [one.lanes for one in panels] == [["compute"], ["compute", "wire"]]


def test_loops_are_named_by_what_they_move_and_when(clock):
    def computation(name, *instructions):
        made = [types.SimpleNamespace(name=one, op_name=op, opcode=code) for one, op, code in instructions]
        return types.SimpleNamespace(name=name, instructions=made)

    entry = computation("main", ("w", "", "while"))
    parts = [
        computation("a", ("g", "jvp(f)", "all-gather-start")),
        computation("b", ("d", "jvp(loss)", "dot")),
        computation("c", ("g", "jvp(f)", "all-gather-start"), ("e", "transpose(jvp(f))", "dot")),
        computation("t", ("w", "", "while")),
        entry,
    ]
    module: Any = types.SimpleNamespace(computations={one.name: one for one in parts}, entry=entry)
    event = clock.events[-1]
    step = [dataclasses.replace(event, kind="loop", name=name) for name in "abct"]
    found = phases(module, {"g": "layers"}, step)
    assert found == {"a": "forward of layers", "b": "loss", "c": "backward of layers", "t": "tick"}


def test_a_step_without_loops_is_one_panel():
    (only,) = draw_timeline(timeline(f"%a {DOT}", f"%b {COPY}"), {}).axes
    assert [label.get_text() for label in only.get_yticklabels()] == ["compute"]


def test_what_runs_over_tensor_has_a_lane_of_its_own(clock):
    _, layer = draw_timeline(clock, {"g": "layers"}, {"h": "tensor", "a": "tensor"}).axes
    assert bars(layer) == {
        ("compute", "matmul"): [(0, 10_000)],
        ("compute", "wait"): [(10_000, 12_000)],
        ("send", "all-gather"): [(0, 6_000)],
        ("tensor", "all-gather"): [(6_000, 12_000)],
    }
    assert [label.get_text() for label in layer.get_yticklabels()] == ["compute", "send", "tensor"]


def test_the_picture_of_a_plan_knows_which_collectives_run_over_tensor(clock, tmp_path):
    layout = types.SimpleNamespace(mesh_sizes=(("fsdp", 4), ("tensor", 2)))
    groups = {"g": (0, 2, 4, 6), "h": (0, 1)}
    collectives = [dataclasses.replace(one.collective, group=groups[one.collective.name]) for one in clock.collectives]
    timed = [types.SimpleNamespace(collective=one) for one in collectives]
    timeline, ledger = dataclasses.replace(clock, collectives=tuple(timed)), types.SimpleNamespace(parts=())
    path = tmp_path / "step.svg"
    layout.strategy = types.SimpleNamespace(name="full_shard")
    cluster = types.SimpleNamespace(num_devices=8, gpu=types.SimpleNamespace(name="h100"))
    compiled = types.SimpleNamespace(text=f"HloModule m, is_scheduled=true\n\nENTRY main {{\n  ROOT %d {COPY}\n}}\n")
    plan: Any = types.SimpleNamespace(
        timeline=timeline, layout=layout, ledger=ledger, cluster=cluster, compiled=compiled
    )
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_timeline(plan, path)
    assert re.findall(">(compute|send|tensor)<", path.read_text()) == ["compute", "compute", "send", "tensor"]
