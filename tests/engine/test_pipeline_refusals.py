"""What cannot be a pipeline is refused by name, with a remedy; and what a layer may carry and read is right.

The reference is plain JAX on one device, in float64. Microbatch a holds the rows b with b % A == a, as everywhere.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jfsdp
from tests import models_small
from tests.refusals import refuses
from tests.steps import fully_shard
from tests.thin import thin

LAYERS, VOCAB, DIM, ROWS, LENGTH = 4, 16, 8, 16, 5
pytestmark = [
    pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning"),
    pytest.mark.filterwarnings("ignore:.*draws from random keys that are not in the model's state"),
]


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def linear(rngs, dim_in=DIM, dim_out=DIM):
    return models_small.linear(dim_in, dim_out, rngs, param_dtype=jnp.float64, dtype=jnp.float64)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = linear(rngs, DIM, 2 * DIM), linear(rngs, 2 * DIM, DIM)

    def __call__(self, x, beside=0.0):
        return x + self.down(nnx.relu(self.up(x + beside)))


class Wider(Layer):
    def __call__(self, x, beside=0.0):
        return jnp.concatenate([x, super().__call__(x, beside)], 1)


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.turn, self.drop = linear(rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.turn(x))


def stack(kind, rngs, layers=LAYERS):
    return nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: kind(rngs), in_axes=0, out_axes=0))(rngs)


def scan(fn, carry, layers, *beside, **options):
    axes = (nnx.Carry, 0, *[None] * len(beside))
    return nnx.scan(fn, in_axes=axes, out_axes=nnx.Carry, **options)(carry, layers, *beside)


def plain(x, layers):
    return scan(lambda x, layer: layer(x), x, layers)


def straight(model, x, tokens):
    return plain(x, model.layers)


class Model(nnx.Module):
    """An embedding, a stack, a head; `run(model, x, tokens)` is what goes between."""

    def __init__(self, rngs, run=straight, kind: Any = Layer, layers=LAYERS):
        self.run = run
        self.embed = nnx.Param(4.0 * models_small.spread(rngs.params(), (VOCAB, DIM), jnp.float64))
        self.layers = stack(kind, rngs, layers)
        self.other, self.gain = linear(rngs), nnx.Param(1.1 * jnp.ones(DIM, jnp.float64))
        self.seen, self.head = nnx.Variable(jnp.zeros((), jnp.float64)), linear(rngs, DIM, VOCAB)

    def __call__(self, tokens):
        return self.head(self.run(self, self.embed[...][tokens], tokens))


class Listed(Model):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])


class Two(Model):
    def __init__(self, rngs, run):
        super().__init__(rngs, run)
        self.more = stack(Layer, rngs)


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return jfsdp.Loss(losses.sum(), jnp.float32(losses.size))


def make_batch(rows=ROWS):
    tokens, targets = np.random.default_rng(0).integers(0, VOCAB, (2, rows, LENGTH)).astype(np.int32)
    return {"tokens": tokens, "targets": targets}


def by_name(grads):
    return {
        jax.tree_util.keystr(path).removesuffix(".value"): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(grads)
    }


def make(factory: Any = Model, sizes=None, units=(Layer,), **options):
    sizes = sizes or {"pipe": 2}
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    return fully_shard(factory, mesh=mesh, units=list(units), min_size=4, **options)


def gradients(model, loss_fn=loss, accumulate=4, rows=ROWS, **step):
    fn = model.grads(loss_fn, accumulate=accumulate, check_loss=False, **step)
    _, grads, metrics = fn(model.init(optax.sgd(0.1)), make_batch(rows))
    return float(metrics["loss"]), by_name(grads)


def refused(model, *facts, loss_fn=loss, error: Any = ValueError, accumulate=4, **step):
    """Check that a step is refused before anything is made or compiled."""
    make_step = lambda: model.grads(loss_fn, accumulate=accumulate, check_loss=False, **step)  # noqa: E731
    refuses(lambda: make_step().resolve(make_batch()), *facts, error=error)


def wanted(factory, accumulate=4):
    graph, params, rest = nnx.split(factory(nnx.Rngs(0)), nnx.Param, ...)

    @jax.jit
    def total(params, rows):
        own = lambda: jax.tree.map(jnp.asarray, rest)  # noqa: E731 - variables of the inner trace may change
        grad = jax.value_and_grad(lambda params: loss(nnx.merge(graph, params, own()), rows).total)
        return grad(params)

    batch = make_batch()
    parts = [total(params, jax.tree.map(lambda x, a=a: x[a::accumulate], batch)) for a in range(accumulate)]
    value, grads = jax.tree.map(lambda *x: sum(x) / (ROWS * LENGTH), *parts)
    return float(value), by_name(grads)


def counted(model, x, _):
    x, num = scan(lambda c, layer: (layer(c[0]) * (1 + 0.1 * c[1]), c[1] + 1), (x, jnp.int32(0)), model.layers)
    return x * num


def summed(model, x, _):
    x, aux = scan(lambda c, layer: (layer(c[0]), c[1] + (c[0] ** 2).mean()), (x, 0.0), model.layers)
    return x * (1 + aux)


def from_beside(model, x, tokens):
    turn = jnp.cos(tokens * 1.0)[..., None]
    body = lambda c, layer, turn: (layer(c[0], turn) + c[1] * turn, 0.5 * c[1] + turn)  # noqa: E731
    x, last = scan(body, (x, turn), model.layers, turn)
    return x + last


def masked(model, x, tokens):
    body = lambda c, layer: (jnp.where(c[1], layer(c[0]), c[0]), c[1])  # noqa: E731
    return scan(body, (x, (tokens > 3)[..., None]), model.layers)[0]


def swapped(model, x, _):
    x, before = scan(lambda c, layer: (layer(c[0]), c[0]), (x, jnp.zeros_like(x)), model.layers)
    return x + before


def handing_on(model, x, _):
    gain = jnp.broadcast_to(model.gain[...], (x.shape[0], 1, DIM))
    return scan(lambda c, layer: (layer(c[0], c[1]), c[1] * 1.0), (x, gain), model.layers)[0]


def everything(model, x, tokens):
    """All of these at once, and a stack of the root's behind the layers."""

    def body(carry, layer, turn):
        x, num, beside, mask, _, gain = carry
        out = jnp.where(mask, layer(x, turn + gain) * (1 + 0.1 * num) + beside * turn, x)
        return out, num + 1, 0.5 * beside + turn, mask, x, gain * 1.0

    turn, gain = jnp.cos(tokens * 1.0)[..., None], jnp.broadcast_to(model.gain[...], (x.shape[0], 1, DIM))
    carry = x, jnp.int32(0), turn, (tokens > 3)[..., None], jnp.zeros_like(x), gain
    x, num, beside, _, before, _ = scan(body, carry, model.layers, turn)
    return plain(x * num + beside + before, model.more)


