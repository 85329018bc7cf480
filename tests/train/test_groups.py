"""Hybrid strategies: when shards are summed between groups, and how often."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.engine.movements import CALL, LAST, REDUCE, deferred_axes, movements
from jfsdp.jaxprs import all_eqns
from tests.steps import fully_shard, spec_of

WIDTH = 64


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Each(nnx.Module):
    """Three units, each called once."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Again(nnx.Module):
    """One unit, called three times."""

    def __init__(self, rngs):
        self.block = Block(rngs)

    def __call__(self, x):
        return self.block(self.block(self.block(x)))


class Looped(Again):
    """The same in a loop."""

    def __call__(self, x):
        return jax.lax.scan(lambda x, _: (self.block(x), None), x, length=3)[0]


def loss_fn(model, batch):
    errors = (model(batch) - 1) ** 2
    return jfsdp.Loss(errors.sum(), errors.size)


def sums_between_groups(kind, strategy="full_shard", **config):
    """Return the equations of a lowered step that sum over axis replica alone, and that multiply matrices, in order."""
    mesh = jfsdp.make_mesh(replica=2, fsdp=2, devices=jax.devices()[:4])
    model = fully_shard(kind, mesh=mesh, units=[Block], strategy=strategy, program="manual")
    tx = optax.adam(1e-2)
    step = model.train_step(loss_fn, tx, **config)
    traced = step.trace(model.abstract_state(tx), jax.ShapeDtypeStruct((8, WIDTH), jnp.float32))
    found = [eqn for eqn in all_eqns(traced.jaxpr.jaxpr) if eqn.primitive.name in ("psum", "dot_general")]
    return [eqn for eqn in found if eqn.primitive.name == "dot_general" or _is_between(eqn)]


def _is_between(eqn):
    return eqn.params["axes"] == ("replica",) and eqn.invars[0].aval.ndim == 2


def num_sums(equations):
    return sum(len(eqn.invars) for eqn in equations if eqn.primitive.name == "psum")


def test_of_one_microbatch_shards_are_summed_while_the_backward_computes():
    names = [eqn.primitive.name for eqn in sums_between_groups(Each)]
    assert num_sums(sums_between_groups(Each)) == 3
    assert "dot_general" in names[names.index("psum") :]  # the backward goes on behind the first


@pytest.mark.parametrize("kind", [Again, Looped])
def test_a_unit_that_is_called_again_is_summed_once_at_the_end(kind):
    equations = sums_between_groups(kind)
    assert num_sums(equations) == 1 and equations[-1].primitive.name == "psum"


def test_several_microbatches_are_summed_once_after_the_last():
    equations = sums_between_groups(Each, accumulate=2)
    assert num_sums(equations) == 3
    assert {eqn.primitive.name for eqn in equations[-3:]} == {"psum"}


def make_layout(strategy, mp_policy=None, **sizes):
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[:4])
    return fully_shard(Each, mesh=mesh, units=[Block], strategy=strategy, mp_policy=mp_policy).layout


@pytest.mark.parametrize("param_dtype", [None, "bfloat16"])  # in bfloat16 a copy of the parameters is at rest
def test_an_optimizer_that_groups_split_further_gets_its_shards_at_the_end(param_dtype):
    further = jfsdp.Strategy("further", jfsdp.Split.GROUP, jfsdp.Split.GROUP, jfsdp.Split.ALL)
    layout = make_layout(further, jfsdp.MixedPrecisionPolicy(param_dtype), replica=2, fsdp=2)
    assert deferred_axes(layout, accumulate=1, once=False) == ("replica",)


def test_shards_that_lie_otherwise_in_the_optimizer_are_summed_whole():
    """Over groups first: a scatter over them would leave each device with another part than its optimizer has."""
    apart = jfsdp.Strategy("apart", jfsdp.Split.WHOLE, jfsdp.Split.GROUP, jfsdp.Split.ALL)
    layout = make_layout(apart, replica=2, fsdp=2)
    assert {move.kind for move in movements(layout, spec_of(layout)) if move.when == LAST} == {REDUCE}


def test_one_microbatch_shares_its_reduction_with_no_other():
    """Its gradients are reduced unit by unit, and none is held whole to the end."""
    layout = make_layout("zero1", fsdp=4)
    assert [spec_of(layout, accumulate=num).deferred for num in (1, 2)] == [(), ("fsdp",)]


def test_the_list_of_movements_knows_units_that_are_called_again():
    layout = make_layout("full_shard", replica=2, fsdp=2)

    def between(calls=None, **given):
        moves = movements(layout, spec_of(layout, calls=calls, **given), calls)
        return {(move.when, move.times) for move in moves if move.kind == REDUCE}

    assert between() == {(CALL, 1)}
    (unit,) = {leaf.unit for leaf in layout.leaves if leaf.path.startswith("blocks.0")}
    assert {when for when, _ in between(calls={unit: 3})} == {LAST}
    assert {when for when, _ in between(accumulate=4)} == {LAST}
