"""Dropout in program `manual` is that of one device that folds each key with the place of whose rows it computes."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, traverse_util

import jfsdp
from tests import reference
from tests.models_small import VOCAB, linear, make_batches, token_loss
from tests.steps import fully_shard

TX = optax.adam(1e-2)


class Part(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = linear(16, 16, rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, 16, rngs=rngs), linear(16, VOCAB, rngs)
        self.parts = nnx.List([Part(rngs) for _ in range(2)])

    def __call__(self, tokens):
        return self.head(functools.reduce(lambda x, part: part(x), self.parts, self.embed(tokens)))  # type: ignore[call-overload]


class LinenPart(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dropout(0.3, deterministic=False)(jnp.tanh(linen.Dense(16)(x)))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, 16)(tokens)
        return linen.Dense(VOCAB)(LinenPart(name="b")(LinenPart(name="a")(x)))


def whole(state):
    return {leaf.path: np.asarray(jfsdp.checkpoint.gather_leaf(state, leaf.path)) for leaf in state.layout.leaves}


def nnx_loss(state):
    """The model as a function of its parameters, keys and counts; the values are those of nnx.Rngs(0)."""
    del state
    model = reference.PlainNNX(Net, 0)
    return model.params, model.state, functools.partial(model.loss, token_loss)


def linen_loss(state):
    """Call n runs under fold_in(key, n), as the state of a sharded Linen model says."""
    params = traverse_util.unflatten_dict({tuple(k.split(".")): v for k, v in whole(state).items()})
    rngs = {"key": state.model_state["rngs.key"], "count": state.model_state["rngs.count"]}

    def loss(params, rngs, rows):
        key = jax.random.fold_in(rngs["key"], rngs["count"])
        model = functools.partial(LinenNet().apply, {"params": params}, rngs=key)
        return token_loss(model, rows), {**rngs, "count": rngs["count"] + 1}

    return params, rngs, loss


def train(params, state, loss, batches, *, devices, accumulate):
    """Train on one device; of a microbatch the rows of each of `devices` come by themselves, with keys of their own."""

    def fold(keys, place):
        if not reference.is_key(keys):
            return keys
        return jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), place).reshape(keys.shape)

    def total(params, state, rows):
        value, after = loss(params, state, rows)
        return value.total, (value.weight, after)

    @jax.jit
    def step(params, state, opt_state, batch):
        def one(sums, place):
            own = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:])[place], batch)
            here = jax.tree.map(lambda x: fold(x, place), state)
            for part in range(accumulate):
                rows = jax.tree.map(lambda x, part=part: x[part::accumulate], own)
                (value, (weight, here)), new = jax.value_and_grad(total, has_aux=True)(params, here, rows)
                sums = jax.tree.map(jnp.add, sums, (new, jnp.stack([value, weight])))
            return sums, jax.tree.map(lambda old, new: jnp.zeros(()) if reference.is_key(old) else new, state, here)

        (grads, sums), after = jax.lax.scan(
            one, (jax.tree.map(jnp.zeros_like, params), jnp.zeros(2)), jnp.arange(devices)
        )
        after = jax.tree.map(lambda old, new: old if reference.is_key(old) else new[-1], state, after)
        updates, opt_state = TX.update(jax.tree.map(lambda g: g / sums[1], grads), opt_state, params)
        return optax.apply_updates(params, updates), after, opt_state, sums[0] / sums[1]

    losses, opt_state = [], TX.init(params)
    for batch in batches:
        params, state, opt_state, value = step(params, state, opt_state, batch)
        losses.append(float(value))
    return losses, params


TOKENS = (jax.ShapeDtypeStruct((1, 6), jnp.int32),)
APIS: dict[str, Any] = {"nnx": (Net, [Part], nnx_loss), "linen": ((LinenNet(), TOKENS), [LinenPart], linen_loss)}
SETTINGS: dict[str, Any] = {
    "full_shard, 3": ({"fsdp": 3}, "full_shard", {}, 1),
    "replicas, 2x2, microbatches": ({"replica": 2, "fsdp": 2}, "full_shard", {}, 2),
    "full_shard, 2x4, once": ({"replica": 2, "fsdp": 4}, "full_shard", {"sync": "last"}, 2),
}


QUICK = ("nnx", "replicas, 2x2, microbatches")


@pytest.mark.parametrize(
    ("api", "setting"),
    [pytest.param(*x, marks=[pytest.mark.proof] * (x != QUICK)) for x in itertools.product(APIS, SETTINGS)],
)
def test_each_device_draws_from_its_own_key_and_nothing_else_differs(api, setting):
    (source, units, make), (sizes, strategy, more, accumulate) = APIS[api], SETTINGS[setting]
    devices = int(np.prod(list(sizes.values())))
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[:devices])
    model = fully_shard(source, mesh=mesh, units=units, strategy=strategy, program="manual", min_size=8)
    state, batches = model.init(TX), make_batches(3, rows=24 if devices == 3 else 16)
    params, keys, loss = make(state)
    wanted, params = train(params, keys, loss, batches, devices=devices, accumulate=accumulate)
    step, found = model.train_step(token_loss, TX, accumulate=accumulate, check_loss=False, **more), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    assert step.spec.program == "manual"
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    error, where = reference.worst_leaf(whole(state), reference.named(params), 1e-3)
    assert error < 1e-4, where
