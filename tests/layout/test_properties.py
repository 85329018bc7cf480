"""What holds for every layout: of any shapes, on any mesh, under any strategy and policy."""

import dataclasses
import itertools
import math
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import HOST
from jfsdp.layout.mesh import DATA_AXES, make_abstract_mesh, split_mesh
from jfsdp.layout.policy import OffloadPolicy
from jfsdp.layout.precision import item_bytes
from jfsdp.layout.report import layout_to_dict
from jfsdp.layout.strategy import NODE, STRATEGIES, Strategy
from jfsdp.layout.units import UnitInfo
from tests.layout.tables import make_table

SIZES = st.sampled_from([0, 1, 2, 3, 7, 8, 16, 31, 48, 64, 97, 1031, 50257])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "complex64", "int32", "bool"])
AXES = st.sampled_from([(), ("fsdp",), ("replica",), ("replica", "fsdp"), ("fsdp", "context"), DATA_AXES])


@st.composite
def strategies(draw: Any) -> Strategy:
    """Presets, and strategies of axes: `param` within `grad` within `opt`."""
    if draw(st.booleans()):
        return draw(st.sampled_from([STRATEGIES[name] for name in STRATEGIES]))
    param, grad, opt = (draw(AXES) for _ in range(3))
    assume(set(param) <= set(grad) <= set(opt))
    return Strategy("own", param, grad, opt, reshard_after_forward=draw(st.sampled_from([True, False, 1, NODE])))


@st.composite
def arguments(draw: Any) -> dict[str, Any]:
    """Arguments of `make_table` that make a layout."""
    names = ["", "block", "layers"]
    paths = [f"{name}.w{place}".lstrip(".") for name in names for place in range(2)]
    layers = draw(st.integers(1, 4))
    shapes = {path: (draw(SHAPES), draw(DTYPES)) for path in paths}
    shapes = {path: ((layers, *s), d) if path.startswith("layers.") else (s, d) for path, (s, d) in shapes.items()}
    units = {name: UnitInfo(name, "Net", int(name == "layers"), tuple(own(paths, name))) for name in names}
    strategy = draw(strategies())
    sizes = {"replica": draw(st.sampled_from([1, 2, 3, 4])), "fsdp": draw(st.sampled_from([1, 2, 3, 4, 6, 8]))}
    sizes["expert"] = 1  # larger only with weights of experts
    sizes["context"] = draw(st.sampled_from([1, 2, 3]))
    num = math.prod(sizes[axis] for axis in strategy.axes("param"))
    last = next((sizes[axis] for axis in reversed(strategy.axes("param")) if sizes[axis] > 1), 1)
    numbers = [n for n in range(1, last + 1) if last % n == 0]
    can_reshard = strategy.axes("param") and strategy.reshard_after_forward is not False
    return {
        "leaves": shapes,
        "units": units,
        "strategy": strategy,
        "mesh": sizes,
        "param_dtype": draw(st.sampled_from([None, "bfloat16"])),
        "min_size": draw(st.sampled_from([0, 1, 64, 1024])),
        "node_size": draw(st.sampled_from([*numbers, num])),
        "reshard": draw(st.sampled_from([None, False, *([True, num, *numbers] if can_reshard else [])])),
        "frozen": draw(st.sampled_from([None, "block", "w0"])),
        "ignored": draw(st.sampled_from([None, "layers.w1", "w1"])),
        "offload": OffloadPolicy(draw(st.booleans()), draw(st.booleans()), draw(st.booleans())),
    }


def own(paths: list[str], unit: str) -> list[str]:
    return [path for path in paths if path.rpartition(".")[0] == unit]


LAYOUTS = arguments().map(lambda given: make_table(**given))
STAGES = ("param", "work", "use", "kept", "grad", "opt")


def present(layout: Layout) -> list[Any]:
    return [(leaf, name, stage) for leaf in layout.leaves for name, stage in leaf.stages if stage is not None]


def every_stored_shape_divides_into_the_parts_of_every_stage(layout):
    for leaf, _, stage in present(layout):
        parts = layout.num_parts(stage)
        assert (parts == 1) if leaf.dim is None else leaf.stored_shape[leaf.dim] % parts == 0


def the_parts_of_a_stage_are_its_bytes(layout):
    for leaf, name, stage in present(layout):
        whole = math.prod(leaf.stored_shape) * item_bytes(stage.dtype)
        assert layout.stage_bytes(leaf, name) * layout.num_parts(stage) == whole


def shardings_on_the_split_mesh_cut_as_many_parts_as_the_table_says(layout):
    mesh: Any = split_mesh(make_abstract_mesh(dict(layout.mesh_sizes)), layout.sub_axes)  # pyright: ignore
    assert math.prod(mesh.shape.values()) == math.prod(size for _, size in layout.mesh_sizes)
    for leaf, name, stage in present(layout):
        sharding = layout.sharding(mesh, leaf, name)
        local = math.prod(sharding.shard_shape(leaf.stored_shape))
        assert local * item_bytes(stage.dtype) == layout.stage_bytes(leaf, name)
        assert (sharding.memory_kind == HOST) == (stage.memory == HOST)


def the_padding_is_less_than_one_part(layout):
    for leaf in layout.leaves:
        finest = max(layout.num_parts(stage) for _, stage in leaf.stages if stage)
        assert 0 <= leaf.padding < finest


def each_stage_is_split_within_the_next(layout):
    for leaf in layout.leaves:
        stages = dict(leaf.stages)
        chain = [stages[name] for name in ("kept", leaf.source, "param", "opt")]
        chain = [set(stage.axes) for stage in chain if stage is not None]
        assert all(coarse <= fine for coarse, fine in itertools.pairwise(chain))
        if stages["grad"]:
            assert set(leaf.stage(leaf.source).axes) <= set(stages["grad"].axes) <= set(leaf.stage("opt").axes)
        assert leaf.stage("use").axes == ()


def leaves_have_gradient_and_states_exactly_if_they_are_trained(layout):
    for leaf in layout.leaves:
        stages = dict(leaf.stages)
        assert tuple(stages) == STAGES
        assert (stages["grad"] is not None) == (stages["opt"] is not None) == leaf.trainable
        assert leaf.trainable or "not trained: " in leaf.reason or "frozen by " in leaf.reason
        if not leaf.trainable:
            assert {stage.dtype for name, stage in leaf.stages if stage and name == "param"} == {leaf.dtype}


@given(LAYOUTS)
def test_what_holds_for_every_layout(layout):
    every_stored_shape_divides_into_the_parts_of_every_stage(layout)
    the_parts_of_a_stage_are_its_bytes(layout)
    shardings_on_the_split_mesh_cut_as_many_parts_as_the_table_says(layout)
    the_padding_is_less_than_one_part(layout)
    each_stage_is_split_within_the_next(layout)
    leaves_have_gradient_and_states_exactly_if_they_are_trained(layout)


@given(arguments())
@settings(max_examples=50, deadline=None)
def test_layouts_of_the_same_arguments_are_equal_and_hash_alike(given):
    one, same = make_table(**given), make_table(**given)
    assert one is not same
    assert one == same
    assert hash(one) == hash(same)
    assert layout_to_dict(one) == layout_to_dict(same)
    first = dataclasses.replace(one.leaves[0], shape=(*one.leaves[0].shape, 2))
    assert dataclasses.replace(one, leaves=(first, *one.leaves[1:])) != one
    assert {leaf.path for leaf in one.leaves} <= set(str(one).split())
    assert max(map(len, str(one).splitlines())) <= 80