CARRIES = [counted, summed, from_beside, masked, swapped, handing_on]


@pytest.mark.parametrize("run", [everything, *(pytest.param(run, marks=pytest.mark.proof) for run in CARRIES)])
def test_whatever_layers_carry_is_exact(run):
    """Numbers, a mean, an array that layers read besides, a mask, a frozen weight: each stage has its own."""
    factory = functools.partial(Two, run=run)
    # A mean over the rows at hand couples those of a microbatch, of which each device has its own.
    sizes = {"pipe": 2, "fsdp": 1 if run is summed else 2}
    model = make(factory, sizes, [jfsdp.Unit("layers", stacked=1)], frozen=["gain"])
    mean, exact = wanted(factory)
    exact.pop("['gain']")
    check_exact(gradients(model, pipe_repeats=2), (mean, exact))


def check_exact(found, wanted):
    (value, grads), (mean, exact) = found, wanted
    assert value == pytest.approx(mean, rel=1e-6)
    assert grads.keys() == exact.keys()
    for name, grad in exact.items():
        assert np.abs(grads[name] - grad).max() < 1e-12 * max(np.abs(grad).max(), 1), name


class Router(nnx.Module):
    def __init__(self, rngs):
        self.scores = linear(rngs)

    def __call__(self, x):
        return self.scores(x)


