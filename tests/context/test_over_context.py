"""Models whose rows axis `context` splits equal one device, in float64: loss and every gradient within 1e-12."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jfsdp
from tests import reference
from tests.pairwise import cover
from tests.sharding import fully_shard
from tests.thin import each_value

HEADS, KEYS, SIZE, DIM, VOCAB, TOKENS, ROWS = 8, 2, 4, 32, 48, 32, 8
LIMIT = 1e-12


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def attend(query, key, value, ids=None, *, window=None, is_causal=True, **_):
    """Attention of whole rows, written out in the dtype of its inputs."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    rows, columns = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])[None]
    seen = (columns <= rows) & (columns > rows - (window or TOKENS)) if is_causal else jnp.full((1, 1), True)
    seen = seen[None] if ids is None else seen[None] & (ids[:, :, None] == ids[:, None])
    scores = jnp.where(seen[:, None], jnp.einsum("bqha,bkha->bhqk", query, key) * SIZE**-0.5, -1e30)
    return checkpoint_name(jnp.einsum("bhqk,bkha->bqha", jax.nn.softmax(scores, axis=-1), value), "attention")


def rotate(x, positions):
    angles = positions[..., None, None] * 100.0 ** -jnp.linspace(0, 1, SIZE // 2)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Layer(nnx.Module):
    def __init__(self, window, form, rngs):
        self.window, self.form = window, form
        linear = functools.partial(nnx.Linear, use_bias=False, param_dtype=jnp.float64, rngs=rngs)
        self.query, self.out = linear(DIM, HEADS * SIZE), linear(HEADS * SIZE, DIM)
        self.key, self.value = linear(DIM, KEYS * SIZE), linear(DIM, KEYS * SIZE)
        self.up, self.down = linear(DIM, 2 * DIM), linear(2 * DIM, DIM)

    def attend(self, query, key, value, ids):
        if self.form == "keys":
            return jfsdp.attention(query, key, value, window=self.window, segment_ids=ids, context_by="keys")
        rows = () if ids is None else (jfsdp.whole_rows(ids),)
        return jfsdp.over_context(functools.partial(attend, window=self.window))(query, key, value, *rows)

    def __call__(self, x, positions, ids):
        query, key, value = (part(x).reshape(*x.shape[:2], -1, SIZE) for part in (self.query, self.key, self.value))
        attended = self.attend(rotate(query, positions), rotate(key, positions), value, ids)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs, window=None, form="heads"):
        self.embed = nnx.Embed(VOCAB, DIM, param_dtype=jnp.float64, rngs=rngs)
        self.layers = nnx.vmap(lambda key: Layer(window, form, nnx.Rngs(key)))(jax.random.split(rngs.params(), 2))
        self.head = nnx.Linear(DIM, VOCAB, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, tokens, ids=None):
        positions = jfsdp.positions(tokens, ids)

        @nnx.scan(in_axes=(nnx.Carry, 0, None, None), out_axes=nnx.Carry)
        def run(x, layer, positions, ids):
            return layer(x, positions, ids)

        return self.head(run(self.embed(tokens), self.layers, positions, ids))


CUTS = {f"layers.{name}.kernel": P(None, "tensor") for name in ("query", "key", "value", "up")}
CUTS |= {f"layers.{name}.kernel": P("tensor") for name in ("out", "down")}
CUTS |= {"embed.embedding": P(None, "tensor"), "head.kernel": P(None, "tensor")}


def token_loss(model, batch, **options):
    ids = batch.get("segment_ids")
    logits = model(batch["tokens"], **({} if ids is None else {"ids": ids}), **options)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    weights = jnp.ones(losses.shape) if ids is None else (ids != 0).astype(losses.dtype)
    return jfsdp.Loss(jnp.sum(losses * weights), jnp.sum(weights), {"entropy": jnp.sum(losses)})


