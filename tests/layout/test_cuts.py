"""Cuts: which dims axis `tensor` cuts, where every stage of a cut leaf stands, and what is refused."""

import functools
import math
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from jfsdp.layout.cuts import check_aliases, find_cuts
from jfsdp.layout.placements import Ignore, Replicate, find_placements
from jfsdp.layout.report import describe_stage, layout_to_dict
from jfsdp.layout.units import UnitInfo
from tests.layout.tables import abstract, make_table
from tests.refusals import refuses, refusing

MESH = {"fsdp": 4, "tensor": 2}
LEAVES = {"mlp.up": (64, 128), "mlp.down": (128, 64), "mlp.bias": (128,), "norm": (64,)}
CUTS = {"mlp.up": (1, "tensor"), "mlp.down": (0, "tensor"), "mlp.bias": (-1, "tensor")}
NAMES = {"mlp.up": ("embed", "mlp"), "mlp.down": ("mlp", "embed"), "mlp.bias": ("mlp",)}
RULES = {"mlp": "tensor", "embed": None}


def table(leaves=None, strategy="full_shard", mesh=None, **options):
    return make_table(leaves or LEAVES, strategy, mesh or MESH, **{"cuts": CUTS, "min_size": 0} | options)


def test_a_cut_holds_in_every_stage_and_is_major_where_the_strategy_splits_the_same_dim():
    layout = table(strategy="hfsdp", mesh={"replica": 2, "fsdp": 2, "tensor": 2})
    up, down = layout.by_path["mlp.up"], layout.by_path["mlp.down"]
    assert [up.spec(stage) for stage in ("param", "use", "opt")] == [
        P("fsdp", "tensor"),
        P(None, "tensor"),
        P(("fsdp", "replica"), "tensor"),
    ]
    assert [down.spec(stage) for stage in ("param", "use", "opt")] == [
        P(("tensor", "fsdp"), None),
        P("tensor", None),
        P(("tensor", "fsdp", "replica"), None),
    ]
    assert layout.by_path["norm"].spec("use") == P(None)
    assert describe_stage(down, down.stage("param")) == "[128/tensor/fsdp 64] float32"
    assert describe_stage(down, down.stage("use")) == "[128/tensor 64] float32"


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "ddp"])
def test_a_device_has_a_part_of_what_it_had(strategy):
    whole, cut = table(strategy=strategy, mesh={"fsdp": 4}), table(strategy=strategy)
    for path in CUTS:
        for stage in ("param", "use", "grad", "opt"):
            sizes = [layout.stage_bytes(layout.by_path[path], stage) for layout in (whole, cut)]
            assert sizes[0] == 2 * sizes[1], (path, stage)


def test_padding_stands_in_a_dim_that_is_not_cut():
    leaf = table({"w": (12, 5)}, cuts={"w": (0, "tensor")}).by_path["w"]
    assert (leaf.dim, leaf.padding, leaf.cut_shape) == (1, 3, (6, 8))
    bias = table({"b": (6,)}, cuts={"b": (0, "tensor")}).by_path["b"]
    assert (bias.dim, bias.cut_shape, bias.spec("param")) == (None, (3,), P("tensor"))
    assert "divides no part of a cut dim" in bias.reason


def test_dims_of_a_selector_are_counted_without_layer_dims():
    units = {"": UnitInfo("", "Net", 0, ()), "layers": UnitInfo("layers", "Layer", 1, ("layers.up", "layers.scale"))}
    layout = table({"layers.up": (3, 8, 16), "layers.scale": (3, 16)}, units=units, cuts={"layers.*": (-1, "tensor")})
    assert [leaf.spec("use") for leaf in layout.leaves] == [P(None, None, "tensor"), P(None, "tensor")]
    assert layout.by_path["layers.up"].spec("param", sliced=1) == P("fsdp", "tensor")


def found(*, leaves=None, stacked=0, names=None, mesh=None, **given):
    shapes = {path: abstract(shape) for path, shape in (leaves or LEAVES).items()}
    layers = dict.fromkeys(shapes, stacked)
    placed = find_placements(given.get("placements"), shapes, layers, {})
    asked = {path: one.cuts for path, one in placed.items() if one.cuts is not None}
    cuts = find_cuts(shapes, layers, NAMES if names is None else names, mesh or MESH, given.get("axis_rules"), asked)
    return {path: [(cut.dim, cut.axis, cut.parts) for cut in own] for path, own in cuts.items() if own}


def test_names_of_dims_cut_as_the_rules_say_and_selectors_have_the_last_word():
    by_names = {"mlp.up": [(1, "tensor", 2)], "mlp.down": [(0, "tensor", 2)], "mlp.bias": [(0, "tensor", 2)]}
    assert found() == {}
    assert found(axis_rules=RULES) == by_names
    assert found(axis_rules=RULES, placements={"mlp.bias": None, "mlp.up": P("tensor")}) == {
        "mlp.up": [(0, "tensor", 2)],
        "mlp.down": [(0, "tensor", 2)],
    }
    assert found(axis_rules={}, names={"mlp.up": (None, "tensor")}) == {"mlp.up": [(1, "tensor", 2)]}


