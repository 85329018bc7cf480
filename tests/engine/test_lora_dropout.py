"""Dropout of adapters: steps equal those of one device that drops the input of every A by hand.

The reference is the small tower written out, of either API and form, with the masks as adapters.md says they are drawn.
"""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jfsdp
from jfsdp.jaxprs import all_eqns, draws
from jfsdp.modules.adapted import dropout_key, dropout_keys
from tests import reference
from tests.models_small import Block, LinenBlock, Tower, linen_tower, make_batches, token_loss
from tests.pairwise import cover
from tests.refusals import refuses
from tests.steps import fully_shard

TX = optax.sgd(0.3)
STEPS, LAYERS, RATE = 3, 2, 0.4
UP, DOWN = "up.kernel", "down.kernel"
SOURCES: dict[str, Any] = {
    "stacked": (lambda rngs: Tower(rngs, num_layers=LAYERS), [Block], "blocks"),
    "listed": (lambda rngs: Tower(rngs, stacked=False, num_layers=LAYERS), [Block], "blocks.{}"),
    "linen": (linen_tower(True, LAYERS), [LinenBlock], "blocks"),
    "linen, listed": (linen_tower(False, LAYERS), [LinenBlock], "blocks_{}"),
}
MESHES = {"4": {"fsdp": 4}, "2x2": {"replica": 2, "fsdp": 2}, "1": {"fsdp": 1}}


def lora(**options):
    return jfsdp.LoRA(**({"targets": [f"**.{UP}", f"**.{DOWN}"], "rank": 3, "alpha": 5.0, "dropout": RATE} | options))


def shard(name, mesh, **options: Any):
    source, units, _ = SOURCES[name]
    count = int(np.prod(list(mesh.values())))
    given = {"units": units, "min_size": 20, "lora": lora()} | options
    return fully_shard(source, mesh=jfsdp.make_mesh(**mesh, devices=jax.devices()[:count]), **given)


def leaves(state):
    return {name: reference.logical(state, name, x) for name, x in state.params.items()}


def keys_of(state):
    return [state.model_state[f"lora_dropout.{name}"] for name in ("key", "count")]


class Written:
    """The tower written out, on parameters by name; `names` is how its layers are called."""

    def __init__(self, names, rate=RATE, dora=False):
        self.names, self.rate, self.scale, self.dora = names, rate, 5 / 3, dora

    def loss(self, params, key, rows):
        return token_loss(functools.partial(self.logits, params, key), rows)

    def logits(self, params, key, tokens):
        x = jnp.asarray(params["embed.embedding"])[tokens]
        for layer in range(LAYERS):
            x = self.block(params, key, layer, x)
        return x @ params["head.kernel"] + params["head.bias"]

    def block(self, params, key, layer, x):
        stacked = "{}" not in self.names
        name = self.names.format(layer)
        one = lambda leaf: params[f"{name}.{leaf}"][layer] if stacked else params[f"{name}.{leaf}"]  # noqa: E731

        def product(leaf, x):
            w, a, b = (one(f"{leaf}{part}") for part in ("", ".lora_a", ".lora_b"))
            own = jax.random.fold_in(key, np.uint32(zlib.crc32(f"{name}.{leaf}".encode())))
            own = jax.random.fold_in(own, layer if stacked else 0)
            seen = x * jax.random.bernoulli(own, 1 - self.rate, x.shape) / (1 - self.rate) if self.rate else x
            low = self.scale * (seen @ a) @ b
            if not self.dora:
                return x @ w + low
            norms = jax.lax.stop_gradient(jnp.linalg.norm(w + self.scale * a @ b, axis=0))
            gain = one(f"{leaf}.lora_magnitude") / norms
            return x @ w + (gain - 1) * (seen @ w) + gain * low

        h = x * one("norm.scale")
        return x + product(DOWN, nnx.relu(product(UP, h) + one("up.bias")))


