"""Modules that two parents hold, and weights tied between them: as a unit, inside units, and beside them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests import reference
from tests.modules.parity import DIM, ROWS, TX, check_linen, check_nnx, count_calls, data, mean_square, square
from tests.refusals import refusing
from tests.steps import fully_shard

X = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
ADAM = optax.adam(1e-2, eps=1e-4)


class Core(nnx.Module):
    """What is shared: weights, batch statistics and an rng stream, whose order of calls counts."""

    def __init__(self, rngs, has_state=True):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, momentum=0.9, rngs=rngs) if has_state else None
        self.dropout = nnx.Dropout(0.3, rngs=rngs) if has_state else None

    def __call__(self, x):
        x = jnp.tanh(self.linear(x))
        return self.dropout(self.norm(x)) if self.norm is not None and self.dropout is not None else x


class Outer(nnx.Module):
    def __init__(self, core, rngs):
        self.core = core
        self.own = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.own(self.core(x))


class Scaled(Outer):
    """Reads a weight of the shared module beside its calls."""

    def __call__(self, x):
        return super().__call__(x) * self.core.linear.bias[...].mean() + x


class Net(nnx.Module):
    """Two blocks around one core, which the model itself calls too, in a loop over a stack if there is one."""

    def __init__(self, rngs, cls: type[Any] = Outer, has_state=True, num_stacked=0):
        core = Core(rngs, has_state)
        self.blocks = nnx.List([cls(core, rngs) for _ in range(2)])
        self.core = core
        self.num_stacked = num_stacked
        if num_stacked:
            make = nnx.vmap(lambda rngs: nnx.Linear(DIM, DIM, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=num_stacked)(make)(rngs)

    def __call__(self, x):
        for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            x = block(x)
        if self.num_stacked:
            loop = nnx.scan(lambda x, layer, core: core(layer(x)), in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
            x = loop(x, self.layers, self.core)
        return self.core(x)


class Tied(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.head = nnx.Linear(DIM, DIM, rngs=rngs)
        self.head.kernel = self.core.linear.kernel

    def __call__(self, x):
        return self.head(super().__call__(x))


def check_manual(source, units, **options):
    """Train under the manual engine, where each device sees its rows; compare with one device."""
    model = fully_shard(source, units=units, min_size=1, program="manual", **options)
    state, step, batches = model.init(ADAM), model.train_step(square, ADAM, check_loss=False), [data(), data(seed=1)]
    for batch in batches:
        state, _ = step(state, batch)
    wanted = reference.train(source, square, ADAM, batches).params
    found = {name: reference.logical(state, name, value) for name, value in state.params.items()}
    error, leaf = reference.worst_leaf(found, wanted, 2e-2)
    assert error < 1e-3, leaf


def some(names, *quick):
    """Leave all names but those of `quick` to the proofs."""
    return [pytest.param(name, marks=[pytest.mark.proof] * (name not in quick)) for name in names]


UNITS = {"itself": [Core], "beside": [Outer], "nested": [Outer, Core]}


@pytest.mark.proof  # with the tests a weight is read beside the calls, or tied, below
@pytest.mark.parametrize("units", UNITS)
def test_a_module_that_two_parents_hold_trains_as_on_one_device(units):
    model = check_nnx(Net, mean_square, data(), UNITS[units])
    owner = "" if units == "beside" else "blocks.0.core"
    assert model.layout.by_path["blocks.0.core.linear.kernel"].unit == owner


in_place = pytest.mark.filterwarnings("ignore:units .* are called inside another unit")


@in_place
@pytest.mark.parametrize("units", some(UNITS, "beside"))
def test_a_module_that_two_parents_hold_trains_under_the_manual_engine_too(units):
    options = {
        "nested": {"reshard_after_forward": False},
        "beside": {"per_unit": {"": {"reshard_after_forward": True}}},
    }
    check_manual(lambda rngs: Net(rngs, has_state=False, num_stacked=3), UNITS[units], **options.get(units, {}))


def test_each_call_of_a_shared_unit_gathers_it_once(monkeypatch):
    model = fully_shard(Net, units=[Outer, Core], min_size=1)
    counts = count_calls(monkeypatch, model, mean_square, data())
    assert counts == {"": 1, "blocks.0": 1, "blocks.1": 1, "blocks.0.core": 3}


def test_a_shared_module_between_units_is_the_root_s_and_its_reason_names_them():
    layout = fully_shard(Net, units=[Outer]).layout
    assert "share it: blocks.0, blocks.1" in layout.by_path["blocks.0.core.linear.kernel"].reason
    assert "share it" not in layout.by_path["blocks.0.own.kernel"].reason
    assert "share it" not in fully_shard(Net, units=[Outer, Core]).layout.by_path["blocks.0.core.norm.bias"].reason


def test_a_weight_of_a_shared_module_may_be_read_beside_its_calls_if_no_unit_owns_it():
    check_nnx(lambda rngs: Net(rngs, Scaled), mean_square, data(), [Outer], steps=1)
    model = fully_shard(lambda rngs: Net(rngs, Scaled), units=[Core], min_size=1)
    with refusing("blocks.0.core.linear.bias"):
        model.train_step(mean_square, TX).lower(model.abstract_state(TX), X)


def test_a_weight_tied_into_a_shared_unit_is_the_root_s():
    model = check_nnx(Tied, mean_square, data(), [Core, Outer], steps=1)
    owners = {leaf.path: leaf.unit for leaf in model.layout.leaves}
    assert owners["blocks.0.core.linear.kernel"] == ""
    assert owners["blocks.0.core.linear.bias"] == "blocks.0.core"


class Ring(nnx.Module):
    """Two modules that hold each other."""

    def __init__(self, rngs, other=None):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.other = other or Ring(rngs, self)

    def __call__(self, x, is_last=False):
        x = jnp.tanh(self.linear(x))
        return x if is_last else self.other(x, True)


class RingNet(nnx.Module):
    def __init__(self, rngs):
        self.ring = Ring(rngs)

    def __call__(self, x):
        return self.ring(x) + self.ring.other(x)


def test_modules_that_hold_each_other_are_units_as_their_first_paths_say():
    model = check_nnx(RingNet, mean_square, data(), ["ring", "ring.other"], steps=1)
    assert [unit.name for unit in model.layout.units] == ["", "ring", "ring.other"]


class LinenCore(nn.Module):
    has_state: bool = True

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(DIM)(x))
        if not self.has_state:
            return x
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return nn.Dropout(0.3, deterministic=False)(x)


class LinenOuter(nn.Module):
    core: nn.Module

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(DIM)(self.core(x))


class LinenNet(nn.Module):
    """Two blocks around one core, which belongs to the first by name."""

    first: nn.Module
    second: nn.Module

    def __call__(self, x):
        return self.second(self.first(x))


def linen_net(has_state=True):
    core = LinenCore(has_state)
    return LinenNet(LinenOuter(core), LinenOuter(core)), (X,)


LINEN_UNITS = {"itself": [LinenCore], "beside": [LinenOuter], "nested": [LinenOuter, LinenCore]}


@pytest.mark.parametrize("units", some(LINEN_UNITS, "nested"))
def test_a_linen_module_that_two_parents_hold_trains_as_on_one_device(units):
    module, example = linen_net()
    model = check_linen(module, example, mean_square, data(), LINEN_UNITS[units], mutable=["batch_stats"])
    owner = "" if units == "beside" else "first.core"
    assert model.layout.by_path["first.core.Dense_0.kernel"].unit == owner


@in_place
@pytest.mark.parametrize("units", some(UNITS, "nested"))
def test_a_linen_module_that_two_parents_hold_trains_under_the_manual_engine_too(units):
    check_manual(linen_net(has_state=False), LINEN_UNITS[units])