def test_names_without_the_layer_dim_are_of_the_last_dims():
    leaves, names = {"w": (3, 8, 16)}, {"w": ("embed", "mlp")}
    assert found(leaves=leaves, stacked=1, names=names, axis_rules=RULES) == {"w": [(2, "tensor", 2)]}


def test_names_that_begin_with_a_layer_dims_are_not_taken_for_the_last_ones():
    """Flax puts the name of a layer dim before those that a variable has, and these may be fewer than its dims."""
    leaves, names = {"w": (3, 8, 16), "v": (3, 8, 16)}, {"w": ("layers", "mlp"), "v": ("layers", "mlp", None)}
    cut = {"w": [(1, "tensor", 2)], "v": [(1, "tensor", 2)]}
    assert found(leaves=leaves, stacked=1, names=names, axis_rules={"mlp": "tensor"}) == cut


def test_an_axis_rule_holds_where_a_placement_says_nothing_of_it():
    for value in (Replicate(), "zero1", lambda path, shape: None):
        assert found(axis_rules=RULES, placements={"mlp.up": value}) == found(axis_rules=RULES)


def test_a_leaf_of_two_names_is_chosen_by_its_own():
    leaves = {"embed.embedding": abstract((64, 16)), "head.bias": abstract((64,))}
    aliases = {"head.kernel": "embed.embedding"}
    for selector in ("head.kernel", "head"):
        with refusing("embed.embedding", "head.kernel"):
            check_aliases({selector: P("tensor")}, leaves, {}, aliases)
    check_aliases({"head": P("tensor"), "embed": P("tensor")}, leaves, {}, aliases)
    check_aliases({"head.bias": P("tensor")}, leaves, {}, aliases)


def test_leaves_without_elements_are_not_cut():
    assert found(leaves={"w": (0, 8)}, names={}, placements={"w": P(None, "tensor")}) == {}


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"axis_rules": {"mlp": "tensor"}}, ("mlp.down:", "axis_rules", "'embed'")),
    ({"axis_rules": {**RULES, "head": "tensor"}}, ("'head'", "remove its rule")),
    ({"axis_rules": [("mlp", "tensor"), ("mlp", None)]}, ("('mlp', None)", "not a pair")),
    ({"axis_rules": RULES, "names": {}}, ("no sharding metadata",)),
    ({"axis_rules": {"mlp": "tensor", "embed": "tensor"}}, ("mlp.up:", "'embed'", "dim 0", "'tensor'", "'mlp' dim 1")),
    ({"axis_rules": {"mlp": "fsdp", "embed": None}}, ("'fsdp'", "the strategy")),
    ({"placements": {"mpl.up": P("tensor")}}, ("'mpl.up'", "no parameter")),
    ({"placements": {"mlp.*": P("tensor"), "mlp.up": P(None, "tensor")}}, ("mlp.up:", "'mlp.*'", "'mlp.up'")),
    ({"placements": {"mlp.up": P("tensor", "tensor")}}, ("mlp.up:", "one dim")),
    ({"placements": {"norm": P(None, "tensor")}}, ("norm:", "(64,)")),
    (
        {"mesh": {"fsdp": 2, "tensor": 3}, "placements": {"norm": P("tensor")}},
        ("norm:", "'norm'", "dim 0", "size 64", "'tensor'", "size 3"),
    ),
    ({"names": {"norm": ("a", "mlp")}, "axis_rules": {"a": None, "mlp": None}}, ("2 dims", "(64,)")),
    (
        {"leaves": {"w": (2, 8)}, "stacked": 1, "names": {"w": ("mlp", None)}, "axis_rules": {"mlp": "tensor"}},
        ("w:", "'mlp'", "dim 0", "size 2", "layer dim"),
    ),
]


def test_what_cannot_be_is_refused_by_name():
    for given, facts in REFUSED:
        refuses(functools.partial(found, **given), *facts)


def test_what_contradicts_a_cut_is_refused_by_name():
    with refusing("mlp.up", "'mlp.up'", "'mlp.*'"):
        table(placements={"mlp.up": P(None, "tensor"), "mlp.*": Ignore()}, cuts=None)
    with refusing("b:", "dim 0", "4", "into 2", "size 3"):
        table({"b": (6,)}, placements={"b": P(("tensor", "fsdp"))}, cuts=None)


def test_the_report_has_the_cuts():
    row = next(row for row in layout_to_dict(table())["leaves"] if row["path"] == "mlp.down")
    assert row["cuts"] == [{"dim": 0, "axis": "tensor", "parts": 2, "reason": "placements 'mlp.down'"}]
    assert row["stages"]["use"]["spec"] == ["tensor", None]
    assert row["bytes_per_device"] == 4 * math.prod(LEAVES["mlp.down"]) // 8