def train_alone(model, params, key, count, batches, *, devices=0, accumulate=1):
    """Train adapters on one device; of a microbatch the rows of each of `devices` come with a key of their own."""
    trained = {
        name: x for name, x in params.items() if name.rpartition(".")[2] in ("lora_a", "lora_b", "lora_magnitude")
    }
    opt_state, losses = TX.init(trained), []

    @jax.jit
    def step(trained, opt_state, count, batch):
        def total(trained):
            def sums(place, part):
                def own_rows(x):  # of a device, every `accumulate`-th
                    return x.reshape(devices or 1, -1, accumulate, *x.shape[1:])[place, :, part]

                own = jax.random.fold_in(key, place) if devices else key
                rows = jax.tree.map(own_rows, batch)
                loss = model.loss({**params, **trained}, jax.random.fold_in(own, count + part), rows)
                return jnp.stack([loss.total, loss.weight])

            places, parts = jnp.divmod(jnp.arange((devices or 1) * accumulate), accumulate)
            found = jax.vmap(sums)(places, parts).sum(0)
            return found[0] / found[1]

        loss, grads = jax.value_and_grad(total)(trained)
        updates, opt_state = TX.update(grads, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, loss

    for batch in batches:
        trained, opt_state, loss = step(trained, opt_state, count, batch)
        count = count + accumulate
        losses.append(float(loss))
    return losses, trained


def check(name, mesh, *, accumulate=1, dora=False, **options: Any):
    sharded = shard(name, mesh, lora=lora(dora=dora), **options)
    state, batches = sharded.init(TX), make_batches(STEPS)
    params, (key, count) = leaves(state), jax.device_get(keys_of(state))
    step, losses = sharded.train_step(token_loss, TX, accumulate=accumulate, check_loss=False), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    devices = sharded.layout.num_shards(sharded.layout.data_axes) if step.spec.program == "manual" else 0
    if mesh["fsdp"] > 1:
        assert step.spec.program == options["program"]
    model = Written(SOURCES[name][2], dora=dora)
    wanted, right = train_alone(model, params, key, count, batches, devices=devices, accumulate=accumulate)
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)
    found = leaves(state)
    error, leaf = reference.worst_leaf({x: found[x] for x in right}, jax.tree.map(np.asarray, right), 1e-2)
    assert error < 3e-4, leaf
    assert int(keys_of(state)[1]) == STEPS * accumulate
    return losses


COLUMNS = {
    "program": ["xla", "manual"],
    "mesh": list(MESHES),
    "name": list(SOURCES),
    "accumulate": [1, 2],
    "dora": [False, True],
    "remat": ["none", "full"],
}


QUICK = [("xla", "4", "linen", 2, True, "full"), ("manual", "2x2", "listed", 1, False, "none")]


@pytest.mark.parametrize("row", [*QUICK, *(pytest.param(row, marks=pytest.mark.proof) for row in cover(COLUMNS))])
def test_steps_equal_one_device_that_drops_by_hand(row):
    program, mesh, name, accumulate, dora, remat = row
    check(name, MESHES[mesh], program=program, accumulate=accumulate, dora=dora, remat=remat)


CASES: dict[str, Any] = {
    "flat": ("stacked", {"fsdp": 4}, {"program": "manual", "storage": "flat"}),
    "cut": ("listed", {"fsdp": 2, "tensor": 2}, {"program": "xla", "cuts": {f"**.{DOWN}": (0, "tensor")}}),
    "cut, manual": ("stacked", {"fsdp": 2, "tensor": 2}, {"program": "manual", "cuts": {f"**.{DOWN}": (0, "tensor")}}),
    "zero2": ("linen", {"fsdp": 4}, {"program": "manual", "strategy": "zero2"}),
}


@pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")
# What is cut is cut under program manual, where it cuts the masks' keys too.
@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.proof] * (x != "cut, manual")) for x in CASES])
def test_every_setting_drops_alike(case):
    name, mesh, options = CASES[case]
    check(name, mesh, **options)


class Around(linen.Module):
    @linen.compact
    def __call__(self, x):
        return LinenBlock(16, name="block")(x)[0]


JitAround = linen.jit(Around)  # Flax keeps its traces by class, fields and path


