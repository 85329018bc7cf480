"""Which of two programs a step is: what decides it, and that it is decided once."""

import dataclasses
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.train.step import resolve
from tests.refusals import refuses, warning
from tests.sharding import fully_shard

TX = optax.adam(1e-3)
GROUPS = {"replica": 2, "fsdp": 4}


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


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(Net, in_axes=0, out_axes=0))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, net: net(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


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


def scalar_and_metrics(model, batch):
    return scalar(model, batch), {"half": 0.5, "most": jfsdp.Max(batch["x"].max())}


def other_sum(model, batch):
    return types.SimpleNamespace(**loss(model, batch)._asdict())


def unweighted(model, batch):
    return jfsdp.Loss((model(batch["x"]) ** 2).sum(), batch["num"])


def noisy(model, batch):
    out = model(batch["x"])
    return jfsdp.Loss((out * jax.random.bernoulli(jax.random.key(3), 0.5, out.shape)).sum(), 1.0 * len(out))


def branching(model, batch):
    """A unit under a condition: devices may disagree whether it is gathered."""
    x = batch["x"]
    out = jax.lax.cond(x.sum() > 0, lambda x: model.up(x).astype(x.dtype).sum(), jnp.sum, x)
    return jfsdp.Loss(out, 1.0 * len(x))


BATCH = {"x": np.ones((16, 8), np.float32), "num": np.float32(16)}
F32 = jfsdp.MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")
AGAIN = {"accumulate": 2}
PIPED = {"units": [jfsdp.Unit("blocks", stacked=1)]}
# Model, loss, mesh, options of fully_shard and of the step, and the program with some of the reason.
EIGHT = {"fsdp": 8}
BF16 = jfsdp.MixedPrecisionPolicy("bfloat16", "bfloat16")
CASES = {
    "a sum": (Net, loss, EIGHT, {}, {}, "manual", "the loss is a sum with its weight"),
    "any object with total and weight": (Net, other_sum, EIGHT, {}, {}, "manual", "a sum with its weight"),
    "scalar": (Net, scalar, EIGHT, {}, {}, "xla", "the loss is a scalar"),
    "scalar with metrics": (Net, scalar_and_metrics, EIGHT, {}, {}, "xla", "the loss is a scalar"),
    "one device": (Net, loss, {"fsdp": 1}, {}, {"program": "manual"}, "xla", "one data shard"),
    "pipeline": (Layers, loss, {"pipe": 2, "fsdp": 2}, PIPED, AGAIN, "manual", "mesh axis 'pipe' (size 2)"),
    "pipeline, scalar": (Layers, scalar, {"pipe": 2, "fsdp": 1}, PIPED, AGAIN, "manual", "mesh axis 'pipe' (size 2)"),
    "padded": (padded, loss, EIGHT, {}, {}, "manual", "a sum"),
    "tied": (Tied, loss, EIGHT, {"units": ["up"]}, {}, "manual", "a sum"),
    "hybrid": (Net, loss, GROUPS, {}, AGAIN, "manual", "a sum"),
    "asked: xla": (padded, loss, EIGHT, {}, {"program": "xla"}, "xla", "program='xla'"),
    "asked: xla, state of rows": (Counted, loss, EIGHT, {}, {"program": "xla"}, "xla", "program='xla'"),
    "asked: xla, hybrid": (Net, loss, GROUPS, {}, AGAIN | {"program": "xla"}, "xla", "program='xla'"),
    "asked: manual": (Net, loss, EIGHT, {}, {"program": "manual"}, "manual", "program='manual'"),
    "flat": (Net, loss, EIGHT, {"storage": "flat"}, {}, "manual", "a sum"),
    "last, one microbatch": (Net, scalar, EIGHT, {}, {"sync": "last"}, "xla", "scalar"),
    "sums as weights travel": (Net, scalar, EIGHT, {"mp_policy": BF16, "ignored": "**.bias"}, {}, "xla", "scalar"),
    "masks": (lambda rngs: Net(rngs, 12, 0.5), loss, EIGHT, {}, {}, "manual", "dropout masks differ from one device's"),
}


def step_of(source, loss_fn, mesh, options, config):
    options = {"units": ["up", "down"], "min_size": 0} | options
    model = fully_shard(source, mesh=make_abstract_mesh(mesh), **options)
    return model.train_step(loss_fn, TX, **config)


def decide(*given):
    return step_of(*given).resolve(BATCH)


@pytest.mark.parametrize("name", CASES)
def test_the_program_follows_the_loss(name):
    *given, program, reason = CASES[name]
    spec = decide(*given)
    assert spec.program == program and reason in spec.reason
    assert (spec.prefetch is None) == (program == "xla")
    assert not (program == "xla" and spec.deferred), "it sums every microbatch"


# What only `manual` has: options of `fully_shard`, of the step, and what names it.
NEEDS = {
    "flat": ({"storage": "flat"}, {}, "storage='flat'"),
    "prefetch": ({}, {"prefetch": 0}, "prefetch=0"),
    "another sum": ({"mp_policy": F32}, {}, "reduce_dtype='float32'"),
    "last": ({}, AGAIN | {"sync": "last"}, "sync='last'"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_only_manual_has_is_refused_in_program_xla(name):
    options, config, word = NEEDS[name]
    refuses(lambda: decide(Net, scalar, EIGHT, options, config), word, "scalar", "jfsdp.Loss", "leave")
    refuses(lambda: step_of(Net, loss, EIGHT, options, config | {"program": "xla"}), word, "program='xla'")
    assert decide(Net, loss, EIGHT, options, config).program == "manual"  # both remedies
    assert decide(Net, scalar, EIGHT, {}, {}).program == "xla"


REFUSED = {
    "state of rows": (Counted, loss, {}, ("norm.", "depends on the rows")),
    "a unit under a condition": (padded, branching, {}, ("under a condition",)),
    "keys of the loss's own": (padded, noisy, {}, ("random keys", "keys in the model's state")),
    "a weight that depends on no row": (Net, unweighted, {}, ("depends on no row", "jfsdp.Loss(total, weight)")),
    "a scalar in manual": (Net, scalar, {"program": "manual"}, ("scalar", "jfsdp.Loss(total, weight)")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_from_a_devices_rows_is_refused_with_the_other_program(name):
    source, loss_fn, config, words = REFUSED[name]
    refuses(lambda: decide(source, loss_fn, EIGHT, {}, config), *words, "program='xla'")
    assert decide(source, loss_fn, EIGHT, {}, {"program": "xla"}).program == "xla"


@pytest.mark.parametrize("config", [{}, {"program": "xla"}, {"program": "manual"}], ids=str)
@pytest.mark.parametrize("mesh", [{"fsdp": 1}, EIGHT], ids=str)
def test_a_weight_of_a_number_is_refused_with_a_scalar_instead(mesh, config):
    mean = lambda model, batch: jfsdp.Loss(scalar(model, batch), 1.0, {"half": 0.5})  # noqa: E731
    refuses(lambda: decide(Net, mean, mesh, {}, config), "weight", "1 for any number of rows", "return mean, aux")


def test_a_spec_is_refused_before_it_is_resolved_and_then_stays():
    step = step_of(Net, loss, EIGHT, {}, AGAIN)
    refuses(lambda: step.spec, "step.resolve(batch)")
    spec = step.resolve(BATCH)
    assert step.spec is spec is step.resolve(BATCH)
    assert (spec.accumulate, spec.deferred, spec.gathered, spec.passes) == (2, (), (), None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.program = "xla"  # type: ignore[misc]


def test_resolving_changes_no_attribute_of_a_step():
    step = step_of(Net, loss, EIGHT, {}, AGAIN)
    before = dict(vars(step))
    step.resolve(BATCH)
    assert dict(vars(step)) == before, "what calls find out is in the cache"


def test_a_batch_of_another_structure_has_no_part_in_a_spec():
    step = step_of(Net, loss, EIGHT, {}, AGAIN)
    step.resolve(BATCH)
    refuses(lambda: step.resolve(BATCH | {"w": BATCH["x"]}), "the batch changed", "another train_step")


def test_a_spec_knows_the_passes_of_its_pipeline():
    spec = decide(Layers, loss, {"pipe": 2, "fsdp": 2}, PIPED, AGAIN)
    assert spec.passes and spec.schedule and spec.passes.forward == 3 and spec.passes.calls


def test_a_program_is_not_chosen_by_a_batch_that_cannot_be_split():
    refuses(lambda: decide(padded, loss, EIGHT, {}, {"accumulate": 4}), "dim 0", "size 16", "cannot be split")


# Of a scalar, where XLA sends more than `manual` would: model, mesh, options, what is named.
EXCESS = {
    "zero1": (Net, GROUPS, {"strategy": "zero1"}, AGAIN, "it sums over replica, fsdp in every microbatch"),
    "hybrid": (Net, GROUPS, {}, AGAIN, "it sums over replica in every microbatch"),
    "hybrid, one microbatch": (Net, GROUPS, {}, {}, "it sums whole gradients over replica"),
    "padded": (padded, EIGHT, {"shard_dim": lambda path, shape: len(shape) - 1}, {}, "up.kernel is padded"),
    "hfsdp": (Net, GROUPS, {"opt_over": ("replica", "fsdp")}, {}, "split finer than the parameter"),
    "tied": (Tied, EIGHT, {"units": ["up"]}, {}, "embed.embedding has several uses"),
    "chunked": (lambda rngs: Rooted(rngs, False), EIGHT, {"units": ["up"]}, {}, "forms the gradient of root itself"),
}


@pytest.fixture
def tiny_counts(monkeypatch):
    monkeypatch.setattr(resolve, "EXCESS_BYTES", 0)


@pytest.mark.usefixtures("tiny_counts")
@pytest.mark.parametrize("name", EXCESS)
def test_what_a_scalar_costs_is_said_once(name):
    source, mesh, options, config, words = EXCESS[name]
    step = step_of(source, scalar, mesh, options, config)
    with pytest.warns(UserWarning, match="jfsdp.Loss") as told:
        step.resolve(BATCH)
    assert words in str(told[0].message) and told[0].filename == __file__
    step.resolve(BATCH)
    assert len(told) == 1
    decide(source, scalar, mesh, options, config | {"program": "xla"})  # who asks for it knows


@pytest.mark.parametrize("hidden", [16, 1 << 16])
def test_a_few_bytes_more_are_not_worth_a_warning(hidden):
    step = step_of(lambda rngs: Net(rngs, hidden), scalar, EIGHT, {"strategy": "zero1"}, AGAIN)
    with warnings.catch_warnings() if hidden == 16 else warning("jfsdp.Loss"):
        warnings.simplefilter("error" if hidden == 16 else "always")
        step.resolve(BATCH)


@pytest.mark.usefixtures("tiny_counts")
def test_a_model_whose_state_depends_on_rows_is_not_told_to_return_a_loss():
    assert decide(Counted, scalar, GROUPS, {}, AGAIN).program == "xla"
    error = refuses(lambda: decide(Counted, scalar, EIGHT, {}, {"prefetch": 0}), "prefetch=0", "remove prefetch=0")
    assert "jfsdp.Loss" not in str(error)


@pytest.mark.usefixtures("tiny_counts")
def test_the_excess_is_that_of_the_list_of_movements():
    """Sums in each of two microbatches: 2 all-reduces of P for the gather and scatter of zero1's one."""
    step = step_of(Net, scalar, EIGHT, {"strategy": "zero1"}, AGAIN)
    with pytest.warns(UserWarning, match="up to 1.50 times"):
        step.resolve(BATCH)


def test_gathers_that_microbatches_share_are_no_excess():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(Net, scalar, EIGHT, {}, AGAIN | {"reshard_after_backward": False}).resolve(BATCH)


@pytest.mark.parametrize("weight", ["of rows", "of an array"])
@pytest.mark.parametrize("name", ["a sum", "padded", "tied", "hybrid", "asked: manual", "asked: xla", "flat"])
def test_a_loss_is_traced_at_most_three_times(name, weight):
    source, _, mesh, options, config, *_ = CASES[name]
    num = 0

    def counted(model, batch):
        nonlocal num
        num += 1
        found = loss(model, batch)
        return found if weight == "of rows" else found._replace(weight=(batch["x"] > -1).all(1).sum())

    model = fully_shard(source, mesh=jfsdp.make_mesh(**mesh), **{"units": ["up"], "min_size": 0} | options)
    step = model.train_step(counted, TX, accumulate=config.get("accumulate", 1), program=config.get("program"))
    step.trace(model.abstract_state(TX), BATCH)
    assert 1 <= num <= 3


def test_a_second_step_traces_nothing():
    num = []

    def counted(model, batch):
        num.append(1)
        return loss(model, batch)

    model = fully_shard(Net, mesh=jfsdp.make_mesh(), units=["up"])
    step, state = model.train_step(counted, TX, check_loss=False), model.init(TX)
    state, _ = step(state, BATCH)
    first = len(num)
    step(state, BATCH)
    assert first == len(num) <= 3
