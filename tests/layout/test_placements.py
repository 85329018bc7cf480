"""Placements by hand: strategies of axes, single leaves by selector, and every contradiction that is refused."""

import functools
from typing import Any

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jfsdp.layout.leaf import Leaf
from jfsdp.layout.mesh import DATA_AXES
from jfsdp.layout.placements import Ignore, Shard, placements
from jfsdp.layout.select import select_leaves
from jfsdp.layout.strategy import STRATEGIES, Split, Strategy
from jfsdp.layout.units import UnitInfo
from tests.layout.tables import abstract, make_table
from tests.refusals import check_facts, refuses, refusing
from tests.ways import WAYS

W, F, R, A, S = (), ("fsdp",), ("replica",), ("replica", "fsdp"), ("fsdp", "replica")
LEAVES = {"block.w": (64, 64), "block.scale": (64,), "block.bias": (2048,), "table": (640, 64), "head": (64, 128)}


class Weight: ...


class Kernel(Weight): ...


class Bias: ...


TYPES = {"block.w": Kernel, "block.scale": Weight, "block.bias": Bias, "table": Weight, "head": Kernel}


def axes(leaf: Leaf) -> dict[str, Any]:
    return {name: stage and stage.axes for name, stage in leaf.stages}


def place(given: Any, strategy: Any = "full_shard", **more: Any) -> dict[str, Leaf]:
    return dict(make_table(LEAVES, strategy, types=TYPES, placements=given, **more).by_path)


# Strategies of axes given by hand.


def test_stages_given_as_axes_are_what_the_presets_say_in_words():
    for preset in STRATEGIES.values():
        if preset.name != "zero1":  # partial is no tuple of axes
            stages = [preset.axes(stage) for stage in ("param", "grad", "opt")]
            own = Strategy(preset.name, *stages, reshard_after_forward=preset.reshard_after_forward)
            by_hand = make_table(LEAVES, own, param_dtype="bfloat16", node_size=4)
            assert by_hand.leaves == make_table(LEAVES, preset, param_dtype="bfloat16", node_size=4).leaves


def test_what_is_kept_may_be_split_less_than_what_rests():
    """ZeRO++'s secondary partition, told by a strategy instead of the argument."""
    layout = make_table(LEAVES, Strategy("own", A, A, A, reshard_after_forward=4))
    assert layout.by_path["block.w"].stage("kept").axes == F
    assert layout.by_path["head"].stage("kept").axes == W  # the root
    assert layout.policy("block").reshard_after_forward == 4


# param, grad and opt (and reshard_after_forward) -> facts of the refusal.
BAD_STRATEGIES: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    ((A, A, F), ("opt (fsdp)", "param (replica/fsdp)")),
    ((F, F, R), ("opt (replica)", "param (fsdp)")),
    ((Split.ALL, Split.ALL, Split.GROUP), ("opt (group)", "param (all)")),
    ((F, W, F), ("grad (whole)", "param (fsdp)")),
    ((W, A, F), ("opt (fsdp)", "grad (replica/fsdp)")),
    ((F, Split.PARTIAL, F), ("grad (partial)", "param (whole)", "param is fsdp")),
    ((A, A, A, F), ("reshard_after_forward=('fsdp',)", TypeError)),
    ((A, A, A, 0), ("reshard_after_forward=0",)),
    ((A, A, A, "group"), ("reshard_after_forward='group'",)),
    ((("data",), F, F), ("param=('data',)",)),
    ((F, F, ("fsdp", "tensor")), ("opt=('fsdp', 'tensor')",)),
    ((F, ("fsdp", "fsdp"), F), ("grad=('fsdp', 'fsdp')",)),
    ((("fsdp", "replica"), A, A), (repr(DATA_AXES),)),
    (("fsdp", F, F), ("param='fsdp'", TypeError)),
    ((Split.PARTIAL, W, W), ("param cannot be partial",)),
    ((W, W, Split.PARTIAL), ("opt cannot be partial",)),
]


def test_strategies_that_contradict_themselves_are_refused_by_name():
    for stages, facts in BAD_STRATEGIES:
        error = TypeError if TypeError in facts else ValueError
        facts = [fact for fact in facts if fact is not TypeError]
        refuses(functools.partial(Strategy, "odd", *stages), "'odd'", *facts, error=error)


FSDP_ONLY = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


def test_an_axis_given_by_hand_must_be_in_the_mesh():
    with refusing("strategy:", "'own'", "'replica'"):
        make_table(LEAVES, Strategy("own", F, F, A), FSDP_ONLY)
    with refusing("block.w", "'replica'"):
        place({"block.w": P("replica")}, mesh=FSDP_ONLY)


def test_axes_that_only_a_word_stands_for_count_as_one_where_the_mesh_lacks_them():
    assert axes(make_table(LEAVES, "full_shard", FSDP_ONLY).by_path["head"])["opt"] == F
    mixed = Strategy("own", F, Split.ALL, Split.ALL)
    assert axes(make_table(LEAVES, mixed, FSDP_ONLY).by_path["head"])["opt"] == F
    assert axes(place({"head": P(None, "fsdp")}, mesh=FSDP_ONLY)["head"])["opt"] == F


