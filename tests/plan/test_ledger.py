"""The ledger: measured beside expected, unit by unit; on compiled steps, and on collectives made by hand."""

import math

import pytest

from jfsdp.engine.movements import movements
from jfsdp.plan.hlo.collectives import Collective, find_collectives
from jfsdp.plan.hlo.op_names import split_names
from jfsdp.plan.hlo.parse import Shape, parse_module
from jfsdp.plan.traffic.attribution import group_axes
from jfsdp.plan.traffic.audit import audit
from jfsdp.plan.traffic.ledger import make_ledger
from tests.plan import programs
from tests.steps import spec_of

GROUPS = (("replica", 2), ("fsdp", 4))
NORMS = 5e-4  # the share of the norms' scales: XLA sums their gradients in float32


def ledger_of(layout, text, gpus_per_node=None, **step):
    num_devices = math.prod(size for _, size in layout.mesh_sizes)
    collectives = find_collectives(parse_module(text), num_devices)
    return make_ledger(layout, collectives, spec_of(layout, **step), gpus_per_node=gpus_per_node)


CASES = {
    "full_shard": {},
    "a list of layers": {"config": (("stacked", False),)},
    "replicas, accumulated": {"mesh": GROUPS, "accumulate": 2},
    "ddp": {"strategy": "ddp"},
    "hpz": {"strategy": "zeropp", "hosts": 2},
    "hfsdp": {"strategy": "hfsdp", "mesh": GROUPS},
}


QUICK = ["full_shard", "replicas, accumulated"]


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.proof) for x in CASES])
def test_what_xla_compiles_is_what_theory_says_and_passes_an_audit(name):
    options = CASES[name]
    text, layout = programs.program(**options)
    assert str(audit(text, layout, spec=spec_of(layout, accumulate=options.get("accumulate", 1)))).endswith(": ok")
    step = {"accumulate": options.get("accumulate", 1)}
    found = ledger_of(layout, text, gpus_per_node=8, **step)
    assert found.unknown == ()
    assert found.unknown_bytes == 0
    assert found.wire_ratio == pytest.approx(1, abs=NORMS)
    expected = sum(move.wire_bytes for move in movements(layout, spec_of(layout, **step)))
    assert found.wire_bytes_theory == pytest.approx(expected, rel=1e-4)
    for unit in {unit.name.partition(".")[0] for unit in layout.units}:  # XLA combines gathers of two layers of a list
        rows = [row for row in found.rows if row.unit.partition(".")[0] == unit]
        kinds = {(row.kind, row.axes, row.group_size) for row in rows if row.what in ("parameters", "gradients")}
        for kind in kinds:
            same = [row for row in rows if (row.kind, row.axes, row.group_size) == kind]
            measured, wanted = (
                sum(getattr(row, name) for row in same) for name in ("measured_bytes", "expected_bytes")
            )
            assert measured == pytest.approx(wanted, rel=2e-3), (unit, kind)


def test_rows_say_which_axes_and_whether_nodes_are_crossed():
    text, layout = programs.program(strategy="zeropp", hosts=2)
    found = ledger_of(layout, text, gpus_per_node=8)
    inside = {row.group_size: row.crosses_nodes for row in found.rows if row.kind == "all-gather"}
    assert inside == {16: True, 8: False}
    assert {row.axes for row in found.rows} == {("fsdp",)}
    text, layout = programs.program(mesh=GROUPS, accumulate=2)
    rows = ledger_of(layout, text, accumulate=2).rows
    assert {(row.what, row.kind) for row in rows if row.what in ("parameters", "gradients")} == {
        ("parameters", "all-gather"),
        ("gradients", "reduce-scatter"),
        ("gradients", "all-reduce"),
    }
    assert {row.axes for row in rows if row.kind == "all-reduce" and row.what == "gradients"} == {("replica",)}
    assert {row.crosses_nodes for row in rows if row.measured_bytes} == {None}


