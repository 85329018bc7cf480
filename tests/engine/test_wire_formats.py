"""Wire formats: steps against one device that rounds the same weights, and the same partial sums of gradients."""

import functools
import itertools
import math

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.lint import LayoutWarning
from tests.models_small import Block, Tower, make_batches, token_loss
from tests.sharding import fully_shard

pytestmark = pytest.mark.filterwarnings(f"ignore::{LayoutWarning.__module__}.LayoutWarning")
DIM, LAYERS = 32, 4


def power_of_two(amax, top):
    """The smallest power of two by which amax is divided to at most `top`, in exact arithmetic."""
    power = 2.0 ** np.ceil(np.log2(np.where(amax == 0, top, amax).astype(np.float64) / top))
    return np.where(amax == 0, 1, power)


def round_float8(x, dims):
    scale = power_of_two(np.abs(x).max(dims, keepdims=True), 448)
    return ((x / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).astype(x.dtype)


def round_int8(x, block):
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    scale = np.abs(blocks).max(-1, keepdims=True).astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = np.clip(np.round(blocks / np.where(scale == 0, 1, scale) * 127), -127, 127)
    return (codes / np.float32(127) * scale).reshape(x.shape).astype(x.dtype)


def rounded_weights(params, how):
    """Round the matrices of the blocks, each layer separately."""
    if how is None:
        return params
    round_one = {"float8": lambda x: round_float8(x, (-2, -1)), "int8": lambda x: round_int8(x, 32)}[how]
    is_matrix = lambda path: path[0].key == "blocks" and path[-1].key == "kernel"  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, x: round_one(np.asarray(x)) if is_matrix(path) else x, params)


class Reference:
    """The tower on one device with plain Flax."""

    def __init__(self):
        self.graph, params, self.rest = nnx.split(tower(nnx.Rngs(0)), nnx.Param, ...)
        self.params = nnx.to_pure_dict(params)

        def total(params, batch):
            return token_loss(nnx.merge(self.graph, params, self.rest), batch).total

        self.grad = jax.jit(jax.value_and_grad(total))

    def sums(self, params, batch, rows=slice(None)):
        part = jax.tree.map(lambda x: x[rows], batch)
        return jax.tree.map(np.asarray, self.grad(params, part))


def tower(rngs):
    return uneven(Tower(rngs, dim=DIM, num_layers=LAYERS), "blocks")


