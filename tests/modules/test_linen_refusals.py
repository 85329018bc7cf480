"""What a Linen model may not do is refused by name; what it may be given besides is kept."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import DenyList

from jfsdp.modules.linen import LinenModel
from tests.modules.linen_models import SPLIT, Block, Carry, Net, X, shard
from tests.modules.parity import DIM, TX, assert_close, check_linen, data, flat, mean_square, trace
from tests.refusals import check_facts, refuses, refusing
from tests.sharding import fully_shard


def refuse(facts, module, loss=mean_square, units=(Block,), **options):
    """Check what a trace raises: errors of Linen's own types too."""
    with pytest.raises(Exception) as raised:
        trace(shard(module, (X,), units, **options), loss, data())
    check_facts(str(raised.value), *facts)


def test_a_penalty_on_weights_of_a_unit_is_refused_by_name_and_fine_on_those_of_the_root():
    def penalty(*path):
        def loss(model, batch):
            value = model.params
            for name in path:
                value = value[name]
            return mean_square(model, batch) + sum((x**2).sum() for x in jax.tree.leaves(value))

        return loss

    refuse(("h_0.down.kernel", "unit 'h_0'"), Net(), penalty("h_0", "down"))
    trace(shard(Net()), penalty("inlet"), data())


class TwoLayers(nn.Module):
    def setup(self):
        self.inner, self.outer = nn.Dense(DIM), nn.Dense(DIM)

    def __call__(self, x):
        return self.outer(self.inner(x))


class Reaching(nn.Module):
    def setup(self):
        self.unit = TwoLayers()

    def __call__(self, x, train=True):
        return self.unit(x) + self.unit.inner(x)


def test_a_layer_of_a_unit_called_from_outside_is_refused_by_name():
    refuse(("unit.inner.", "unit 'unit'"), Reaching(), units=[TwoLayers])


class Mapped(nn.Module):
    """Maps the weights of a layer before that is called."""

    @nn.compact
    def __call__(self, x, train=True):
        def double(variables):
            return {name: {**of, "kernel": of["kernel"] * 2.0} if of else of for name, of in variables.items()}

        layer = nn.map_variables(nn.Dense, "params", double, init=self.is_initializing())
        return layer(DIM, name="layer")(x)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.WeightNorm(nn.Dense(DIM))(x)


def test_weights_of_a_unit_mapped_from_outside_are_refused_by_name_and_fine_in_the_root():
    refuse(("layer.kernel", "unit 'layer'"), Mapped(), units=[nn.Dense])
    refuse(("Dense_0/kernel", "make a unit of a module that contains both"), Normed(), units=[nn.Dense])
    trace(shard(Mapped(), units=[]), mean_square, data())
    trace(shard(Normed(), units=[nn.WeightNorm]), mean_square, data())


def test_layers_stacked_along_another_dim_are_refused_by_name_and_fine_in_the_root():
    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            axes: Any = {"params": 1, "batch_stats": 0, "losses": 0}
            return nn.scan(Carry, variable_axes=axes, split_rngs=SPLIT, length=3)(train)(x, None)[0]

    refuse(("dim 1", "variable_axes={'params': 0}"), Stacked())
    check_linen(Stacked(), (X,), mean_square, data(), [], mutable=["batch_stats"], steps=1)


def test_writes_to_parameters_are_refused():
    class Writer(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            kernel = self.param("kernel", nn.initializers.ones, (DIM,))
            if not self.is_initializing():
                self.put_variable("params", "kernel", kernel * 2)
            return x * kernel

    refuse(("mutable=True", "parameters"), Net(), lambda model, x: model(x, mutable=True)[0].mean())
    refuse(("kernel",), Writer(), units=[Writer])
    model = shard(Net())
    jax.eval_shape(
        model.forward(lambda model, x: model(x, mutable=DenyList("params"))[0]), model.abstract_state(TX), data()
    )


def test_state_made_by_a_call_is_refused_by_name():
    class Maker(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(DIM)(x))
            if not self.is_initializing():
                self.variable("batch_stats", "late", jnp.zeros, (DIM,))
            return x

    refuse(("batch_stats.late",), Maker(), units=["Dense_0"])


def test_given_variables_are_kept_and_wrong_ones_are_refused():
    module = Net()
    variables = module.init(jax.random.key(7), data())
    model = fully_shard((module, (X,), variables), units=[Block], min_size=1)
    assert_close(model.init(TX, seed=3).params, flat(variables["params"]), 0, 0)
    refuses(lambda: LinenModel(module, (X,), {"params": variables["params"]}), "missing: batch_stats")
    wrong = {**variables, "params": {**variables["params"], "Dense_0": {"kernel": np.ones((2, 2)), "bias": np.ones(3)}}}
    with refusing("Dense_0.kernel", "[2, 2]"):
        LinenModel(module, (X,), wrong)


def test_boxed_parameters_are_unboxed():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
            return nn.Dense(DIM, kernel_init=init)(x)

    check_linen(Boxed(), X, mean_square, data(), [nn.Dense], steps=1)


@pytest.mark.parametrize("source", [Net(), (Net(),), (Net, X), (X, Net())], ids=["bare", "one", "class", "order"])
def test_what_is_no_linen_model_is_refused_with_the_form_to_pass(source):
    error = TypeError if isinstance(source, nn.Module) else ValueError
    refuses(lambda: fully_shard(source), "module, example_inputs)", error=error)


@pytest.mark.parametrize("example", [(1, 64), [1, 64], 64])
def test_a_shape_in_place_of_example_inputs_is_refused_with_what_to_pass(example):
    with refusing("example_inputs", "64", "jax.ShapeDtypeStruct"):
        LinenModel(Net(), example)


def test_a_number_may_be_an_input():
    class Table(nn.Module):
        @nn.compact
        def __call__(self, length):
            return self.param("table", nn.initializers.normal(), (length, 3))

    assert LinenModel(Table(), (5,)).params["table"].shape == (5, 3)


def test_a_unit_given_as_a_module_is_refused_with_the_class_to_pass():
    with refusing("units=[Block]", error=TypeError):
        shard(Net(), (X,), [Block()])