def test_padding_is_a_row_of_its_own():
    text, layout = programs.program(hosts=3)
    found = ledger_of(layout, text)
    padding = [row for row in found.rows if row.what == "padding" and row.kind == "all-gather"]
    gathers = [move for move in movements(layout, spec_of(layout)) if move.kind == "all-gather"]
    wanted = sum(move.wire_bytes * move.leaf.padding_share for move in gathers)
    assert sum(row.measured_bytes for row in padding) == pytest.approx(wanted)
    assert sum(row.measured_bytes for row in padding) > 0
    assert found.wire_ratio == pytest.approx(1, abs=NORMS)


def layout(strategy="full_shard", mesh=(), **config):
    return programs.build(strategy, mesh=mesh, config=tuple(config.items())).layout


def collective(kind, *shapes, dtype="bf16", op_name="", count=1, group=tuple(range(8))):
    parts = tuple(Shape(dtype, shape) for shape in shapes)
    return Collective(kind, f"{kind}.1", parts, dtype, group, count, "main", 0, 1, False, op_name)


UP, QUERY, EMBEDDING = (1024, 2048), (1024, 1024), (4096, 1024)
MLP = {f"layers.mlp.{name}_proj.kernel" for name in ("up", "gate", "down")}
BACKWARD = "jit(_step)/transpose(jvp(transpose(jvp())))/while/body"


@pytest.mark.parametrize(
    ("shape", "paths"),
    [
        *((shape, MLP) for shape in (UP, UP[::-1], (2, *UP))),
        ((1, *QUERY), {"layers.attn.q_proj.kernel", "layers.attn.o_proj.kernel"}),
        ((math.prod(EMBEDDING),), {"embed.embedding", "lm_head.kernel"}),
    ],
)
def test_an_array_without_a_name_is_known_by_its_shape(shape, paths):
    (part,) = make_ledger(layout(), [collective("reduce-scatter", shape)]).parts
    assert part.path in paths


def test_equal_shapes_are_dealt_out_by_what_theory_still_expects():
    found = make_ledger(layout(), [collective("reduce-scatter", UP, count=2) for _ in range(3)])
    assert {part.path for part in found.parts} == MLP


def test_a_scope_outweighs_what_theory_expects():
    table = layout(stacked=False)
    name = f"{BACKWARD}/jfsdp.gather.layers.1/sharding_constraint"
    found = make_ledger(table, [collective("all-gather", QUERY, op_name=name) for _ in range(3)])
    assert [part.unit for part in found.parts] == ["layers.1"] * 3


def test_combined_arrays_keep_their_own_names():
    first, second = "jvp(jfsdp.gather.root:0)/copy", "transpose(jvp(jfsdp.gather.layers))/copy"
    assert split_names(f"jit(_step)/({first}:{second})", 2) == [first, second]
    assert split_names(f"jit(_step)/({first}:{second})", 3) == [f"jit(_step)/({first}:{second})"] * 3
    assert split_names("jit(_step)/while", 2) == ["jit(_step)/while"] * 2


def test_activations_that_move_are_unknown():
    moved = [collective("all-to-all", UP), collective("all-gather", (3, 5, 7)), collective("collective-permute", UP)]
    found = make_ledger(layout(), moved)
    assert list(found.unknown) == moved
    assert found.parts == ()
    assert found.wire_bytes == found.unknown_bytes == sum(item.total_bytes for item in moved)


def test_scalars_are_expected_up_to_an_allowance():
    few = make_ledger(layout("ddp"), [collective("all-reduce", (), dtype="f32")])
    (row,) = [row for row in few.rows if row.what == "scalars"]
    assert row.measured_bytes == row.expected_bytes == 7.0
    many = make_ledger(layout("ddp"), [collective("all-reduce", (), dtype="f32", count=1000)])
    (row,) = [row for row in many.rows if row.what == "scalars"]
    assert (row.measured_bytes, row.expected_bytes) == (7000.0, 1024.0)


@pytest.mark.parametrize(
    ("group", "axes"),
    [
        (range(8), ("replica", "fsdp")),
        (range(4), ("fsdp",)),
        ((0, 4), ("replica",)),
        ((0, 1), ("fsdp",)),
        ((0, 5), ()),
        ((3,), ()),
    ],
)
def test_axes_are_found_from_device_ids(group, axes):
    assert group_axes(layout(mesh=GROUPS), group) == axes
