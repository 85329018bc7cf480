"""Resharding to a number of neighbouring devices (hpZ): stages with ways, split meshes, gathered layouts."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jfsdp.layout.leaf import Stage
from jfsdp.layout.mesh import AXES, make_abstract_mesh, make_mesh, node_size, split_mesh
from jfsdp.layout.strategy import NODE
from tests import ways
from tests.layout.tables import FakeDevice, make_table
from tests.refusals import refusing

F, A = ("fsdp",), ("replica", "fsdp")
LEAVES = {"block.w": (64, 48), "block.scale": (8,), "head": (96, 64)}
FOUR_BY_FOUR = {"replica": 4, "fsdp": 4}


def kept(reshard: Any, sizes: Any = None, strategy: Any = "all", path: str = "block.w", **more: Any) -> Stage:
    return make_table(LEAVES, strategy, sizes, reshard=reshard, **more).by_path[path].stage("kept")


# strategy, sizes, n -> axes and ways of `kept`.
WAYS = {
    ("full_shard", 1, 8, 1): ((), None),
    ("full_shard", 1, 8, 2): (F, 2),
    ("full_shard", 1, 8, 4): (F, 4),
    ("full_shard", 1, 8, 8): (F, None),
    ("all", 2, 4, 1): ((), None),
    ("all", 2, 4, 2): (F, 2),
    ("all", 2, 4, 4): (F, None),
    ("all", 2, 4, 8): (A, None),
    ("all", 4, 4, 8): (A, 2),
    ("all", 4, 4, 16): (A, None),
    ("all", 3, 4, 12): (A, None),
    ("all", 8, 1, 4): (("replica",), 4),
    ("full_shard", 2, 4, 2): (F, 2),
    ("full_shard", 2, 4, 4): (F, None),
    ("hfsdp", 2, 4, 2): (F, 2),
    ("full_shard", 1, 6, 3): (F, 3),
}


@pytest.mark.parametrize("case", WAYS, ids=lambda case: "-".join(map(str, case)))
def test_a_number_of_devices_takes_the_minor_axes_first(case):
    strategy, replica, fsdp, number = case
    for path in ("block.w", "head"):  # a number holds for the root too
        stage = kept(number, {"replica": replica, "fsdp": fsdp}, strategy, path)
        assert (stage.axes, stage.ways, stage.dtype, stage.memory) == (*WAYS[case], "float32", "device")


def test_a_number_that_does_not_cut_the_mesh_lists_those_that_do():
    """The numbers of neighbours in a mesh of these sizes."""
    for (replica, fsdp, number), offered in {
        (1, 8, 16): [1, 2, 4, 8],
        (2, 4, 3): [1, 2, 4, 8],
        (3, 4, 6): [1, 2, 4, 12],
        (4, 6, 16): [1, 2, 3, 6, 12, 24],
    }.items():
        sizes = {"replica": replica, "fsdp": fsdp}
        with refusing("block.w", f"reshard_after_forward={number}", f"use one of {str(offered)[1:-1]}"):
            kept(number, sizes)
        for other in offered:
            assert kept(other, sizes)


def test_numbers_that_do_not_divide_each_other_are_refused_with_their_units():
    leaves = {"a.w": (96, 96), "b.w": (96, 96)}
    per_unit = {"a": {"reshard_after_forward": 2}, "b": {"reshard_after_forward": 3}}
    with refusing("'fsdp'", "size 12", "2", "'a'", "3", "'b'"):
        make_table(leaves, "full_shard", {"fsdp": 12}, per_unit=per_unit)


def test_numbers_that_divide_each_other_share_one_mesh():
    leaves = {"a.w": (96, 96), "b.w": (96, 96)}
    per_unit = {"a": {"reshard_after_forward": 2}, "b": {"reshard_after_forward": 6}}
    layout = make_table(leaves, "full_shard", {"fsdp": 12}, per_unit=per_unit)
    assert layout.sub_axes == {"fsdp": (("fsdp_0", 2), ("fsdp_1", 3), ("fsdp_2", 2))}
    a, b = layout.leaves
    assert a.spec("kept", sub_axes=layout.sub_axes) == P("fsdp_2", None)
    assert b.spec("kept", sub_axes=layout.sub_axes) == P(("fsdp_1", "fsdp_2"), None)
    assert a.spec("param", sub_axes=layout.sub_axes) == P(("fsdp_0", "fsdp_1", "fsdp_2"), None)


def test_units_may_split_different_axes_in_part():
    leaves = {"a.w": (96, 96), "b.w": (96, 96)}
    per_unit = {"a": {"reshard_after_forward": 8}, "b": {"reshard_after_forward": 2}}
    layout = make_table(leaves, "all", FOUR_BY_FOUR, per_unit=per_unit)
    a, b = layout.leaves
    assert a.spec("kept", sub_axes=layout.sub_axes) == P(("replica_1", "fsdp_0", "fsdp_1"), None)
    assert b.spec("kept", sub_axes=layout.sub_axes) == P("fsdp_1", None)
    assert [layout.num_parts(leaf.stage("kept")) for leaf in (a, b)] == [8, 2]


# The preset.


@pytest.mark.parametrize(("node", "axes", "num"), [(2, F, 2), (4, F, None), (8, A, None), (1, (), None)])
def test_node_keeps_parameters_split_over_the_devices_of_a_host(node, axes, num):
    layout = make_table(LEAVES, dataclasses.replace(ways.WAYS["all"], reshard_after_forward=NODE), node_size=node)
    stages = dict(layout.by_path["block.w"].stages)
    assert stages["kept"] == Stage(axes, "float32", ways=num)
    assert {name: stages[name] for name in ("param", "grad", "opt")} == dict.fromkeys(
        ("param", "grad", "opt"), Stage(A, "float32")
    )
    assert layout.by_path["head"].stage("kept") == Stage((), "float32")


def test_node_on_a_mesh_without_devices_asks_for_the_number():
    with pytest.raises(ValueError, match="no devices"):
        node_size(make_abstract_mesh({"fsdp": 8}))
    assert kept(4, strategy="node") == Stage(F, "float32")


def on_hosts(*sizes: int) -> Any:
    """Devices of a topology without devices, whose processes are hosts."""
    processes = [host for host, size in enumerate(sizes) for _ in range(size)]
    return [FakeDevice(place, host) for place, host in enumerate(processes)]


@pytest.mark.parametrize(
    ("axes", "hosts", "size"),
    [
        ({}, [8], 8),
        ({}, [4, 4], 4),
        ({}, [2] * 4, 2),
        ({}, [1] * 3, 1),
        ({"replica": 2}, [8, 8], 8),
        ({"replica": 4}, [8], 8),
        ({"tensor": 2}, [8, 8], 4),
        ({"context": 4, "tensor": 2}, [8, 8], 4),
        ({"replica": 2, "tensor": 4}, [4, 4, 4, 4], 1),
    ],
)
def test_node_size_is_the_part_of_the_batch_that_is_on_one_host(axes, hosts, size):
    assert node_size(make_mesh(devices=on_hosts(*hosts), **axes)) == size


def test_node_size_is_refused_where_hosts_differ_or_lie_scattered():
    with pytest.raises(ValueError, match="equal blocks"):
        node_size(make_mesh(devices=on_hosts(4, 2)))
    scattered = np.array(on_hosts(2, 2))[[0, 2, 1, 3]].reshape(1, 4, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="equal blocks"):
        node_size(Mesh(scattered, AXES, axis_types=(AxisType.Auto,) * len(AXES)))


# The split mesh.


def test_a_split_mesh_has_the_same_devices_in_the_same_order():
    mesh = make_mesh(replica=2, fsdp=4)
    layout = make_table(LEAVES, "full_shard", mesh, reshard=2)
    parts = split_mesh(mesh, layout.sub_axes)
    assert dict(parts.shape) == {
        "pipe": 1,
        "replica": 2,
        "fsdp_0": 2,
        "fsdp_1": 2,
        "expert": 1,
        "context": 1,
        "tensor": 1,
    }
    assert parts.devices.flatten().tolist() == mesh.devices.flatten().tolist()
    assert set(parts.axis_types) == set(mesh.axis_types)
    assert split_mesh(mesh, {}) is mesh


def test_what_is_kept_is_repeated_over_the_far_devices_and_split_over_the_near():
    mesh = make_mesh(fsdp=8)
    layout = make_table(LEAVES, "full_shard", mesh, reshard=2)
    leaf, parts = layout.by_path["block.w"], split_mesh(mesh, layout.sub_axes)
    sharding = layout.sharding(parts, leaf, "kept")
    assert sharding.spec == P("fsdp_1", None)
    rows = {device.id: place[0].indices(64)[:2] for device, place in sharding.devices_indices_map((64, 48)).items()}
    ids = [device.id for device in mesh.devices.flat]
    assert [rows[number] for number in ids] == [(0, 32), (32, 64)] * 4


def test_a_part_of_an_axis_has_no_sharding_on_a_mesh_that_has_it_in_one():
    layout = make_table(LEAVES, "all", reshard=2)
    with refusing("block.w", "'kept'", "'fsdp'", "size 4", "2", "split_mesh"):
        layout.sharding(make_mesh(replica=2, fsdp=4), layout.by_path["block.w"], "kept")


# Layouts of a step that gathers first, and of a slice of the mesh.


@pytest.mark.parametrize("reshard", [None, True, False, 2, 8])
def test_a_gathered_layout_has_its_parameters_whole_in_use_and_the_rest_as_it_was(reshard):
    layout = make_table(LEAVES, "hfsdp" if reshard != 8 else "all", reshard=reshard, param_dtype="bfloat16")
    gathered = layout.gathered()
    for before, after in zip(layout.leaves, gathered.leaves, strict=True):
        old, new = dict(before.stages), dict(after.stages)
        assert {new["param"], new["use"], new["kept"]} == {Stage((), "bfloat16")}
        assert new["work"] is None
        assert (new["grad"], new["opt"]) == (old["grad"], old["opt"])
        assert (after.shape, after.stored_shape, after.reason) == (before.shape, before.stored_shape, before.reason)
    assert gathered.sub_axes == {}
    assert gathered.mesh_sizes == layout.mesh_sizes
    assert all(isinstance(policy.reshard_after_forward, bool) for policy in gathered.policies)
    assert gathered.gathered() == gathered