class Routed(nnx.Module):
    """Two units, of which the one called last only counts: it has no backward."""

    def __init__(self, rngs):
        self.layer, self.router = Layer(rngs), Router(rngs)

    def __call__(self, carry):
        x, seen = carry
        x = self.layer(x)
        return x, seen + (self.router(x) > 0).sum((1, 2))


def routed(model, x, _):
    x, seen = scan(lambda carry, layer: layer(carry), (x, jnp.zeros(x.shape[0], jnp.int64)), model.layers)
    return x * (1 + 0.01 * seen[:, None, None])


_, A, B = -1, 0, 1
ONE_AT_A_TIME = jfsdp.Schedule(
    [[A, _], [_, A], [_, _], [B, _], [_, B], [_, _]], [[_, _], [_, A], [A, _], [_, _], [_, B], [B, _]]
)
BEGUN_LATE = jfsdp.Schedule([[_, _], [B, _], [A, B], [_, A], [_, _]], [[_, _], [_, _], [_, B], [B, A], [A, _]])


@pytest.mark.parametrize("schedule", thin([BEGUN_LATE, ONE_AT_A_TIME, "1f1b"], 3))
def test_a_last_unit_without_a_backward_gives_its_weights_to_no_other(schedule):
    """Also in ticks in which no stage goes forward."""
    factory = functools.partial(Model, run=routed, kind=Routed)
    model = make(factory, {"pipe": 2, "fsdp": 2}, [Layer, Router])
    check_exact(gradients(model, accumulate=2, pipe_schedule=schedule), wanted(factory, 2))


@pytest.mark.parametrize("step", [pytest.param({}, marks=pytest.mark.proof), {"pipe_repeats": 2}])
def test_dropout_inside_layers_draws_the_masks_of_the_same_data_shards(step):
    factory = functools.partial(Model, kind=Dropping)
    value, grads = gradients(make(factory, {"pipe": 2, "fsdp": 2}, [Dropping]), **step)
    alone, same = gradients(make(factory, {"fsdp": 2}, [Dropping], program="manual"))
    assert value == pytest.approx(alone, rel=1e-6)
    for name, grad in same.items():
        assert np.abs(grads[name] - grad).max() < 1e-12, name


def with_all(model, x, _):
    run = nnx.scan(lambda x, layer: (layer(x),) * 2, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    x, every = run(x, model.layers)
    return x + every[1]


def with_keys(model, x, _):
    body = lambda c, layer: (layer(c[0]), jax.random.split(c[1])[0])  # noqa: E731
    return scan(body, (x, jax.random.key(0)), model.layers)[0]


def with_other(model, x, _):
    return scan(lambda x, layer, other: other(layer(x)), x, model.layers, model.other)


def with_gain(model, x, _):
    return scan(lambda x, layer, gain: layer(x, gain), x, model.layers, model.gain[...])


def around_remat(model, x, _):
    return nnx.remat(lambda layers, x: plain(x, layers))(model.layers, x)


def inside_remat(model, x, _):
    return scan(nnx.remat(lambda x, layer: layer(x)), x, model.layers)


def backwards(model, x, _):
    return scan(lambda x, layer: layer(x), x, model.layers, reverse=True)


def some(model, x, _):
    graph, params = nnx.split(model.layers)
    return plain(x, nnx.merge(graph, jax.tree.map(lambda x: x[::-1], params)))


def again_and_again(model, x, _):
    run = nnx.scan(lambda x, _, layers: plain(x, layers), in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
    return run(x, jnp.arange(2), model.layers)


def twice(model, x, _):
    return plain(plain(x, model.layers), model.layers)


def both(model, x, _):
    return plain(plain(x, model.layers), model.more)


class Printing(Layer):
    def __call__(self, x, beside=0.0):
        jax.debug.print("{x}", x=x.sum())
        return super().__call__(x, beside)


def printing(model, x, _):
    jax.debug.callback(print, x.sum())
    return plain(x, model.layers)


def one_by_one(model, x, _):
    graph, params = nnx.split(model.layers)
    for place in range(LAYERS):
        x = nnx.merge(graph, jax.tree.map(lambda x, at=place: x[at], params))(x)
    return x


def watching(model, x, _):
    model.seen[...] = model.seen[...] + jnp.abs(model.gain[...]).sum()
    return plain(x, model.layers)


@pytest.mark.parametrize(
    ("run", "facts"),
    [
        (with_all, ("'pipe'", "carry")),
        (with_keys, ("random key", "separate key")),
        (with_gain, ("shape (8,)", "depends on weights", "put it into the carry")),
        (with_other, ("shape (8,)", "depends on weights")),
        (around_remat, ("around the scan over 'layers'", "remat=")),
        (inside_remat, ("inside the scan over 'layers'", "remat=")),
        (backwards, ("'layers'", "in reverse")),
        (one_by_one, ("'layers'", "one by one", "scan over them")),
        (some, ("'layers'", "modified layers")),
        (again_and_again, ("'layers'", "inside of scan")),
        (twice, ("2 scans", "'layers'", "axis 'pipe'")),
        (lambda model, x, _: x, ("'layers'", "units=")),
        (watching, ("gain", "other state")),
    ],
)
def test_a_model_that_is_no_pipeline_is_refused_by_name(run, facts):
    refused(make(functools.partial(Model, run=run)), *facts)


def staged(x):
    return jax.lax.with_sharding_constraint(x, PartitionSpec(PartitionSpec.UNCONSTRAINED, None, "pipe"))


class Stating(Layer):
    def __call__(self, x, beside=0.0):
        return staged(super().__call__(x, beside))


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda model, x, _: plain(staged(x), model.layers), Layer),
        (lambda model, x, _: staged(plain(x, model.layers)), Layer),
        (straight, Stating),
    ],
)
def test_a_model_that_states_a_sharding_over_the_stages_is_refused_with_what_to_state_instead(run, kind):
    model = make(functools.partial(Model, run=run, kind=kind), units=[kind])
    refused(model, "'pipe'", "size 2", "placements=", "PartitionSpec")


