"""A step as a pipeline equals one device: gradients in float64, steps of Adam in float32, under every schedule.

In float64 the algorithm is exact to rounding, so its limit is near that; in float32 a limit would be of the rounding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from tests.models_small import linear, spread
from tests.pairwise import cover
from tests.refusals import refuses
from tests.steps import fully_shard
from tests.thin import each_value

VOCAB, DIM, LENGTH, ROWS = 24, 8, 6, 48
EXACT = 1e-12
WIDE: dict[str, Any] = {"param_dtype": jnp.float64, "dtype": jnp.float64}


class Layer(nnx.Module):
    """Sums over earlier tokens of the document, each turned, and an MLP; float64 throughout."""

    def __init__(self, rngs):
        self.scale = nnx.Param(1 + 0.1 * spread(rngs.params(), (DIM,), jnp.float64))
        self.mix, self.up = linear(DIM, DIM, rngs, **WIDE), linear(DIM, 4 * DIM, rngs, **WIDE)
        self.down = linear(4 * DIM, DIM, rngs, use_bias=False, **WIDE)

    def __call__(self, x, turn, documents):
        seen = jnp.tril(documents[:, :, None] == documents[:, None, :])
        x = x + jnp.einsum("bqk,bkd->bqd", seen / LENGTH, self.mix(self.scale[...] * x) * turn)
        return x + self.down(nnx.relu(self.up(x)))


class Deep(nnx.Module):
    """Embedding, a stack of layers that read two arrays of the rows besides, a head; tied and with a path around the
    layers, or with a head of its own."""

    def __init__(self, rngs, tied, layers):
        make = nnx.vmap(lambda rngs: Layer(rngs), in_axes=0, out_axes=0)
        self.embed = nnx.Param(2.0 * spread(rngs.params(), (VOCAB, DIM), jnp.float64))
        self.layers = nnx.split_rngs(splits=layers)(make)(rngs)
        self.norm = nnx.Param(jnp.ones((DIM,), jnp.float64))
        self.head = None if tied else nnx.Param(3.0 * spread(rngs.params(), (DIM, VOCAB), jnp.float64))

    def __call__(self, tokens, documents):
        x = first = self.embed[...][tokens]
        turn = jnp.cos(documents + 0.1 * jnp.arange(LENGTH))[:, :, None]
        scan = nnx.scan(
            lambda x, layer, *beside: layer(x, *beside), in_axes=(nnx.Carry, 0, None, None), out_axes=nnx.Carry
        )
        x = self.norm[...] * scan(x, self.layers, turn, documents)
        return (x + first) @ self.embed[...].T if self.head is None else x @ self.head[...]


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"], batch["documents"]), batch["targets"]
    )
    total, weight = (losses * batch["weights"]).sum(), batch["weights"].sum()
    return jfsdp.Loss(total, weight, {"largest": jfsdp.Max((losses * batch["weights"]).max())})


def make_batch(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, VOCAB, (2, rows, LENGTH)).astype(np.int32)
    documents = np.cumsum(rng.random((rows, LENGTH)) < 0.3, axis=1).astype(np.int32)
    weights = (rng.random((rows, LENGTH)) < rng.random((rows, 1))).astype(np.float64)
    return {"tokens": tokens, "targets": targets, "documents": documents, "weights": weights}


@pytest.fixture(autouse=True)
def _wide(request):
    with jax.enable_x64("exact" in request.node.name):
        yield


@functools.cache
def wanted(tied, layers):
    """Mean loss and gradient by plain JAX on one device."""
    batch = make_batch()

    def mean(model):
        found = loss(model, batch)
        return found.total / found.weight, (found.aux or {})["largest"].maximum

    compute = nnx.jit(lambda: nnx.value_and_grad(mean, has_aux=True)(Deep(nnx.Rngs(0), tied, layers)))
    (value, largest), grads = compute()
    flat = {".".join(map(str, path)): np.asarray(x) for path, x in nnx.to_flat_state(grads)}
    return float(value), float(largest), flat


def gradients(sizes, tied, layers, accumulate, options=None, **step):
    num = int(np.prod(list(sizes.values())))
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[:num])
    vocabulary = {"embed": (0, ("pipe", "tensor"))} | ({} if tied else {"head": (-1, ("pipe", "tensor"))})
    cuts = {"layers.up": (-1, "tensor"), "layers.down.kernel": (0, "tensor")} | vocabulary
    model = fully_shard(
        lambda rngs: Deep(rngs, tied, layers), mesh=mesh, units=[Layer], min_size=4, cuts=cuts, **(options or {})
    )
    state = model.init(optax.sgd(0.1))
    fn = model.grads(loss, accumulate=accumulate, check_loss=False, **step)
    _, grads, metrics = fn(state, make_batch())
    found = {".".join(map(str, path)): np.asarray(x) for path, x in nnx.to_flat_state(grads)}
    return float(metrics["loss"]), float(metrics["largest"]), found


COLUMNS = {
    "pipe": [2, 4],
    "data": [{}, {"fsdp": 2}, {"replica": 2}],
    "tensor": [1, 2],
    "schedule": ["1f1b", "gpipe", "1f1b twice"],
    "accumulate": [4, 6, 8],
    "tied": [False, True],
    "remat": ["none", "full"],
    "prefetch": [0, 1],
}


@pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")  # attention is not cut over tensor
@pytest.mark.parametrize(tuple(COLUMNS), each_value(cover(COLUMNS)))
def test_gradients_are_exact(pipe, data, tensor, schedule, accumulate, tied, remat, prefetch):
    check(pipe, data, tensor, schedule, accumulate, tied, remat, prefetch)


FITTING = [
    (2, {}, 1),
    (2, {}, 2),
    (2, {"fsdp": 2}, 1),
    (2, {"fsdp": 2}, 2),
    (4, {}, 1),
    (4, {}, 2),
    (4, {"fsdp": 2}, 1),
]


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")
@pytest.mark.parametrize("tied", COLUMNS["tied"])
@pytest.mark.parametrize("accumulate", COLUMNS["accumulate"])
@pytest.mark.parametrize("schedule", COLUMNS["schedule"])
@pytest.mark.parametrize(("pipe", "data", "tensor"), FITTING)
def test_gradients_are_exact_in_every_combination(pipe, data, tensor, schedule, accumulate, tied):
    check(pipe, data, tensor, schedule, accumulate, tied, "full", 1)


def check(pipe, data, tensor, schedule, accumulate, tied, remat, prefetch):
    sizes: dict[str, Any] = {"pipe": pipe, "fsdp": 1, "tensor": tensor} | data
    if np.prod(list(sizes.values())) > 8:
        sizes["tensor"] = 1
    name, _, repeats = schedule.partition(" ")
    step = {"pipe_schedule": name, "pipe_repeats": 2 if repeats else 1}
    layers = 8 if repeats else 2 * pipe  # of a stage two in each round, on two stages
    if repeats and accumulate % pipe:
        refuses(lambda: gradients(sizes, tied, layers, accumulate, **step), f"accumulate={accumulate}", "take 8")
        return
    strategy = "full_shard"
    options = {"remat": remat, "prefetch": prefetch, "strategy": strategy}
    value, largest, found = gradients(sizes, tied, layers, accumulate, options, **step)
    mean, most, grads = wanted(tied, layers)
    assert found.keys() == grads.keys()
    np.testing.assert_allclose((value, largest), (mean, most), rtol=EXACT)
    for path, grad in grads.items():
        assert np.abs(found[path] - grad).max() < EXACT * max(np.abs(grad).max(), 1), path