# Single leaves.

SELECTORS: dict[str, tuple[Any, set[str]]] = {
    "a path": ("block.w", {"block.w"}),
    "a glob": ("block.*", {"block.w", "block.scale", "block.bias"}),
    "a module": ("block", {"block.w", "block.scale", "block.bias"}),
    "a glob over depths": ("**.w", {"block.w"}),
    "a class": (Bias, {"block.bias"}),
    "a class with subclasses": (Weight, {"block.w", "block.scale", "table", "head"}),
    "a predicate by path": (lambda path, leaf: path.startswith("h"), {"head"}),
    "a predicate by shape": (lambda path, leaf: leaf.shape[0] > 64, {"block.bias", "table"}),
    "several": (("head", Bias), {"head", "block.bias"}),
}


@pytest.mark.parametrize("case", SELECTORS)
def test_leaves_are_placed_frozen_and_ignored_by_path_by_class_and_by_predicate(case):
    selector, chosen = SELECTORS[case]
    leaves = place({selector: "ddp"}, min_size=0)
    assert {path for path, leaf in leaves.items() if leaf.stage("opt").axes == W} == chosen
    for what in ("frozen", "ignored"):
        options = {what: selector}
        found = make_table(LEAVES, types=TYPES, **options).leaves
        assert {leaf.path for leaf in found if f"{what} by " in leaf.reason} == chosen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_leaf_placed_by_a_strategys_name_stands_as_under_that_strategy(strategy):
    """In a unit that is not resharded, so that nothing is kept: that is a matter of the unit."""
    own = place({"table": WAYS.get(strategy, strategy)}, param_dtype="bfloat16")["table"]
    under = make_table(LEAVES, strategy, param_dtype="bfloat16", node_size=4).by_path["table"]
    assert own.stages == under.stages
    assert (own.dim, own.padding) == (under.dim, under.padding)
    assert own.reason == f"{under.reason}; placed by 'table'"


@pytest.mark.parametrize("other", ["full_shard", "HYBRID_SHARD", STRATEGIES["full_shard"]])
def test_a_placement_changes_its_own_leaf_only(other):
    before, after = make_table(LEAVES).by_path, place({"block.w": other})
    assert {path for path in LEAVES if before[path] != after[path]} == {"block.w"}
    assert axes(after["block.w"]) == {"param": F, "work": None, "use": W, "kept": F, "grad": F, "opt": F}


# PartitionSpec of `param` -> axes of param, kept, grad, opt, and the dim; under full_shard in a resharded unit.
SPECS = {
    P("fsdp"): (F, F, F, F, 0),
    P(None, "fsdp"): (F, F, F, F, 1),
    P("replica", None): (R, R, A, A, 0),
    P(None, ("replica", "fsdp")): (A, A, A, A, 1),
    P(("fsdp",)): (F, F, F, F, 0),
}


def test_a_partition_spec_says_dim_and_axes_of_param():
    for spec, (param, kept, grad, opt, dim) in SPECS.items():
        leaf = place({"block.w": spec})["block.w"]
        assert axes(leaf) == {"param": param, "work": None, "use": W, "kept": kept, "grad": grad, "opt": opt}
        assert leaf.dim == dim
        assert leaf.spec("opt") == P(*[grad if place == dim else None for place in range(2)])
    leaf = place({"head": P(None, "fsdp")}, "ddp")["head"]
    assert axes(leaf) == {"param": F, "work": None, "use": W, "kept": W, "grad": F, "opt": F}
    leaf = make_table({"w": (5, 7)}, placements={"w": P(None, "fsdp")}).by_path["w"]
    assert (leaf.dim, leaf.padding, leaf.reason) == (1, 1, "dim 1, as requested; placed by 'w'")


def test_shard_names_the_dim_and_the_strategy_the_axes():
    for dim in (1, -1):
        leaf = place({"head": Shard(dim)})["head"]
        assert (leaf.dim, axes(leaf)["opt"], leaf.reason) == (1, F, "dim 1, as requested; placed by 'head'")
    stack = make_table(STACK, units=UNITS, placements={"layers.w": Shard(0)}).by_path["layers.w"]
    assert stack.dim == 1, "layer dims do not count"


def test_a_spec_of_a_model_axis_is_a_cut_and_the_strategy_splits_the_rest():
    mesh = {"fsdp": 4, "tensor": 2}
    for spec, param in {P("tensor"): P(("tensor", "fsdp"), None), P(None, "tensor"): P("fsdp", "tensor")}.items():
        assert place({"head": spec}, mesh=mesh)["head"].spec("param") == param
    both = place({"head": P("fsdp", "tensor")}, "ddp", mesh=mesh)["head"]
    assert (both.spec("param"), both.spec("use")) == (P("fsdp", "tensor"), P(None, "tensor"))
    assert axes(both)["opt"] == F