def make_batch(packed):
    """Rows of several documents: of length 1, over a boundary of all contexts, and padding at the end."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1)}
    if packed:
        ids = np.ones((ROWS, TOKENS), np.int32)
        for row, starts in enumerate([(3, 4, 19, 30), (1, 15, 17), (), (31,), (8, 16, 24), (5, 6, 7), (16,), (29,)]):
            for start in starts:
                ids[row, start:] += 1
            ids[row, TOKENS - row :] = 0
        batch["segment_ids"] = ids
    return batch


def one_device(source, batch, loss=token_loss):
    """Return the mean loss and its gradients by jax.grad of the plain model."""
    plain = (reference.PlainLinen if isinstance(source, tuple) else reference.PlainNNX)(source, 0)

    def mean(params):
        found, _ = plain.loss(loss, params, plain.state, batch)
        return found.total / found.weight

    value, grads = jax.jit(jax.value_and_grad(mean))(plain.params)
    return float(value), [np.asarray(x) for x in jax.tree.leaves(grads)]


def sharded(source, batch, mesh, loss=token_loss, program=None, accumulate=1, **options):
    """Return the same from jfsdp."""
    made = jfsdp.make_mesh(**{"fsdp": 1, **mesh}, devices=jax.devices()[: int(np.prod(list(mesh.values())))])
    model = fully_shard(source, mesh=made, min_size=0, **options)
    step = model.grads(loss, program=program, accumulate=accumulate, check_loss=False)
    _, grads, metrics = step(model.init(optax.sgd(1.0), 0), batch)
    assert step.spec.program == (program or "manual")
    return float(metrics["loss"]), [np.asarray(x) for x in jax.tree.leaves(grads)]


def error(found, wanted):
    """Return the largest error of the loss and of any gradient, relative to the largest element of each.

    The true gradient of a key's bias is 0, so an element of at least 1e-3 of the largest gradient counts.
    """
    (loss, grads), (true, trues) = found, wanted
    grads = [x[tuple(map(slice, true.shape))] for x, true in zip(grads, trues, strict=True)]  # without padding
    assert [x.shape for x in grads] == [x.shape for x in trues]
    floor = 1e-3 * max(np.abs(x).max() for x in trues)
    errors = [np.abs(a - b).max() / max(np.abs(b).max(), floor) for a, b in zip(grads, trues, strict=True)]
    return max(abs(loss - true) / abs(true), *errors)


@functools.cache
def wanted(packed, window):
    return one_device(functools.partial(Net, window=window), make_batch(packed))


COLUMNS = {
    "mesh": [
        {"context": 2},
        {"fsdp": 2, "context": 4},
        {"context": 8},
        {"replica": 2, "fsdp": 2, "context": 2},
        {"context": 4, "tensor": 2},
        {"fsdp": 2, "context": 2, "tensor": 2},
    ],
    "program": ["manual", "xla"],
    "packed": [False, True],
    "window": [None, 5],
    "form": ["heads", "keys"],
    "options": [{}, {"remat": "full"}, {"remat": ("attention",)}, {"strategy": "zero2"}, {"reshard_after_forward": 2}],
    "accumulate": [1, 2],
}


ROWS_OF_COLUMNS = cover(COLUMNS)
QUICK = (0, 6, 16, 24)  # both programs and forms; `context` alone and beside each other axis


@pytest.mark.parametrize(
    list(COLUMNS),
    [pytest.param(*row, marks=[pytest.mark.proof] * (at not in QUICK)) for at, row in enumerate(ROWS_OF_COLUMNS)],
)
def test_a_model_of_its_own_equals_one_device(mesh, program, packed, window, form, options, accumulate):
    options = dict(options)
    if "tensor" in mesh:
        options["placements"] = CUTS
    if np.prod([mesh.get(axis, 1) for axis in ("fsdp", "context")]) < 2 * options.get("reshard_after_forward", 1):
        options.pop("reshard_after_forward", None)
    source = functools.partial(Net, window=window, form=form)
    found = sharded(source, make_batch(packed), mesh, program=program, accumulate=accumulate, units=[Layer], **options)
    assert error(found, wanted(packed, window)) <= LIMIT


class LinenNet(nn.Module):
    """Flax's own attention, unmodified."""

    @nn.compact
    def __call__(self, tokens):
        wide: Any = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        x = nn.Embed(VOCAB, DIM, **wide)(tokens)
        x += nn.Embed(TOKENS, DIM, **wide)(jfsdp.positions(tokens))
        x += nn.MultiHeadDotProductAttention(HEADS, attention_fn=jfsdp.over_context(attend), name="attn", **wide)(x)
        return nn.Dense(VOCAB, **wide)(nn.LayerNorm(**wide)(x))


class NnxNet(nnx.Module):
    """The same in NNX, as a list of layers."""

    def __init__(self, rngs):
        wide: Any = {"dtype": jnp.float64, "param_dtype": jnp.float64, "rngs": rngs}
        self.embed, self.head = nnx.Embed(VOCAB, DIM, **wide), nnx.Linear(DIM, VOCAB, **wide)
        attention = functools.partial(nnx.MultiHeadAttention, HEADS, DIM, decode=False, **wide)
        self.layers = nnx.List([attention(attention_fn=jfsdp.over_context(causal)) for _ in range(2)])

    def __call__(self, tokens):
        x = rotate(self.embed(tokens).reshape(*tokens.shape, -1, SIZE), jfsdp.positions(tokens))
        x = x.reshape(*tokens.shape, DIM)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def causal(query, key, value, **options):
    return attend(query, key, value, **options | {"is_causal": True})


LINEN = LinenNet(), (jax.ShapeDtypeStruct((1, 4), jnp.int32),)
FOREIGN = {"linen": (LINEN, ["attn"]), "nnx": (NnxNet, [nnx.MultiHeadAttention])}


@pytest.mark.parametrize(
    ("model", "program"), each_value([("linen", "xla"), ("nnx", "manual"), ("linen", "manual"), ("nnx", "xla")])
)
def test_flax_attention_equals_one_device_by_its_attention_fn(model, program):
    source, units = FOREIGN[model]
    batch = make_batch(packed=False)
    found = sharded(source, batch, {"fsdp": 2, "context": 4}, program=program, units=units)
    assert error(found, one_device(source, batch)) <= LIMIT
