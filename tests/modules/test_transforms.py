"""Units called inside transforms of JAX itself: what runs on one device runs sharded, all else is refused by name."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from tests.modules.parity import DIM, check_linen, check_nnx, data, mean_square, refused
from tests.sharding import fully_shard

TRANSFORMS = {
    "vmap": lambda call, x: jax.vmap(call)(x),
    "grad": lambda call, x: jax.grad(lambda x: call(x).sum())(x),
    "scan": lambda call, x: jax.lax.scan(lambda x, _: (call(x), None), x, None, length=2)[0],
    "remat": lambda call, x: jax.checkpoint(lambda x: call(x))(x),
    "cond": lambda call, x: jax.lax.cond(x.sum() > 0, lambda x: call(x), jnp.negative, x),
    "jit": lambda call, x: jax.jit(lambda x: call(x))(x),
}


class Block(nnx.Module):
    """Holds an rng stream and batch statistics."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(jnp.tanh(self.linear(x))))


class Net(nnx.Module):
    def __init__(self, rngs, transforms=()):
        self.transforms = tuple(transforms)
        self.block = Block(rngs)

    def __call__(self, x):
        for transform in self.transforms:
            x = TRANSFORMS[transform](self.block, x)
        return x


def evaluated(model, batch):
    model.eval()
    return mean_square(model, batch)


def refuse(facts, source, unit):
    refused(fully_shard(source, units=[unit], min_size=1), mean_square, data(), *facts)


def test_a_unit_whose_state_does_not_change_runs_inside_transforms_of_jax():
    check_nnx(lambda rngs: Net(rngs, list(TRANSFORMS)), evaluated, data(), [Block], steps=1)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_unit_that_changes_state_there_is_refused_with_its_name_the_state_and_a_remedy(transform):
    refuse(("unit 'block'", "norm.mean", "nnx.vmap"), lambda rngs: Net(rngs, [transform]), Block)


def test_a_unit_that_draws_runs_inside_the_vmap_of_nnx():
    class Mapped(Net):
        def __call__(self, x):
            @nnx.split_rngs(splits=x.shape[0])
            @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), 0))
            def call(block, x):
                block.norm.eval()
                return block(x)

            return call(self.block, x)

    check_nnx(Mapped, mean_square, data(), [Block])


class LinenBlock(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(jnp.tanh(nn.Dense(DIM)(x)))


class LinenNet(nn.Module):
    transforms: tuple[str, ...]
    train: bool = False

    def setup(self):
        self.block = LinenBlock(self.train)

    def __call__(self, x):
        return through(self, lambda x: self.block(x), x)


class Compact(LinenNet):
    """Makes its block, and so a scope, inside the transform."""

    def setup(self):
        return

    @nn.compact
    def __call__(self, x):
        return through(self, lambda x: LinenBlock(self.train, name="block")(x), x)


def through(module, call, x):
    for transform in () if module.is_initializing() else module.transforms:
        x = TRANSFORMS[transform](call, x)
    return call(x) if module.is_initializing() else x


def test_a_linen_unit_whose_state_does_not_change_runs_inside_transforms_of_jax():
    net = LinenNet(tuple(TRANSFORMS))
    check_linen(net, (data(),), mean_square, data(), [LinenBlock], steps=1, mutable=["batch_stats"])


@pytest.mark.parametrize("net", [LinenNet, Compact])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_linen_unit_that_changes_state_there_is_refused_with_its_name_the_state_and_a_remedy(transform, net):
    refuse(("unit 'block'", "batch_stats", "nn.vmap"), (net((transform,), train=True), (data(),)), LinenBlock)
