"""Warnings about layouts: each absurd setting is told, and an ordinary one is not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.lint import LayoutWarning, advise
from jfsdp.layout.strategy import STRATEGIES
from tests.refusals import check_facts, warning
from tests.sharding import fully_shard


class Net(nnx.Module):
    def __init__(self, rngs, size=1024):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (size, 1024)))


def warnings(mesh, strategy="full_shard", size=1024, **options):
    mesh = jfsdp.make_abstract_mesh(mesh)
    return advise(fully_shard(lambda rngs: Net(rngs, size), mesh=mesh, strategy=strategy, **options).layout)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", [{"replica": 2, "fsdp": 4}, {"fsdp": 8}], ids=str)
def test_a_mesh_that_splits_something_suits_every_strategy(strategy, mesh):
    assert warnings(mesh, strategy) == []


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "full_shard"])
def test_a_strategy_that_splits_nothing_on_a_mesh_of_replicas_is_told(strategy):
    (warning,) = warnings({"replica": 8}, strategy)
    assert warning.startswith(f"{strategy} splits over axis 'fsdp', whose size is 1: nothing is split, as with ddp")
    assert warnings({"replica": 8}, strategy, opt_over=("replica", "fsdp")) == []


def test_on_one_device_nothing_is_split():
    assert warnings({"fsdp": 1}) == ["full_shard on one device: nothing is split, as with ddp"]
    assert warnings({"fsdp": 1}, "ddp") == []


def test_padding_is_told_above_one_percent():
    assert warnings({"fsdp": 3}) == []  # 1024 as 1026
    (warning,) = warnings({"fsdp": 100})  # 1024 as 1100
    assert warning.startswith("padding is 6.9 % of all that is stored, most of it in weight (dim ")
    assert "1,024 stored as 1,100" in warning


def test_large_leaves_that_stay_whole_are_told():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.large, self.small = nnx.Param(jnp.ones((2048, 1024))), nnx.Param(jnp.ones((64, 64)))

    mesh = jfsdp.make_abstract_mesh({"fsdp": 8})
    layout = fully_shard(Two, mesh=mesh, ignored="large").layout
    (warning,) = advise(layout)
    check_facts(warning, "1 large leaves", "2,097,152")
    assert advise(fully_shard(Two, mesh=mesh, ignored="small").layout) == []


def test_a_min_size_above_every_leaf_is_told():
    (warning,) = warnings({"fsdp": 8}, min_size=2**21)
    check_facts(warning, "min_size 2097152", "jfsdp.placements", "ddp")
    assert warnings({"fsdp": 8}, "ddp", min_size=2**21) == []


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(2048, 1024, use_bias=False, rngs=rngs) for _ in range(2))


def wide(**options):
    return jfsdp.fully_shard(Wide, mesh=jfsdp.make_abstract_mesh({"fsdp": 8}), **options).layout


@pytest.mark.parametrize("options", [{}, {"units": ()}, {"units": [Wide]}])
def test_a_large_model_without_units_is_told_aloud_what_is_gathered_at_once(options):
    message = r"no units: all 4,194,304 split parameters are gathered at once, 8,388,608 bytes on every device; name"
    policy = jfsdp.MixedPrecisionPolicy("bfloat16")
    with pytest.warns(LayoutWarning, match=message) as told:
        layout = wide(mp_policy=policy, **options)
    assert told[0].filename == __file__
    assert advise(layout) == [str(told[0].message)]


def test_padding_is_told_aloud_where_it_is_large():
    with warning("50.0", error=LayoutWarning):
        fully_shard(Net, mesh=jfsdp.make_abstract_mesh({"fsdp": 2048}))  # 1024 stored as 2048


class Sharing(nnx.Module):
    """Two blocks around one large core."""

    def __init__(self, rngs, size=1024):
        core = Net(rngs, size)
        self.blocks = nnx.List([nnx.Sequential(core), nnx.Sequential(core)])


def test_large_leaves_that_units_share_are_told_with_the_units_and_the_cure():
    options: Any = {"mesh": jfsdp.make_abstract_mesh({"fsdp": 8})}
    with warning("1,048,576", "blocks.0", "blocks.1", error=LayoutWarning):
        fully_shard(Sharing, units=[nnx.Sequential], **options)
    fully_shard(Sharing, units=[nnx.Sequential, Net], **options)
    fully_shard(lambda rngs: Sharing(rngs, 512), units=[nnx.Sequential], **options)