class JitTower(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        return linen.Dense(37, name="head")(JitAround(name="blocks")(linen.Embed(37, 16, name="embed")(tokens)))


def test_below_jit_of_linen_a_step_drops_anew_and_evaluation_does_not():
    model = fully_shard((JitTower(), (jax.ShapeDtypeStruct((1, 6), jnp.int32),)), units=[LinenBlock], lora=lora())
    state, batch = with_parts(model.init(optax.sgd(0.0))), make_batches(1)[0]
    evaluate, step = model.forward(token_loss), model.train_step(token_loss, optax.sgd(0.0), check_loss=False)
    plain, losses = evaluate(state, batch), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    after = evaluate(state, batch)
    assert float(after.total) == float(plain.total)
    assert len({round(x, 4) for x in (*losses, float(plain.total / plain.weight))}) == 3


def with_parts(state):
    """Return a state whose B is not zero, so that the input of A matters."""

    def moved(name, x):
        return x + 0.1 if name.endswith(".lora_b") else x

    return dataclasses.replace(state, params={name: moved(name, x) for name, x in state.params.items()})


def test_evaluation_drops_nothing_and_draws_nothing():
    model, batch = shard("stacked", MESHES["4"]), make_batches(1)[0]
    state = with_parts(model.init(TX))
    evaluate = model.forward(lambda model, tokens: model(tokens))
    wanted = Written("blocks", rate=0).logits(leaves(state), jax.random.key(0), batch["tokens"])
    np.testing.assert_allclose(evaluate(state, batch["tokens"]), wanted, rtol=1e-4, atol=1e-5)
    assert not any(map(draws, all_eqns(jax.make_jaxpr(evaluate)(state, batch["tokens"]).jaxpr)))


def test_layers_matrices_and_microbatches_have_masks_of_their_own():
    model = shard("stacked", MESHES["1"], lora=lora(targets=[f"**.{UP}"]))
    adapters = model.model.adapters["blocks.up.kernel"]
    keys = dropout_keys(jax.random.key(3), adapters, jnp.arange(LAYERS, dtype="uint32"))
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == LAYERS
    state = model.init(TX)

    def drawn(state):
        key = dropout_key(state.model_state)
        assert key is not None
        return tuple(jax.random.key_data(key).tolist())

    seen = {drawn(state)}
    step = model.train_step(token_loss, TX, accumulate=2, check_loss=False)
    for batch in make_batches(2):
        state, _ = step(state, batch)
        seen.add(drawn(state))
    assert len(seen) == 3


def test_a_run_goes_on_with_the_masks_that_it_would_have_drawn(tmp_path):
    model, batches = shard("linen", MESHES["4"]), make_batches(4)
    state, step = model.init(TX), model.train_step(token_loss, TX, check_loss=False, program="xla")
    for batch in batches[:2]:
        state, _ = step(state, batch)
    jfsdp.checkpoint.save(tmp_path / "two", state, frozen=False)
    other = jfsdp.checkpoint.restore(tmp_path / "two", like=model.init(TX))
    for batch in batches[2:]:
        state, metrics = step(state, batch)
        other, others = step(other, batch)
        np.testing.assert_allclose(float(metrics["loss"]), float(others["loss"]), rtol=1e-6)


def test_masks_by_device_are_a_reason_that_the_step_tells():
    reasons = []
    for rate in (0.0, RATE):
        model = shard("stacked", {"replica": 2, "fsdp": 2}, lora=lora(dropout=rate))
        step = model.train_step(token_loss, TX)
        reasons.append(step.resolve(make_batches(1)[0]).reason)
        assert step.spec.program == "manual"
    assert "masks" not in reasons[0] and "masks" in reasons[1]


def test_a_matrix_used_over_its_output_has_no_dropout():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.up = nnx.Embed(37, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, tokens):
            return self.embed.attend(self.up(self.embed(tokens)) @ self.up.kernel.T)

    model = fully_shard(Tied, lora=lora(targets=["up.kernel"]))
    refuses(lambda: model.train_step(token_loss, TX).resolve(make_batches(1)[0]), "up.kernel")


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_a_share_that_is_none_is_refused(share):
    refuses(lambda: lora(dropout=share), f"LoRA(dropout={share})", "at least 0 and below 1")
