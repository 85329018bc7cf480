"""Which of two programs a step is: what decides it, and that it is decided once."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.mesh import make_abstract_mesh
from tests.pairwise import cover
from tests.sharding import fully_shard

TX = optax.adam(1e-3)
MESH, GROUPS = {"fsdp": 8}, {"replica": 2, "fsdp": 4}


class Net(nnx.Module):
    def __init__(self, rngs, hidden=16, rate=0.0):
        self.up, self.down = nnx.Linear(8, hidden, rngs=rngs), nnx.Linear(hidden, 8, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.up(x))))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.up = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(self.up(self.embed(x.astype(jnp.int32)[:, 0] % 16)))


@jax.custom_vjp
def times(x, weight):
    return x @ weight


times.defvjp(lambda x, weight: (x @ weight, (x, weight)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


class Gate(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x, weight):
        return x @ (self.scale[...] * weight)


class Rooted(nnx.Module):
    """A weight of the root that goes into a unit (`given`), or into a derivative of the model's own."""

    def __init__(self, rngs, given):
        self.up, self.given = Gate(rngs), given
        self.root = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        return self.up(x, self.root[...]) if self.given else times(self.up(x, 1.0), self.root[...])


class Counted(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.norm(super().__call__(x))


def padded(rngs):
    return Net(rngs, hidden=12)


def loss(model, batch):
    out = model(batch["x"])
    return jfsdp.Loss((out**2).sum(), 1.0 * len(out))


def scalar(model, batch):
    return (model(batch["x"]) ** 2).mean()


def noisy(model, batch):
    out = model(batch["x"])
    return jfsdp.Loss((out * jax.random.bernoulli(jax.random.key(3), 0.5, out.shape)).sum(), 1.0 * len(out))


def branching(model, batch):
    """A unit under a condition: devices may disagree whether it is gathered."""
    x = batch["x"]
    out = jax.lax.cond(x.sum() > 0, lambda x: model.up(x).astype(x.dtype).sum(), jnp.sum, x)
    return jfsdp.Loss(out, 1.0 * len(x))


BATCH = {"x": np.ones((16, 8), np.float32)}
F32 = jfsdp.MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")
AGAIN = {"accumulate": 2}
# Model, loss, mesh, options of fully_shard and of the step, and the program with some of the reason.
CASES = {
    "plain": (Net, loss, {"fsdp": 8}, {}, {}, "xla", "no more than it must"),
    "one device": (Net, loss, {"fsdp": 1}, {"engine": "manual"}, {}, "xla", "one data shard"),
    "scalar": (Net, scalar, {"fsdp": 8}, {}, {}, "xla", "no more than it must"),
    "padded": (padded, loss, {"fsdp": 8}, {}, {}, "manual", "padded"),
    "padded, scalar": (padded, scalar, {"fsdp": 8}, {}, {}, "xla", "the loss is a scalar"),
    "tied": (Tied, loss, {"fsdp": 8}, {"units": ["up"]}, {}, "manual", "embed.embedding has several uses"),
    "a derivative of its own": (
        lambda rngs: Rooted(rngs, False),
        loss,
        {"fsdp": 8},
        {"units": ["up"]},
        {},
        "manual",
        "the model forms the gradient of root itself",
    ),
    "a weight given to a unit": (
        lambda rngs: Rooted(rngs, True),
        loss,
        {"fsdp": 8},
        {"units": ["up"]},
        {},
        "xla",
        "no more than it must",
    ),
    "hybrid": (Net, loss, GROUPS, {}, AGAIN, "manual", "sums over replica once per step"),
    "hfsdp": (Net, loss, GROUPS, {"opt_over": ("replica", "fsdp")}, {}, "manual", "split further"),
    "zero1": (Net, loss, MESH, {"strategy": "zero1"}, AGAIN, "manual", "sums over fsdp once per step"),
    "zero1, one microbatch": (Net, loss, MESH, {"strategy": "zero1"}, {}, "xla", "no more"),
    "state of rows": (Counted, loss, GROUPS, {}, {}, "xla", "norm.* depends on the rows"),
    "condition": (padded, branching, {"fsdp": 8}, {}, {}, "xla", "under a condition"),
    "asked: xla": (padded, loss, {"fsdp": 8}, {"engine": "xla"}, {}, "xla", "engine='xla'"),
    "asked: manual": (Net, loss, {"fsdp": 8}, {"engine": "manual"}, {}, "manual", "engine='manual'"),
    "flat": (Net, loss, {"fsdp": 8}, {"storage": "flat"}, {}, "manual", "storage='flat'"),
    "prefetch": (Net, loss, {"fsdp": 8}, {"prefetch": 0}, {}, "manual", "prefetch=0"),
    "another sum": (Net, loss, {"fsdp": 8}, {"mp_policy": F32}, {}, "manual", "reduce_dtype='float32'"),
    "once": (Net, loss, {"fsdp": 8}, {}, AGAIN | {"reduce": "once"}, "manual", "reduce='once'"),
    "once, one microbatch": (Net, scalar, {"fsdp": 8}, {}, {"reduce": "once"}, "xla", "no more"),
    "sums as weights travel, but for what is ignored": (
        Net,
        scalar,
        {"fsdp": 8},
        {"mp_policy": jfsdp.MixedPrecisionPolicy("bfloat16", "bfloat16"), "ignored": "**.bias"},
        {},
        "xla",
        "no more",
    ),
    "keys of the loss's own": (padded, noisy, {"fsdp": 8}, {}, {}, "xla", "each device would draw the same"),
    "masks": (
        lambda rngs: Net(rngs, 12, 0.5),
        loss,
        {"fsdp": 8},
        {},
        {},
        "manual",
        "padded.*dropout masks differ from one device's; engine='xla' keeps them",
    ),
}


def step_of(source, loss_fn, mesh, options, config):
    options = {"units": ["up", "down"], "min_size": 0} | options
    model = fully_shard(source, mesh=make_abstract_mesh(mesh), **options)
    return model, model.train_step(loss_fn, TX, **config)


@pytest.mark.parametrize("name", CASES)
def test_the_program_follows_the_table(name):
    *given, program, reason = CASES[name]
    model, step = step_of(*given)
    before = step.program, step.reason
    step.decide(model.abstract_state(TX), BATCH)
    assert step.program == program
    assert before in ((None, "depends on the loss"), (step.program, step.reason))
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(step.reason)


@pytest.mark.parametrize("name", ["flat", "prefetch", "another sum", "once"])
@pytest.mark.parametrize("problem", [scalar, branching])
def test_what_only_manual_has_is_refused_where_manual_cannot_be(name, problem):
    source, _, mesh, options, config, *_ = CASES[name]
    model, step = step_of(source, problem, mesh, options, config)
    with pytest.raises(ValueError, match=r"(Loss|leave out)"):
        step.decide(model.abstract_state(TX), BATCH)
    with pytest.raises(ValueError, match="engine='xla' leaves"):
        step_of(source, loss, mesh, options | {"engine": "xla"}, config)


def test_keys_of_the_losss_own_are_told_where_manual_is_asked_for():
    model, step = step_of(Net, noisy, {"fsdp": 8}, {"engine": "manual"}, {})
    with pytest.warns(UserWarning, match="random keys that are not in the model's state"):
        step.decide(model.abstract_state(TX), BATCH)


def test_a_program_is_not_chosen_by_a_batch_that_cannot_be_split():
    model, step = step_of(padded, loss, {"fsdp": 8}, {}, {"accumulate": 4})
    with pytest.raises(ValueError, match=r"dim 0 .size 16. cannot be split"):
        step.decide(model.abstract_state(TX), BATCH)
    assert step.program is None


@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_xla_says_that_it_cannot_wait_for_the_last_microbatch(strategy):
    model, step = step_of(Net, loss, GROUPS, {"strategy": strategy, "engine": "xla"}, AGAIN)
    assert "every microbatch is reduced over " in step.decide(model.abstract_state(TX), BATCH)
    model, step = step_of(Net, scalar, GROUPS, {"strategy": strategy}, AGAIN)
    with pytest.warns(
        UserWarning, match="scalar.*every microbatch is reduced over .*and not the last one only"
    ) as told:
        step.decide(model.abstract_state(TX), BATCH)
    assert told[0].filename == __file__


TRACED = {
    "name": ["plain", "padded", "tied", "hybrid", "asked: manual", "asked: xla", "flat"],
    "accumulate": [1, 2],
    "weight": ["of rows", "of an array"],
}


@pytest.mark.parametrize(
    tuple(TRACED),
    [
        pytest.param(*case, marks=[] if case in cover(TRACED) else [pytest.mark.proof])
        for case in itertools.product(*TRACED.values())
    ],
)
def test_a_loss_is_traced_at_most_three_times(name, accumulate, weight):
    source, _, mesh, options, _, *_ = CASES[name]
    num = 0

    def counted(model, batch):
        nonlocal num
        num += 1
        found = loss(model, batch)
        return found if weight == "of rows" else found._replace(weight=(batch["x"] > -1).all(1).sum())

    options = {"units": ["up"] if source is Tied else ["up", "down"], "min_size": 0} | options
    sizes = {"replica": 1, "fsdp": 1} | mesh
    model = fully_shard(source, mesh=jfsdp.make_mesh(**sizes), **options)
    step = model.train_step(counted, TX, accumulate=accumulate, check_loss=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state, _ = step(model.init(TX), BATCH)
        assert 1 <= num <= 3, num
        step(state, BATCH)
    assert num <= 3, "a second step traces nothing"