def uneven(model, name):
    """Give the rows of a kernel very different sizes, so that every shard would have a scale of its own."""
    kernel = getattr(model, name).up.kernel
    kernel[...] *= np.exp2(-(np.arange(DIM) // 4))[:, None].astype(np.float32)
    return model


def flat(tree):
    return {".".join(str(key.key) for key in path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def shard(sizes, strategy="full_shard", *, gather=None, reduce=None, **options):
    mesh = jfsdp.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    policy = jfsdp.MixedPrecisionPolicy(gather_wire=gather, reduce_wire=reduce)
    return fully_shard(tower, mesh=mesh, strategy=strategy, units=[Block], mp_policy=policy, **options)


def gradients(model, batch, **options):
    """Return one step's loss, gradients by name without padding, and metrics."""
    step = model.grads(token_loss, **options)
    _, grads, metrics = step(model.init(optax.sgd(0.1)), batch)
    shapes = {leaf.path: tuple(map(slice, leaf.shape)) for leaf in model.layout.leaves}
    found = flat(nnx.to_pure_dict(grads))
    return {path: np.asarray(x)[shapes[path]] for path, x in found.items()}, jax.device_get(metrics)


def distances(found, expected):
    """Return by name the differences between gradients, in units of the largest element."""
    return {path: np.abs(found[path] - x) / np.abs(x).max() for path, x in expected.items()}


@pytest.fixture(scope="module")
def reference():
    return Reference()


@functools.cache
def one_batch():
    return make_batches(1)[0]


CUT = {"cuts": {"**.up.kernel": (1, "tensor"), "**.down.kernel": (0, "tensor")}}
GATHERS = [
    ({"fsdp": 1}, "full_shard", "float8", {}, {}),
    ({"fsdp": 8}, "full_shard", "float8", {}, {"program": "xla"}),
    ({"fsdp": 3}, "full_shard", "float8", {}, {}),
    ({"replica": 2, "fsdp": 4}, "full_shard", "int8:32", {}, {"accumulate": 2}),
    ({"fsdp": 8}, "full_shard", "float8@2", {}, {}),
    ({"fsdp": 8}, "full_shard", "float8", {"reshard_after_forward": 4}, {}),
    ({"fsdp": 4}, "zero1", "float8", {}, {"accumulate": 2}),
    ({"fsdp": 2, "tensor": 2}, "full_shard", "int8:32", CUT, {"accumulate": 2}),
    ({"fsdp": 2, "pipe": 2}, "full_shard", "int8:32", {"reshard_after_forward": 1}, {"accumulate": 2}),
]
GATHERS += [  # in the proofs
    pytest.param(*row, marks=pytest.mark.proof)
    for row in [
        ({"fsdp": 1}, "full_shard", "int8:32", {}, {"accumulate": 2}),
        ({"fsdp": 4}, "full_shard", "int8:32", {}, {"program": "xla", "accumulate": 2}),
        ({"replica": 2, "fsdp": 4}, "full_shard", "float8", {"opt_over": ("replica", "fsdp")}, {}),
        ({"fsdp": 8}, "full_shard", "int8:32@4", {"reshard_after_forward": 2}, {"prefetch": 2}),
        ({"fsdp": 8}, "full_shard", "float8@8", {}, {}),
        ({"fsdp": 4}, "full_shard", "float8", {"reshard_after_forward": False}, {"accumulate": 2}),
        ({"fsdp": 4}, "zero2", "int8:32", {}, {}),
        ({"fsdp": 4}, "ddp", "float8", {}, {}),
        ({"fsdp": 2, "tensor": 2}, "full_shard", "float8", CUT, {}),
        ({"fsdp": 2, "pipe": 2}, "full_shard", "float8", {}, {"accumulate": 2}),
    ]
]


@pytest.mark.parametrize(("sizes", "strategy", "wire", "options", "step_options"), GATHERS)
def test_gathers_equal_one_device_with_the_same_rounding(reference, sizes, strategy, wire, options, step_options):
    batch = jax.tree.map(lambda x: x[:12], one_batch()) if sizes["fsdp"] == 3 else one_batch()
    params = rounded_weights(reference.params, wire.partition(":")[0].partition("@")[0])
    (total, grads), weight = reference.sums(params, batch), batch["weights"].sum()
    found, metrics = gradients(shard(sizes, strategy, gather=wire, **options), batch, **step_options)
    assert metrics["loss"] == pytest.approx(total / weight, rel=1e-6)
    assert metrics["wire_overflows"] == 0
    for path, distance in distances(found, {path: x / weight for path, x in flat(grads).items()}).items():
        assert distance.max() < 1e-6, path


def summed(parts, how, between):
    """Sum gradients [microbatch][replica][device] as a step with int8 reductions does.

    Args:
      how: "each": every microbatch over fsdp, then over replicas; "all": every microbatch over all devices; "last":
        over all devices after the last microbatch.
      between: devices in whose groups sums are not rounded.
    """
    micros, replicas, devices = parts.shape[:3]
    rounded = functools.partial(round_int8, block=32)

    def over(values, inside):
        groups = [sum(values[k : k + inside]) for k in range(0, len(values), inside)]
        return groups[0] if len(groups) == 1 else sum(map(rounded, groups))

    if how == "each":
        shards = [sum(over(parts[a, r], min(between, devices)) for a in range(micros)) for r in range(replicas)]
        return over(shards, 1)
    flat = parts.reshape(micros, replicas * devices, *parts.shape[3:])
    flat = flat.sum(0)[None] if how == "last" else flat
    return sum(over(values, between) for values in flat)


REDUCTIONS = [
    ({"fsdp": 4}, "full_shard", "int8:32", "each", {"gather": "float8"}, {"accumulate": 2}),
    ({"replica": 2, "fsdp": 4}, "full_shard", "int8:32", "each", {}, {"accumulate": 2}),
    ({"replica": 2, "fsdp": 4}, "full_shard", "int8:32@2", "each", {"gather": "int8:32@2"}, {}),
    ({"fsdp": 8}, "full_shard", "int8:32@4", "each", {"reshard_after_forward": 2}, {"accumulate": 2}),
    ({"fsdp": 4}, "ddp", "int8:32", "all", {}, {"accumulate": 2}),
    ({"fsdp": 3}, "ddp", "int8:32", "all", {}, {}),
    ({"fsdp": 8}, "zero1", "int8:32@2", "last", {}, {"accumulate": 2}),
    (
        {"replica": 2, "fsdp": 2, "tensor": 2},
        "full_shard",
        "int8:32",
        "each",
        CUT,
        {},
    ),
]
REDUCTIONS += [  # in the proofs
    pytest.param(*row, marks=pytest.mark.proof)
    for row in [
        ({"fsdp": 4}, "full_shard", "int8:32", "each", {}, {}),
        ({"replica": 2, "fsdp": 4}, "full_shard", "int8:32", "each", {}, {}),
        ({"replica": 2, "fsdp": 4}, "full_shard", "int8:32@4", "each", {}, {"accumulate": 2}),
        ({"replica": 2, "fsdp": 4}, "full_shard", "int8:32@4", "each", {"opt_over": ("replica", "fsdp")}, {}),
        ({"fsdp": 8}, "full_shard", "int8:32@2", "each", {}, {}),
        ({"fsdp": 8}, "full_shard", "int8:32@8", "each", {}, {}),
        ({"fsdp": 4}, "full_shard", "int8:32", "last", {}, {"accumulate": 2, "sync": "last"}),
        ({"replica": 2, "fsdp": 4}, "ddp", "int8:32@4", "all", {}, {}),
        ({"fsdp": 4}, "zero1", "int8:32", "last", {}, {"accumulate": 2}),
        ({"fsdp": 4}, "zero2", "int8:32", "each", {}, {"accumulate": 2}),
        ({"fsdp": 4, "tensor": 2}, "full_shard", "int8:32", "each", CUT, {}),
        ({"fsdp": 2, "pipe": 2}, "full_shard", "int8:32", "each", {}, {"accumulate": 2}),
    ]
]


@pytest.mark.parametrize(("sizes", "strategy", "wire", "how", "options", "step_options"), REDUCTIONS)
def test_reductions_equal_the_sum_of_the_same_rounded_gradients(
    reference, sizes, strategy, wire, how, options, step_options
):
    batch, accumulate = one_batch(), step_options.get("accumulate", 1)
    gather = options.get("gather", "").partition(":")[0] or None
    params = rounded_weights(reference.params, gather)
    replicas, devices, rows = sizes.get("replica", 1), sizes["fsdp"], len(batch["tokens"])
    batch = jax.tree.map(
        lambda x: x[: rows // (replicas * devices * accumulate) * replicas * devices * accumulate], batch
    )
    own = np.arange(len(batch["tokens"])).reshape(replicas, devices, -1, accumulate)
    places = list(itertools.product(range(accumulate), range(replicas), range(devices)))
    parts = [flat(reference.sums(params, batch, own[r, n, :, a])[1]) for a, r, n in places]
    between = int(wire.partition("@")[2] or 1)
    found, metrics = gradients(shard(sizes, strategy, reduce=wire, **options), batch, **step_options)
    assert 0.003 < metrics.get("reduce_rounding", 0.004) < 0.008 or (between >= 8 and metrics["reduce_rounding"] == 0)
    for path in parts[0]:
        stacked = np.stack([part[path] for part in parts]).reshape(accumulate, replicas, devices, *parts[0][path].shape)
        is_coded = path.startswith("blocks") and path.endswith("kernel")
        expected = (summed(stacked, how, between) if is_coded else stacked.sum((0, 1, 2))) / batch["weights"].sum()
        distance = distances(found, {path: expected})[path]
        differing = distance > 1e-6  # a value in the middle between two codes may have either
        assert differing.mean() < (0.01 if is_coded else 0) or not differing.any(), path
        assert distance.max() < 1.5 / 127, path


def train(sizes, gather, reduce=None, **step_options):
    """Return the losses of five steps of Adam, and the parameters."""
    model = shard(sizes, gather=gather, reduce=reduce)
    tx = optax.adam(1e-2, eps=1e-4)
    state, step, losses = model.init(tx), model.train_step(token_loss, tx, **step_options), []
    for batch in make_batches(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state.params)


def test_five_steps_differ_from_one_device_by_few_codes(reference):
    tx, params, losses = optax.adam(1e-2, eps=1e-4), reference.params, []
    state = tx.init(params)
    for batch in make_batches(5):
        weight = batch["weights"].sum()
        total, grads = reference.sums(rounded_weights(params, "float8"), batch)
        updates, state = tx.update(optax.tree.scale(1 / weight, grads), state, params)
        params = optax.apply_updates(params, updates)
        losses.append(total / weight)
    expected = flat(rounded_weights(jax.device_get(params), "float8"))
    for sizes, options in (({"fsdp": 8}, {"accumulate": 2}), ({"replica": 2, "fsdp": 2}, {"program": "xla"})):
        found, weights = train(sizes, "float8", **options)
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for name in ("up", "down"):
            path = f"blocks.{name}.kernel"
            rounded = round_float8(np.asarray(weights[path]), (-2, -1))
            assert (rounded != expected[path]).mean() < 0.02


def test_evaluation_uses_the_rounded_weights(reference):
    model, batch = shard({"fsdp": 4}, gather="float8"), one_batch()
    loss = model.forward(lambda model, batch: token_loss(model, batch).total)(model.init(optax.sgd(0.1)), batch)
    assert float(loss) == pytest.approx(reference.sums(rounded_weights(reference.params, "float8"), batch)[0], rel=1e-6)


class Outer(nnx.Module):
    """A unit that calls another unit twice."""

    def __init__(self, rngs):
        self.inner, self.linear = Block(DIM, rngs), nnx.Linear(DIM, DIM, rngs=rngs)
        uneven(self, "inner")

    def __call__(self, x):
        return self.inner(self.linear(self.inner(x)))


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.outer = nnx.Embed(37, DIM, rngs=rngs), Outer(rngs)
        self.head = nnx.Linear(DIM, 37, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.outer(self.embed(tokens)))


def test_calls_outside_the_schedule_are_rounded_alike():
    def run(sizes, **options):
        mesh = jfsdp.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        policy = jfsdp.MixedPrecisionPolicy(gather_wire="float8", reduce_wire=options.pop("reduce", None))
        model = fully_shard(Nested, mesh=mesh, units=[Outer, Block], mp_policy=policy)
        return gradients(model, one_batch(), **options)[0]

    with pytest.warns(UserWarning, match=r"outer\.inner"):
        found, coded = (run({"fsdp": 4}, prefetch=1, reduce=reduce) for reduce in (None, "int8:32"))
    expected = run({"fsdp": 1}, program="xla")
    assert all(distance.max() < 1e-6 for distance in distances(found, expected).values())
    errors = {path: distance.max() for path, distance in distances(coded, expected).items()}
    assert 1e-4 < errors["outer.inner.up.kernel"] < 0.02 and errors["outer.inner.up.bias"] < 1e-6