def test_a_frozen_weight_that_all_layers_read_is_refused():
    refused(make(functools.partial(Model, run=with_gain), frozen=["gain"]), "trained or frozen", "carry")


def test_a_model_may_state_a_sharding_over_stages_that_its_mesh_does_not_have():
    options = {"program": "manual", "cuts": {"layers.up.kernel": (-1, "tensor")}}
    model = make(functools.partial(Model, kind=Stating), {"fsdp": 2, "tensor": 2}, [Stating], **options)
    model.grads(loss, accumulate=4).resolve(make_batch())


@pytest.mark.parametrize(("run", "kind"), [(straight, Printing), (printing, Layer)])
def test_a_model_that_prints_is_refused_by_name(run, kind):
    """Stages without work would print too; and what comes before the layers is computed more than once."""
    refused(make(functools.partial(Model, run=run, kind=kind), units=[kind]), "jax.debug.print")


def test_a_unit_that_all_layers_share_and_a_second_stack_scanned_or_not_are_refused_by_name():
    class Other(nnx.Linear):
        pass

    def factory(rngs):
        model = Model(rngs, with_other)
        model.other = Other(DIM, DIM, rngs=rngs)
        return model

    refused(make(factory, units=[Layer, Other]), "'other'")
    refused(make(functools.partial(Two, run=both)), "2", "'layers'", "'more'")

    def run(model, x, tokens):
        return scan(lambda x, layer: layer(x), plain(x, model.layers), model.more, reverse=True)

    refused(make(functools.partial(Two, run=run)), "'more'", "'layers'")


def averaging(model, x, tokens):
    model.seen[...] = 0.9 * model.seen[...] + 0.1 * tokens.mean()
    return plain(x, model.layers)


def mean(model, batch):
    found = loss(model, batch)
    return found.total / found.weight


def test_a_mean_and_statistics_of_rows_are_right_where_one_data_shard_has_all_rows():
    model, batch, seen = make(functools.partial(Model, run=averaging)), make_batch(), 0.0
    state, grads, metrics = model.grads(mean, accumulate=4)(model.init(optax.sgd(0.1)), batch)
    check_exact((float(metrics["loss"]), by_name(grads)), wanted(Model))
    for place in range(4):
        seen = 0.9 * seen + 0.1 * batch["tokens"][place::4].mean()
    assert float(state.model_state["seen"]) == pytest.approx(seen, rel=1e-6)


