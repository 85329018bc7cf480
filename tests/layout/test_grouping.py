"""The sharding factor: over how many neighbouring devices parameters are split, and what it stands for."""

from typing import Any

import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.mesh import group_mesh, make_abstract_mesh, make_mesh
from jfsdp.layout.strategy import STRATEGIES


class Net(nnx.Module):
    def __init__(self, rngs):
        self.block = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 32, rngs=rngs)


def shard(factor: int | None, sizes: Any = None, strategy: Any = "full_shard", **more: Any) -> jfsdp.ShardedModel:
    mesh = make_abstract_mesh(sizes or {"fsdp": 8})
    return jfsdp.fully_shard(Net, mesh=mesh, sharding_factor=factor, strategy=strategy, units=["block"], **more)


def kernel(model: jfsdp.ShardedModel) -> dict[str, Any]:
    leaf = model.layout.by_path["block.kernel"]
    return {name: stage and stage.axes for name, stage in leaf.stages}


# Factor, strategy -> replica, fsdp, the strategy that it is.
GROUPED = {
    (1, "full_shard"): (8, 1, "ddp"),
    (2, "full_shard"): (4, 2, "hybrid_shard"),
    (4, "full_shard"): (2, 4, "hybrid_shard"),
    (8, "full_shard"): (1, 8, "full_shard"),
    (1, "shard_grad_op"): (8, 1, "ddp"),
    (4, "shard_grad_op"): (2, 4, "hybrid_shard_zero2"),
    (8, "shard_grad_op"): (1, 8, "shard_grad_op"),
    (2, "FULL_SHARD"): (4, 2, "hybrid_shard"),
    (2, 3): (4, 2, "hybrid_shard"),
}


@pytest.mark.parametrize("case", GROUPED, ids=str)
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"replica": 2, "fsdp": 4}, {"replica": 8}], ids=str)
def test_the_sharding_factor_regroups_the_mesh_and_names_the_strategy(case, sizes):
    factor, strategy = case
    replica, fsdp, name = GROUPED[case]
    model = shard(factor, sizes, strategy)
    assert dict(model.mesh.shape) == {"pipe": 1, "replica": replica, "fsdp": fsdp, "tensor": 1}
    assert model.layout.strategy is STRATEGIES[name]
    same = jfsdp.fully_shard(
        Net, mesh=make_abstract_mesh({"replica": replica, "fsdp": fsdp}), strategy=name, units=["block"]
    )
    assert model.layout == same.layout


def test_parameters_are_split_over_as_many_devices_as_the_factor_says():
    for factor in (1, 2, 4, 8):
        layout = shard(factor).layout
        assert layout.num_parts(layout.by_path["block.kernel"].stage("param")) == factor
    assert kernel(shard(4)) == {
        "param": ("fsdp",),
        "work": None,
        "use": (),
        "kept": ("fsdp",),
        "grad": ("fsdp",),
        "opt": ("fsdp",),
    }


@pytest.mark.parametrize("factor", [0, -1, 3, 5, 16])
def test_a_factor_that_does_not_divide_lists_those_that_do(factor):
    with pytest.raises(
        ValueError,
        match=rf"sharding_factor={factor} does not divide the 8 devices of axes .*replica.*; use one of 1, 2, 4, 8$",
    ):
        shard(factor, {"replica": 2, "fsdp": 4})


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"full_shard", "shard_grad_op"}))
@pytest.mark.parametrize("factor", [1, 2, 8])
def test_a_factor_beside_a_strategy_that_says_it_too_is_refused(strategy, factor):
    with pytest.raises(
        ValueError,
        match=rf"sharding_factor={factor} says how far .* so does strategy '{strategy}'; leave one .* full_shard or",
    ):
        shard(factor, strategy=strategy)


def test_resharding_with_a_factor_of_one_is_refused_as_with_ddp():
    with pytest.raises(ValueError, match="reshard_after_forward=True contradicts strategy 'ddp'"):
        shard(1, reshard_after_forward=True)


def test_a_regrouped_mesh_has_the_same_devices_in_the_same_order():
    mesh = make_mesh(replica=4, fsdp=2)
    grouped: Any = group_mesh(mesh, 4)
    assert dict(grouped.shape) == {"pipe": 1, "replica": 2, "fsdp": 4, "tensor": 1}
    assert list(grouped.devices.flat) == list(mesh.devices.flat)
    assert grouped.axis_types == mesh.axis_types


def test_the_axes_of_the_model_stay_as_they_are():
    grouped = group_mesh(make_abstract_mesh({"pipe": 3, "fsdp": 8, "tensor": 5}), 2)
    assert dict(grouped.shape) == {"pipe": 3, "replica": 4, "fsdp": 2, "tensor": 5}


@pytest.mark.parametrize(("stage", "name"), [(0, "ddp"), (1, "zero1"), (2, "zero2"), (3, "full_shard")])
def test_a_deepspeed_stage_is_a_strategy(stage, name):
    assert shard(None, strategy=stage).layout == shard(None, strategy=name).layout
