"""Meshes: sizes from text, the order of devices over hosts, and which meshes are refused."""

import functools
import itertools
import random
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh

import jfsdp
from jfsdp.launch.hosts import hosts
from jfsdp.layout import mesh as mesh_module
from jfsdp.layout.mesh import (
    AXES,
    axis_sizes,
    crosses_hosts,
    make_abstract_mesh,
    make_mesh,
    num_data_shards,
    resolve_sizes,
)
from tests.layout.tables import FakeDevice
from tests.models_small import Block, Tower
from tests.refusals import refuses, refusing, warning


def fake_hosts(num_hosts: int, per_host: int) -> list[Any]:
    """Devices of several hosts in an order that helps nobody."""
    devices = [FakeDevice(host * per_host + i, host) for host in range(num_hosts) for i in range(per_host)]
    random.Random(0).shuffle(devices)
    return devices


def hosts_along(mesh: Mesh, axis: str) -> list[set[int]]:
    """For every line of the grid along an axis, the hosts that it touches."""
    dim = mesh.axis_names.index(axis)
    lines = mesh.devices.swapaxes(dim, -1).reshape(-1, mesh.devices.shape[dim])
    return [{device.process_index for device in line} for line in lines]


def test_sizes_that_no_mesh_has_are_refused():
    """Those that do not match the devices, with both counts."""
    for sizes, facts in (
        ({"data": 8}, ["'data'", "pipe, replica, fsdp, expert, context, tensor"]),
        ({"fsdp": 0}, ["must be positive", "{'fsdp': 0}"]),
        ({"fsdp": -2}, ["must be positive", "{'fsdp': -2}"]),
        ({"replica": -1, "fsdp": -1}, ["only one mesh axis may be -1"]),
        ({"replica": 2, "fsdp": 99999999999}, ["199,999,999,998", "262,144"]),
        ({"replica": 4, "fsdp": 4}, ["mesh replica=4,fsdp=4", "16 devices", "there are 8"]),
        ({"replica": 3, "fsdp": -1}, ["mesh replica=3,fsdp=-1", "multiple of 3", "there are 8", "'replica'"]),
        ({"fsdp": -1, "tensor": 3}, ["there are 8", "'tensor'", "1, 2, 4, 8"]),
    ):
        refuses(functools.partial(resolve_sizes, sizes, 8), *facts)
    for make in (lambda: make_mesh(fsdp=5), lambda: make_mesh(data=2), lambda: make_mesh(replica=-1)):
        refuses(make)
    refuses(lambda: make_mesh(devices=[]), "device")
    for sizes, fact in (({"fsdp": -1}, "needs every size"), ({"model": 2}, "'model'"), ({"fsdp": 0}, "positive")):
        refuses(functools.partial(make_abstract_mesh, sizes), fact)


def test_resolve_sizes_gives_the_rest_to_minus_one():
    for sizes, num_devices, resolved in (
        ({"fsdp": 8}, 8, {"fsdp": 8}),
        ({"replica": -1, "fsdp": 4, "tensor": 2}, 16, {"replica": 2, "fsdp": 4, "tensor": 2}),
        ({"fsdp": -1}, 1, {"fsdp": 1}),
        ({"replica": 8, "fsdp": -1}, 8, {"replica": 8, "fsdp": 1}),
    ):
        assert resolve_sizes(sizes, num_devices) == resolved


def test_mesh_of_some_devices_holds_just_those():
    devices = jax.devices()[2:5]
    mesh = make_mesh(fsdp=3, devices=devices)
    assert mesh.devices.flatten().tolist() == devices


def test_fsdp_stays_inside_a_host_and_replica_crosses_hosts():
    mesh = make_mesh(replica=4, fsdp=8, devices=fake_hosts(4, 8))
    assert all(len(hosts) == 1 for hosts in hosts_along(mesh, "fsdp"))
    assert all(hosts == {0, 1, 2, 3} for hosts in hosts_along(mesh, "replica"))


def test_tensor_stays_inside_a_host_where_fsdp_spans_hosts():
    mesh = make_mesh(fsdp=-1, tensor=4, devices=fake_hosts(4, 8))
    assert all(len(hosts) == 1 for hosts in hosts_along(mesh, "tensor"))
    # Walking along fsdp leaves each host once and never comes back.
    line = [device.process_index for device in mesh.devices[0, :, 0, 0, 0, 0]]
    assert [host for host, _ in itertools.groupby(line)] == [0, 1, 2, 3]