def test_a_function_places_by_path_and_shape_and_none_leaves_the_rule():
    seen = {}

    def choose(path, shape):
        seen[path] = shape
        return Shard(1) if path == "head" else None

    leaves = place({"**": choose, "table": "ddp"})
    assert seen == LEAVES
    before = make_table(LEAVES, types=TYPES).by_path
    assert {path for path in LEAVES if leaves[path] != before[path]} == {"head", "table"}
    assert leaves["head"].dim == 1


def test_a_minimum_size_is_merged_with_placements():
    given = {"block.scale": Shard(0), **placements(min_size=3000)}
    leaves = place(given, min_size=None)
    assert {path for path, leaf in leaves.items() if leaf.dim is None} == {"block.bias"}


STACK = {"layers.w": (6, 64, 64)}
UNITS = {"": UnitInfo("", "Net", 0, ()), "layers": UnitInfo("layers", "Layer", 1, tuple(STACK))}
BAD_PLACEMENTS: list[tuple[dict[Any, Any], tuple[Any, ...]]] = [
    ({"block.*": "ddp", "**.w": "zero2"}, ("block.w", "'block.*' ('ddp')", "'**.w' ('zero2')")),
    ({Weight: P("replica"), "head": P("fsdp")}, ("head", f"Weight ({P('replica')!r})", f"'head' ({P('fsdp')!r})")),
    ({"head": P("replica", "fsdp")}, ("head", "dims 0, 1")),
    ({"block.bias": P(None, "fsdp")}, ("block.bias", "(2048,)")),
    ({"head": P(("fsdp", "fsdp"))}, ("head", "param=('fsdp', 'fsdp')")),
    ({"head": P(("fsdp", "replica"))}, ("head", repr(DATA_AXES))),
    ({"head": P("data")}, ("head", "'data'")),
    ({"head": P(P.UNCONSTRAINED)}, ("head", "axis of a mesh")),
    ({"head": "zero4"}, ("head", "'zero4'", "'zero3'", "ddp")),
    ({"head": Shard(2)}, ("head", "dim 2", "(64, 128)")),
    ({"head": lambda path: None}, ("'head'", "f(path, shape)")),
    ({"block.w": "_HYBRID_SHARD_ZERO2"}, ("block.w", "reshard_after_forward=False", "'block'", "per_unit")),
    ({"block.w": WAYS["node"]}, ("block.w", "reshard_after_forward='node'")),
    ({"blok.*": "ddp"}, ("'blok.*'", "block.w, block.scale")),
    ({int: "ddp"}, ("int", "block.w, block.scale, block.bias, table, head", "Bias, Kernel, Weight")),
]


def test_placements_that_cannot_be_had_are_refused():
    for given, facts in BAD_PLACEMENTS:
        refuses(functools.partial(place, given), *facts)
    refuses(lambda: place({3: "ddp"}), "placements 3", error=TypeError)
    for value in (Ignore, 3.5, True):
        facts = "head: placements", repr(value), "Shard(dim)"
        refuses(functools.partial(place, {"head": value}), *facts, error=TypeError)
    refuses(lambda: place({"block.w": "ddp"}, ignored="block"), "block.w", "'block'", "(Ignore())", "'block.w'")


def test_two_selectors_that_say_the_same_do_not_collide():
    assert axes(place({"block.*": "full_shard", "**.w": "full_shard"})["block.w"])["opt"] == F


def test_a_leaf_that_a_unit_keeps_for_its_backward_may_be_placed_so():
    keep = {"block": {"reshard_after_forward": False}}
    leaf = place({"block.w": "_HYBRID_SHARD_ZERO2"}, per_unit=keep)["block.w"]
    assert leaf.stage("kept").axes == W


def test_ignored_leaves_are_whole_in_their_own_dtype_and_still_trained():
    leaf = place(None, "zero1", ignored="head", param_dtype="bfloat16")["head"]
    assert {stage and (stage.axes, stage.dtype) for _, stage in leaf.stages} == {(W, "float32"), None}
    assert leaf.trainable
    assert not leaf.has_work


def test_a_leaf_may_be_frozen_and_placed():
    leaf = place({"head": "ddp"}, frozen="head")["head"]
    assert axes(leaf) == {"param": W, "work": None, "use": W, "kept": W, "grad": None, "opt": None}
    check_facts(leaf.reason, "whole", "placed by 'head'", "frozen by 'head'")


@pytest.mark.parametrize("what", ["frozen", "ignored", "placements"])
def test_a_selector_that_chooses_nothing_lists_the_parameters(what):
    leaves = {f"block.{number}": abstract((2,)) for number in range(20)}
    with refusing(f"{what} 'head'", "block.11, ...", "20 in all"):
        select_leaves(what, "head", leaves, {})
    with refusing("flax.linen"):
        select_leaves(what, Weight, leaves, {})
    assert select_leaves(what, None, leaves, {}) == select_leaves(what, [], leaves, {}) == {}
