"""Losses and metrics are those of one device whichever way a step runs, or the step says that they would not be."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jfsdp
from jfsdp.train.step.loss import numbers
from jfsdp.train.step.loss_check import allowed_error, same_bits
from tests.models_small import Lookup, linear, make_batches, token_loss
from tests.refusals import refuses
from tests.steps import fully_shard
from tests.thin import thin

TX = optax.sgd(0.0)


class Net(nnx.Module):
    def __init__(self, rngs, hidden=16):
        self.up, self.down = linear(8, hidden, rngs), linear(hidden, 8, rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Padded(Net):
    def __init__(self, rngs):
        super().__init__(rngs, hidden=12)


ONCE = {"accumulate": 2, "sync": "last"}
FOUR = jfsdp.make_mesh(replica=2, fsdp=2, devices=jax.devices()[:4])
# What is sharded and how, and whether a scalar is refused.
WAYS = {
    "full_shard": (Net, {}, {}, False),
    "padding": (Padded, {}, {}, False),
    "hfsdp": (Net, {"opt_over": ("replica", "fsdp")}, {}, False),
    "zero1 in microbatches": (Net, {"strategy": "zero1"}, {"accumulate": 2}, False),
    "reduced once": (Net, {"strategy": "ddp"}, ONCE, True),
    "kept whole, reduced once": (Net, {}, ONCE | {"reshard_after_backward": False}, True),
    "manual": (Net, {}, {"program": "manual"}, True),
    "flat": (Net, {"storage": "flat"}, {"accumulate": 2}, True),
}


# The others repeat these ways for other layouts.
QUICK = ("full_shard", "zero1 in microbatches", "reduced once", "flat")


def step_for(way, loss, **extra):
    source, options, steps = WAYS[way][:3]
    model = fully_shard(source, mesh=FOUR, units=["up"], min_size=1, **options)
    return model.train_step(loss, TX, **steps, **extra), model.init(TX)


def reference_mean(way, loss):
    """Total over weight on one device, over the same microbatches."""
    num = WAYS[way][2].get("accumulate", 1)
    model = WAYS[way][0](nnx.Rngs(jax.random.key(0)))
    parts = [loss(model, jax.tree.map(lambda x, part=part: x[part::num], BATCH)) for part in range(num)]
    return sum(float(part.total) for part in parts) / sum(float(part.weight) for part in parts)


RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 8)).astype(np.float32),
    "w": (np.arange(16) * 7 % 16 / 16).astype(np.float32),
}


def contrastive(model, batch):
    z = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z)))
    return jfsdp.Loss(losses.sum(), jnp.float32(len(z)))


def batch_norm(model, batch):
    z = model(batch["x"])
    z = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5)
    return jfsdp.Loss(((z - batch["x"]) ** 2).sum(), jnp.float32(z.size))


def balanced(model, batch):
    """As in a mixture of experts: the share of rows of each expert times its mean gate."""
    gates = jax.nn.softmax(model(batch["x"]))
    chosen = jax.nn.one_hot(gates.argmax(-1), gates.shape[-1])
    balance = (chosen.mean(0) * gates.mean(0)).sum()
    return jfsdp.Loss((gates**2).sum() + 0.01 * balance * len(gates), jnp.float32(len(gates)))


def masked(model, batch):
    """A sum over rows; as a scalar a mean in which rows weigh differently."""
    return jfsdp.Loss((model(batch["x"]) ** 2).sum(-1) @ batch["w"], batch["w"].sum())


def advantages(model, batch):
    """As in PPO: at the first weights every ratio is 1, so that the coupled term is 0 over any rows."""
    out = model(batch["x"])
    ratio = jnp.exp(out[:, 0] - batch["old"])
    return jfsdp.Loss((ratio * (batch["w"] - batch["w"].mean()) + out[:, 1] ** 2).sum(), 1.0 * len(out))


def refused(step, state, *facts, error=ValueError, batch=None):
    refuses(lambda: step(state, BATCH if batch is None else batch), *facts, error=error)


def scalar(loss):
    def mean(model, batch):
        found = loss(model, batch)
        return found.total / found.weight

    return mean


def test_a_weight_of_the_whole_batch_is_not_counted_in_every_microbatch():
    model = fully_shard(Net)
    mine = lambda model, batch: jfsdp.Loss((model(batch["x"]) ** 2).sum(), 16.0)  # noqa: E731
    refuses(lambda: model.train_step(mine, TX)(model.init(TX), BATCH), "weight", "16 for any number of rows", "mean")
    mean = lambda model, batch: (model(batch["x"]) ** 2).mean()  # noqa: E731
    ones, twos = (model.train_step(mean, TX, accumulate=num)(model.init(TX), BATCH)[1] for num in (1, 2))
    np.testing.assert_allclose(ones["loss"], twos["loss"], rtol=1e-5)


# The scalars with the tests are those of one way under each program.
LOSSES = [
    *((way, contrastive, is_scalar, way in QUICK and not is_scalar) for way in WAYS for is_scalar in (False, True)),
    ("full_shard", batch_norm, False, False),
    ("full_shard", batch_norm, True, True),
    *(("manual", loss, is_scalar, loss is masked) for loss in (balanced, masked) for is_scalar in (False, True)),
]


@pytest.mark.parametrize(
    ("way", "loss", "is_scalar"), [pytest.param(*x, marks=[pytest.mark.proof] * (not quick)) for *x, quick in LOSSES]
)
def test_a_loss_is_that_of_one_device_or_is_refused(way, loss, is_scalar):
    is_coupled = is_scalar or loss is not masked
    step, state = step_for(way, scalar(loss) if is_scalar else loss)
    if is_coupled and (WAYS[way][3] or not is_scalar):
        facts = (
            ("the loss is a scalar", "jfsdp.Loss(total, weight)") if is_scalar else ("for all rows", "return mean, aux")
        )
        refuses(lambda: step(state, BATCH), *facts)
        return
    _, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], reference_mean(way, loss), rtol=1e-5)


@pytest.mark.parametrize("way", ["full_shard", "manual"])
def test_a_coupled_loss_is_refused_whose_value_agrees_at_the_first_weights(way):
    batch = BATCH | {"old": np.asarray(Net(nnx.Rngs(jax.random.key(0)))(BATCH["x"])[:, 0])}
    step, state = step_for(way, advantages)
    refused(step, state, "changed a little", batch=batch)


def test_what_a_refusal_advises_gives_the_number_of_one_device():
    step, state = step_for("full_shard", contrastive)
    refused(step, state, "return the scalar mean", "return mean, aux")
    with_metrics = lambda *given: (scalar(contrastive)(*given), {"half": 0.5})  # noqa: E731
    _, metrics = step_for("full_shard", with_metrics)[0](state, BATCH)  # the state is still there: it was not donated
    np.testing.assert_allclose(metrics["loss"], reference_mean("full_shard", contrastive), rtol=1e-5)
    refused(*step_for("manual", scalar(masked)), "return jfsdp.Loss(total, weight)")


def test_a_loss_is_compared_once_and_only_if_asked():
    seen = []

    def counted(model, batch):
        seen.append(len(batch["x"]))
        return masked(model, batch)

    step, state = step_for("full_shard", counted)
    state, _ = step(state, BATCH)
    compared = len(seen)
    step(state, BATCH)
    assert len(seen) == compared
    seen.clear()
    unchecked, state = step_for("full_shard", counted, check_loss=False)
    unchecked(state, BATCH)
    assert len(seen) < compared


def test_a_scalar_is_refused_whether_or_not_losses_are_compared():
    step, state = step_for("manual", scalar(masked), check_loss=False)
    refused(step, state, "the loss is a scalar", "use program='xla'")


@pytest.mark.parametrize("value", [np.float32(2.0), np.nan], ids=str)
def test_a_weight_that_does_not_add_up_is_refused_by_name(value):
    def loss(model, batch):
        found = masked(model, batch)
        return found._replace(weight=found.weight + value * (1 + 0 * found.weight))

    step, state = step_for("full_shard", loss)
    with pytest.raises(ValueError, match="weight") if np.isfinite(value) else contextlib.nullcontext():
        step(state, BATCH)


# Metrics.


def metrics_of(model, batch):
    z = model(batch["x"])
    squares = (z**2).sum(-1)
    aux = {
        "sum": squares.sum(),
        "largest": jfsdp.Max((-jnp.abs(z)).max()),  # below 0
        "mean": jfsdp.Mean(z.sum(), z.size),
        "rare": jfsdp.Mean((squares * (batch["w"] > 0.9)).sum(), (batch["w"] > 0.9).sum()),
        "never": jfsdp.Mean(0.0, (batch["w"] > 2).sum()),
        "each": jfsdp.Mean(z.sum(0), z.shape[0]),
        "largest of each": jfsdp.Max(z.max(0)),
    }
    return jfsdp.Loss(squares @ batch["w"], batch["w"].sum(), aux)


@pytest.mark.parametrize("way", [pytest.param(w, marks=() if w in QUICK else pytest.mark.proof) for w in WAYS])
def test_sums_maxima_and_means_are_those_of_one_device(way):
    step, state = step_for(way, metrics_of, check_loss=way == "flat")
    _, metrics = step(state, BATCH)
    wanted = metrics_of(WAYS[way][0](nnx.Rngs(jax.random.key(0))), BATCH).aux or {}
    expected = {
        "sum": wanted["sum"] / BATCH["w"].sum(),
        "largest": wanted["largest"].maximum,
        "mean": wanted["mean"].total / wanted["mean"].weight,
        "rare": wanted["rare"].total / wanted["rare"].weight,
        "never": 0.0,
        "each": wanted["each"].total / wanted["each"].weight,
        "largest of each": wanted["largest of each"].maximum,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("way", "value", "place"),
    [
        ("manual", lambda z: z.max(), "jfsdp.Max"),
        ("full_shard", lambda z: z.mean(), "jfsdp.Mean"),
        ("manual", lambda z: jfsdp.Mean(z.sum(), 3.0), ".weight"),
        ("full_shard", lambda z: jfsdp.Max(jnp.stack([z.max(), z.mean()])), ".maximum.1"),
        ("manual", lambda z: jfsdp.Max(z.max(-1)), ".maximum"),
    ],
)
def test_a_metric_that_does_not_add_up_is_refused_by_name(way, value, place):
    def loss(model, batch):
        return masked(model, batch)._replace(aux={"x": value(model(batch["x"]))})

    refused(*step_for(way, loss), "aux['x']", place)


def test_metrics_of_arrays_are_logged_by_their_places():
    found = numbers({"loss": jnp.float32(2.0), "load": jnp.array([1.0, 3.0])})
    assert found == {"loss": 2.0, "load.0": 1.0, "load.1": 3.0}


def test_maxima_and_means_need_no_import_of_jfsdp():
    class Peak:
        maximum = 3.0

    class Share:
        total, weight = 2.0, 4.0

    class Sums:
        total, weight, aux = 1.0, 1.0, {"peak": Peak(), "share": Share()}

    found = jfsdp.train.step.loss.as_loss(Sums()).aux
    assert isinstance(found["peak"], jfsdp.Max) and isinstance(found["share"], jfsdp.Mean)


# Dropout: masks differ between the rows of one device and those of all, and are no difference.


class Dropped(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.up = nnx.Linear(8, 16, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


class LinenDropped(linen.Module):
    dtype: object = jnp.float32

    @linen.compact
    def __call__(self, x, train=True):
        x = linen.relu(linen.Dense(16, dtype=self.dtype)(x))
        return linen.Dense(8, dtype=self.dtype)(linen.Dropout(0.5)(x, deterministic=not train))


@pytest.mark.parametrize(
    ("api", "dtype", "loss"),
    thin(
        [
            ("nnx", jnp.float32, masked),
            ("nnx", jnp.float32, contrastive),
            ("linen", jnp.float32, contrastive),
            ("linen", jnp.float32, masked),
            ("linen", jnp.bfloat16, masked),
            ("linen", jnp.bfloat16, contrastive),
            ("nnx", jnp.bfloat16, contrastive),
            ("nnx", jnp.bfloat16, masked),
        ],
        3,
    ),
)
def test_dropout_neither_hides_a_coupled_loss_nor_looks_like_one(api, dtype, loss):
    linen_source = LinenDropped(dtype), (jax.ShapeDtypeStruct((1, 8), "float32"),)
    source = (lambda rngs: Dropped(rngs, dtype)) if api == "nnx" else linen_source
    mesh, units = FOUR, ["*own*"] if api == "nnx" else [linen.Dense]
    model = fully_shard(source, mesh=mesh, units=units, program="manual")
    step = model.train_step(loss, TX)
    if loss is masked:
        step(model.init(TX), BATCH)
    else:
        refused(step, model.init(TX), "over 4 devices")


def test_draws_from_a_key_of_the_models_own_are_told_and_not_refused():
    def noisy(model, batch):
        found = masked(model, batch)
        return found._replace(total=found.total + jax.random.normal(jax.random.key(0), batch["w"].shape).sum())

    model = jfsdp.fully_shard(Net)
    step = model.train_step(noisy, TX, program="xla", accumulate=2)
    with pytest.warns(UserWarning, match="draws from random keys"):
        step(model.init(TX), BATCH)


def test_every_draw_of_the_check_is_the_same():
    key = jax.random.split(same_bits(jax.random.key(3)), 2)[1]
    for draw in (jax.random.uniform, jax.random.normal):
        few, many = draw(key, (3,)), draw(jax.random.fold_in(key, 7), (5, 2), jnp.float32)
        assert len(np.unique(np.concatenate([few, many.ravel()]))) == 1 and np.isfinite(few).all()
    assert bool(jax.random.bernoulli(key, 0.5)) and not bool(jax.random.bernoulli(key, 0.1))


def test_what_a_dtype_explains_is_less_than_what_a_balance_of_experts_changes():
    assert allowed_error([np.dtype("float32")], "cpu") < 1e-5
    assert allowed_error([np.dtype("float32"), jnp.dtype("bfloat16")], "cpu") < 0.05
    assert allowed_error([np.dtype("float32")], "cpu") < allowed_error([np.dtype("float32")], "gpu") < 0.01


def test_an_offloaded_float16_step_in_microbatches_is_compared_unscaled():
    policy = jfsdp.MixedPrecisionPolicy("float16")
    offloaded = jfsdp.OffloadPolicy(params=True)
    model = fully_shard(Lookup, mesh=FOUR, min_size=1, mp_policy=policy, offload_policy=offloaded)
    coupled = lambda model, batch: contrastive(lambda x: model(x).mean(1), {"x": batch["tokens"]})  # noqa: E731
    batch = make_batches(1)[0]
    refused(model.train_step(coupled, TX, accumulate=2), model.init(TX), "for all rows", batch=batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_step(token_loss, TX, accumulate=2)(model.init(TX), batch)


def in_microbatches(loss, source=Net, mesh=None, num=2, **steps):
    model = fully_shard(source, mesh=mesh, program="xla", min_size=1)
    batch = BATCH | {"old": np.asarray(Net(nnx.Rngs(jax.random.key(0)))(BATCH["x"])[:, 0])}
    return model.train_step(loss, TX, accumulate=num, **steps)(model.init(TX), batch)[1]


@pytest.mark.parametrize("loss", thin([contrastive, batch_norm, balanced, advantages], 3))
def test_a_loss_that_is_not_the_sum_of_its_microbatches_is_refused_in_program_xla_too(loss):
    facts = "two microbatches together", "one after the other", "the loss is the mean over them"
    refuses(lambda: in_microbatches(loss), *facts)
    if loss is contrastive:
        one = jfsdp.make_mesh(fsdp=1, devices=jax.devices()[:1])  # one data shard, which sees all rows
        refuses(lambda: in_microbatches(loss, mesh=one, num=4), facts[0])


def test_a_mean_with_a_guard_is_accepted_in_microbatches():
    guarded = lambda *given: jfsdp.Loss(scalar(masked)(*given), 1.0 * (given[1]["w"].sum() > 0))  # noqa: E731
    model, parts = Net(nnx.Rngs(jax.random.key(0))), [jax.tree.map(lambda x, at=at: x[at::2], BATCH) for at in (0, 1)]
    wanted = np.mean([scalar(masked)(model, part) for part in parts])
    np.testing.assert_allclose(in_microbatches(guarded)["loss"], wanted, rtol=1e-5)


class Normed(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(self.norm(x)))


def test_batch_statistics_in_microbatches_are_accepted():
    in_microbatches(masked, Normed)


class Routed(nnx.Module):
    """A unit that returns its gates, and how many rows chose the first expert."""

    def __init__(self, rngs):
        self.gate = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        gates = jax.nn.softmax(self.gate(x))
        return x * gates, gates, (gates.argmax(-1) == 0).sum().astype(jnp.float32)


class Router(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Routed(rngs)])

    def __call__(self, x):
        return self.layers[0](x)


def weighed(weigh):
    def loss(model, batch):
        out, gates, count = model(batch["x"])
        return jfsdp.Loss((out**2).sum(), weigh(gates, count))

    return loss


def looped(gates):
    """Sums in a scan, in a jit, as in a model."""
    return jax.jit(lambda gates: jax.lax.scan(lambda sum, row: (sum + row[0], None), 0.0, gates)[0])(gates)


# Of the weight, whether it has a derivative by the gate.
WEIGHTS = {
    "a sum of gates": (lambda gates, count: gates[:, 0].sum(), True),
    "in a loop": (lambda gates, count: looped(gates), True),
    "rows and gates": (lambda gates, count: len(gates) + 1e-3 * gates.mean(), True),
    "stopped": (lambda gates, count: jax.lax.stop_gradient(gates[:, 0].sum()), False),
    "stopped before the loop": (lambda gates, count: looped(jax.lax.stop_gradient(gates)), False),
    "comparisons": (lambda gates, count: (gates > 0.1).sum(), False),
    "chosen": (lambda gates, count: jax.nn.one_hot(gates.argmax(-1), 8)[:, 1:].sum(), False),
    "top": (lambda gates, count: (jax.lax.top_k(gates, 2)[1] > 3).sum().astype(jnp.float32) + 1, False),
    "counted in the unit": (lambda gates, count: count, False),
    "rounded": (lambda gates, count: jnp.ceil(gates).sum(), False),
    "a condition": (lambda gates, count: jax.lax.cond(gates.sum() > 0, lambda: 1.0, lambda: 2.0) * len(gates), False),
}


@pytest.mark.parametrize("options", [{}, {"units": [Routed], "program": "manual"}], ids=["xla", "manual, a unit"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_with_a_derivative_is_refused_by_name(kind, options):
    weigh, has_derivative = WEIGHTS[kind]
    model = fully_shard(Router, min_size=1, **options)
    step, state = model.train_step(weighed(weigh), TX, accumulate=2), model.abstract_state(TX)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    if has_derivative:
        refuses(lambda: step.trace(state, batch), "weight of the loss", "layers.0.gate.", "stop_gradient")
    else:
        step.trace(state, batch)


def test_a_weight_may_depend_on_what_is_frozen():
    model = fully_shard(lambda rngs: nnx.Sequential(Net(rngs), Router(rngs)), frozen=["layers.1.**"], min_size=1)
    loss = lambda model, x: jfsdp.Loss((model.layers[0](x) ** 2).sum(), model.layers[1](x)[1][:, 0].sum())  # noqa: E731
    model.train_step(loss, TX).trace(model.abstract_state(TX), jax.ShapeDtypeStruct((16, 8), jnp.float32))