class Tabled(Model):
    def __init__(self, rngs):
        super().__init__(rngs, looked_up)
        self.table = nnx.Variable(jnp.cos(jnp.arange(2.0**16)))


def looked_up(model, x, tokens):
    model.seen[...] += 1
    beside = model.table[...][tokens * 1000][..., None]
    return scan(lambda x, layer, beside: layer(x, beside), x, model.layers, beside)


def test_state_that_no_microbatch_changes_is_there_once():
    model, tx = make(Tabled, {"pipe": 2, "fsdp": 2}), optax.sgd(0.1)
    state, step = model.abstract_state(tx), model.train_step(loss, tx, accumulate=4, check_loss=False)
    memory = step.lower(state, make_batch()).compile().memory_analysis()
    assert memory.temp_size_in_bytes < state.model_state["table"].size * 8


@pytest.mark.parametrize(
    ("run", "loss_fn", "facts"),
    [
        (averaging, loss, ("seen", "rows")),
        (straight, mean, ("scalar", "jfsdp.Loss")),
    ],
)
def test_a_mean_and_statistics_of_rows_are_refused_where_data_shards_have_rows_of_their_own(run, loss_fn, facts):
    refused(make(functools.partial(Model, run=run), {"pipe": 2, "fsdp": 2}), *facts, loss_fn=loss_fn)


def test_a_weight_of_the_layers_outside_of_their_units_is_refused_by_name():
    class Up(nnx.Linear):
        pass

    class Partly(Layer):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.up = Up(DIM, 2 * DIM, rngs=rngs, param_dtype=jnp.float64, dtype=jnp.float64)

    refused(make(functools.partial(Model, kind=Partly), units=[Up]), "layers.down", "units=")


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"factory": functools.partial(Model, layers=6), "sizes": {"pipe": 4}}, ("6 layers", "'layers'")),
        ({"factory": Listed}, ("layers", "list", "nnx.vmap", "nn.scan")),
        ({"remat": jfsdp.SaveNames(save=("a",), offload=("b", "c"))}, ("'layers'", "b, c", "host memory")),
        ({"storage": "flat"}, ("storage='flat'", "storage='per_parameter'")),
        ({"units": []}, ("units",)),
        ({"program": "xla"}, ("'pipe'", "size 2", "program='xla'", "program='manual'")),
        ({"cuts": {"layers.up.kernel": (-1, "pipe")}}, ("layers.up.kernel", "'pipe'")),
        ({"remat": ("nothing",)}, ("remat", "nothing")),
    ],
)
def test_a_layout_that_is_no_pipeline_is_refused_by_name(given, facts):
    refuses(lambda: make(**given).grads(loss, accumulate=4).resolve(make_batch()), *facts)


@pytest.mark.parametrize(
    ("step", "facts"),
    [
        ({"pipe_repeats": 3}, ("4 layers", "pipe_repeats=3", "2 stages", "6")),
        ({"pipe_repeats": 2, "accumulate": 3}, ("accumulate=3", "take 4", "pipe_repeats=1")),
        ({"pipe_repeats": 0}, ("pipe_repeats=0", "at least 1")),
        ({"pipe_schedule": "zb"}, ("pipe_schedule='zb'", "1f1b", "gpipe")),
    ],
)
def test_a_step_that_is_no_pipeline_is_refused_by_name(step, facts):
    refused(make(), *facts, **step)


def test_a_schedule_of_another_type_is_refused():
    refused(make(), "pipe_schedule=None", error=TypeError, pipe_schedule=None)


@pytest.mark.parametrize("step", [{"pipe_schedule": "gpipe"}, {"pipe_repeats": 2}, {"pipe_schedule": "zb"}])
def test_a_schedule_without_a_pipeline_is_refused_by_name(step):
    refused(make(sizes={"fsdp": 2}), "make_mesh(pipe=P)", **step)


def test_a_carry_that_changes_its_shape_is_jaxs_own_error_and_names_both():
    model = make(functools.partial(Model, kind=Wider), units=[Wider])
    refused(model, "float64[4,5,8]", "float64[4,10,8]", error=TypeError)
