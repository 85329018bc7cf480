"""The sharding factor: over how many neighbouring devices parameters are split."""

import functools

import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.mesh import make_abstract_mesh
from tests.refusals import refuses


class Net(nnx.Module):
    def __init__(self, rngs):
        self.block = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 32, rngs=rngs)


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"replica": 2, "fsdp": 4}, {"replica": 8}], ids=str)
@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_the_sharding_factor_regroups_the_mesh(factor, sizes):
    mesh = make_abstract_mesh(sizes, sharding_factor=factor)
    assert dict(mesh.shape) == {"pipe": 1, "replica": 8 // factor, "fsdp": factor, "tensor": 1}
    layout = jfsdp.fully_shard(Net, mesh=mesh, units=["block"]).layout
    assert layout.num_parts(layout.by_path["block.kernel"].stage("param")) == factor


def test_a_factor_that_does_not_divide_lists_those_that_do():
    for factor in (0, -1, 3, 16):
        facts = (f"sharding_factor={factor} does not divide the 8 devices", "replica", "use one of 1, 2, 4, 8")
        make = functools.partial(make_abstract_mesh, {"replica": 2, "fsdp": 4}, sharding_factor=factor)
        refuses(make, *facts)