def test_context_is_between_fsdp_and_tensor():
    mesh = make_mesh(fsdp=-1, context=4, tensor=2, devices=fake_hosts(4, 8))
    assert mesh.devices.shape == (1, 4, 1, 4, 1, 2)
    assert all(len({device.process_index for device in group.flat}) == 1 for group in mesh.devices[0])
    assert crosses_hosts(make_mesh(context=8, tensor=4, devices=fake_hosts(4, 8)), "context")


@pytest.mark.parametrize(("tensor", "crosses"), [(8, False), (16, True)])
def test_an_axis_that_no_host_holds_is_known(tensor, crosses):
    assert crosses_hosts(make_mesh(fsdp=-1, tensor=tensor, devices=fake_hosts(4, 8)), "tensor") == crosses
    assert not crosses_hosts(make_abstract_mesh({"fsdp": 2, "tensor": tensor}), "tensor")


@pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")
def test_activations_between_hosts_are_told(monkeypatch):
    monkeypatch.setattr(mesh_module, "hosts", lambda devices: tuple(range(len(devices))))
    with warning("'tensor'", "size 2"):
        jfsdp.fully_shard(Tower, mesh=make_mesh(fsdp=4, tensor=2), units=[Block])


def test_pipe_crosses_hosts_first():
    mesh = make_mesh(pipe=2, replica=2, fsdp=8, devices=fake_hosts(4, 8))
    assert [{d.process_index for d in stage.flat} for stage in mesh.devices.transpose(4, 0, 1, 2, 3, 5)] == [
        {0, 1},
        {2, 3},
    ]


def test_slices_stay_together_whatever_the_process_numbers():
    """A slice is joined by faster links than two slices are, so it outranks the process."""
    devices: list[Any] = [FakeDevice(id=i, process_index=i // 2, slice_index=(i // 2) % 2) for i in range(8)]
    mesh = make_mesh(replica=2, fsdp=4, devices=devices)
    assert [{d.slice_index for d in group.flat} for group in mesh.devices] == [{0}, {1}]


def test_hosts_of_a_deviceless_topology_are_its_processes():
    devices = fake_hosts(3, 2)
    assert hosts(devices) == tuple(device.process_index for device in devices)
    assert hosts(jax.devices()) == (0,) * 8


def test_abstract_mesh_has_all_axes_and_needs_no_devices():
    mesh = make_abstract_mesh({"fsdp": 1024, "replica": 3})
    assert dict(mesh.shape) == {"pipe": 1, "replica": 3, "fsdp": 1024, "expert": 1, "context": 1, "tensor": 1}
    assert mesh.axis_names == AXES
    sizes = {"replica": 2, "fsdp": 4}
    assert axis_sizes(make_mesh(replica=2, fsdp=4)) == axis_sizes(make_abstract_mesh(sizes))


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    with refusing("'fsdp'", "jfsdp.make_mesh"):
        axis_sizes(mesh)


def test_rows_are_split_over_replica_and_fsdp_only():
    assert num_data_shards({"pipe": 2, "replica": 2, "fsdp": 4, "context": 3, "tensor": 2}) == 8
    assert num_data_shards({"tensor": 4}) == 1


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"replica": 2, "fsdp": 4}, {"replica": 8}], ids=str)
@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_the_sharding_factor_regroups_the_mesh(factor, sizes):
    mesh = make_abstract_mesh(sizes, sharding_factor=factor)
    assert dict(mesh.shape) == {
        "pipe": 1,
        "replica": 8 // factor,
        "fsdp": factor,
        "expert": 1,
        "context": 1,
        "tensor": 1,
    }


def test_a_factor_that_does_not_divide_lists_those_that_do():
    for factor in (0, -1, 3, 16):
        facts = (f"sharding_factor={factor} does not divide the 8 devices", "replica", "use one of 1, 2, 4, 8")
        make = functools.partial(make_abstract_mesh, {"replica": 2, "fsdp": 4}, sharding_factor=factor)
        refuses(make, *facts)
