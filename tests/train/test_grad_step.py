"""Loops of one's own: gradients and updates by themselves, several optimizers, and the plain model back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jfsdp
from tests import reference
from tests.models_small import Block, LinenBlock, Lookup, Tower, linear, linen_tower, make_batches, token_loss
from tests.refusals import refuses
from tests.states import logical
from tests.steps import fully_shard
from tests.thin import thin

SGD = optax.sgd(0.1)
TX = optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "manual": {"program": "manual"},
    "flat": {"program": "manual", "storage": "flat"},
    "zero1, bfloat16, frozen": {
        "strategy": "zero1",
        "mp_policy": jfsdp.MixedPrecisionPolicy("bfloat16"),
        "frozen": "embed",
    },
    "float16": {"mp_policy": jfsdp.MixedPrecisionPolicy("float16")},
    "offloaded": {"offload_policy": jfsdp.OffloadPolicy(params=True, opt_state=True)},
}


def shard(form: str = "auto", source: Any = Lookup, num_devices: int = 3, **options: Any) -> jfsdp.ShardedModel:
    mesh = jfsdp.make_mesh(devices=jax.devices()[:num_devices])
    units = {Gan: [nnx.Sequential], Tower: [Block], Lookup: []}.get(source, [LinenBlock])
    return fully_shard(source, mesh=mesh, units=units, min_size=4, **(FORMS[form] | options))


@pytest.mark.parametrize("form", thin(FORMS, 3))
def test_gradients_and_their_application_are_a_training_step(form):
    model = shard(form)
    step = model.train_step(token_loss, TX, check_loss=False)
    grads_of = model.grads(token_loss, check_loss=False)
    wanted, state = model.init(TX), model.init(TX)
    for batch in make_batches(2, rows=12):
        wanted, metrics = step(wanted, batch)
        state, grads, found = grads_of(state, batch)
        state = model.apply_gradients(state, grads, TX)
        for name in found:
            np.testing.assert_allclose(found[name], metrics[name], rtol=1e-5, err_msg=name)
    other = logical(state)
    for name, x in logical(wanted).items():
        np.testing.assert_allclose(np.float32(other[name]), np.float32(x), rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("source", [Lookup, linen_tower()], ids=["nnx", "linen"])
def test_gradients_are_the_tree_that_an_optimizer_sees(source):
    model = shard(source=source, frozen="head.**")
    state, grads, _ = model.grads(token_loss, check_loss=False)(model.init(TX), make_batches(1, rows=12)[0])
    assert jax.tree.structure(grads) == jax.tree.structure(state.opt_state[0].mu)
    for grad, moment in zip(jax.tree.leaves(grads), jax.tree.leaves(state.opt_state[0].mu), strict=True):
        assert (grad.shape, grad.dtype, grad.sharding) == (moment.shape, jnp.float32, moment.sharding)


def test_several_backwards_and_gradients_by_hand():
    model = shard("flat")
    batches = make_batches(2, rows=12)
    both = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    total = lambda model, batch: token_loss(model, batch)._replace(weight=1.0 * batch["tokens"].shape[0])  # noqa: E731
    state = model.init(TX)
    grads_of = model.grads(total, check_loss=False)
    _, wanted, _ = grads_of(state, both)
    found = [grads_of(state, batch)[1] for batch in batches]
    mean = jax.tree.map(lambda a, b: (np.asarray(a) + np.asarray(b)) / 2, *found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mean, wanted)
    plain = reference.plain(Lookup).params
    cut = jax.tree.map(lambda x, like: np.asarray(x)[tuple(map(slice, like.shape))], mean, plain)
    assert any(a.shape != b.shape for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(mean)))
    found, wanted = model.apply_gradients(model.init(TX), cut, TX), model.apply_gradients(state, mean, TX)
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


class Gan(nnx.Module):
    """A generator and a discriminator."""

    def __init__(self, rngs):
        self.generator = nnx.Sequential(linear(4, 8, rngs), jnp.tanh, linear(8, 3, rngs))
        self.discriminator = nnx.Sequential(linear(3, 8, rngs), jnp.tanh, linear(8, 1, rngs))


def generator_loss(model: Any, batch: Any) -> Any:
    scores = model.discriminator(model.generator(batch["noise"]))
    return jfsdp.Loss(jax.nn.softplus(-scores).sum(), batch["noise"].shape[0])


def discriminator_loss(model: Any, batch: Any) -> Any:
    fake = model.discriminator(jax.lax.stop_gradient(model.generator(batch["noise"])))
    losses = jax.nn.softplus(fake) + jax.nn.softplus(-model.discriminator(batch["real"]))
    return jfsdp.Loss(losses.sum(), batch["noise"].shape[0])


def of(part: str) -> Any:
    labels = lambda params: nnx.map_state(lambda path, _: "on" if path[0] == part else "off", params)  # noqa: E731
    return optax.partition({"on": optax.sgd(0.1, 0.9), "off": optax.set_to_zero()}, labels)


@pytest.mark.parametrize("form", thin(["flat", "auto"]))
def test_a_gan_with_two_optimizers_equals_one_device(form):
    optimizers = {"generator": of("generator"), "discriminator": of("discriminator")}
    losses = {"discriminator": discriminator_loss, "generator": generator_loss}
    tx = jfsdp.optim.alternate(**{name: (f"{name}.**", optax.sgd(0.1, 0.9)) for name in optimizers})
    model = shard(form, Gan, 4)
    state = model.init(tx)
    steps = {name: model.grads(loss, check_loss=False) for name, loss in losses.items()}
    params: Any
    graphdef, params, rest = nnx.split(Gan(nnx.Rngs(0)), nnx.Param, ...)
    states = {name: optimizer.init(params) for name, optimizer in optimizers.items()}

    def plain_step(name, params, opt_state, batch):
        def mean(params):
            value = losses[name](nnx.merge(graphdef, *jax.tree.map(lambda x: x, (params, rest))), batch)
            return value.total / value.weight

        updates, opt_state = optimizers[name].update(jax.grad(mean)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    plain_step = jax.jit(plain_step, static_argnums=0)
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = {"noise": rng.normal(size=(8, 4)).astype("f"), "real": rng.normal(size=(8, 3)).astype("f")}
        for name in losses:
            state, grads, _ = steps[name](state, batch)
            state = model.apply_gradients(state, grads, tx, only=name)
            params, states[name] = plain_step(name, params, states[name], batch)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
    for name, x in zip(names, jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(jfsdp.checkpoint.gather_leaf(state, name), x, rtol=1e-3, atol=3e-5, err_msg=name)
    refuses(lambda: model.train_step(generator_loss, tx), "alternate")


@pytest.mark.parametrize(
    ("one", "facts", "error"),
    [
        (optax.adam(1e-2), ("one=", "'one.**'"), ValueError),
        (("", optax.adam(1e-2)), ("one=", "'one.**'"), ValueError),
        ((None, optax.adam(1e-2)), ("one=", "'one.**'"), ValueError),
        ((3, optax.adam(1e-2)), ("one=", "3"), TypeError),
        (("generatr.**", optax.adam(1e-2)), ("one=", "'generatr.**'", "generator.layers"), ValueError),
    ],
)
def test_what_two_optimizers_train_is_said_and_found(one, facts, error):
    call = lambda: shard("auto", Gan, 4).abstract_state(jfsdp.optim.alternate(one=one))  # noqa: E731
    refuses(call, "alternate:", *facts, error=error)


def test_an_optimizer_is_given_what_apply_gradients_is():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    model = shard()
    state, grads, metrics = model.grads(token_loss, check_loss=False)(model.init(tx), make_batches(1, rows=12)[0])
    for _ in range(3):
        state = model.apply_gradients(state, grads, tx, value=metrics["loss"])
    assert float(state.opt_state[1].scale) < 1
    given: Any = {"value": metrics["loss"]}
    refuses(lambda: model.apply_gradients(state, grads, tx, only="first", **given), "apply_gradients:", "only=")
    refuses(lambda: model.apply_gradients(model.init(TX), grads, TX, **given), "apply_gradients:", "value=")
    refuses(lambda: model.apply_gradients(state, grads, tx), "reduce_on_plateau", "value")
    refuses(lambda: model.apply_gradients(state, grads, tx, steps=[1, 2]), "steps", "hashable")


def test_gradients_that_do_not_fit_are_refused_by_name():
    model = shard()
    state, grads, metrics = model.grads(token_loss, check_loss=False)(model.init(TX), make_batches(1, rows=12)[0])
    refuses(lambda: model.apply_gradients(state, (grads, metrics), TX), "apply_gradients takes")
    for wrong, told in ((optax.MaskedNode(), "no gradient"), (jnp.zeros(5), "(5,)")):
        grads["head"]["bias"] = nnx.Param(wrong)
        refuses(lambda: model.apply_gradients(state, grads, TX), "head.bias", told)


@pytest.mark.parametrize("form", thin(["flat", "auto", "offloaded"], 3))
def test_the_plain_model_comes_back_and_the_state_goes_on(form):
    model = shard(form, Tower)
    step = model.train_step(token_loss, SGD, check_loss=False)
    state, _ = step(model.init(SGD), make_batches(1, rows=12)[0])
    plain = model.to_flax(state)
    tokens = make_batches(1)[0]["tokens"]
    wanted = np.asarray(model.forward(lambda model, tokens: model(tokens))(state, tokens))
    step(state, make_batches(1, rows=12)[0])
    assert type(plain) is Tower
    np.testing.assert_allclose(plain(tokens), wanted, rtol=1e-5, atol=1e-6)


def test_a_state_goes_on_with_leaves_that_were_frozen():
    tx, batches = optax.adam(1e-2), make_batches(3, rows=12)
    frozen, free = shard(frozen="embed"), shard()
    state, step = frozen.init(tx), frozen.train_step(token_loss, tx, check_loss=False)
    for batch in batches[:2]:
        state, _ = step(state, batch)
    before = logical(state)
    state = free.adopt(state, tx)
    after = logical(state)
    new = {f"opt_state.0.{kind}.embed.embedding" for kind in ("mu", "nu")}
    assert after.keys() - before.keys() == new
    assert not any(after.pop(name).any() for name in new)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    trained = logical(free.train_step(token_loss, tx, check_loss=False)(state, batches[2])[0])
    assert int(trained["step"]) == 3 and int(trained["opt_state.0.count"]) == 3
    assert (trained["params.embed.embedding"] != after["params.embed.embedding"]).any()
    refuses(lambda: shard(num_devices=4).adopt(frozen.init(tx), tx), "float32[", "jfsdp.checkpoint.reshard")


def test_a_state_goes_on_with_adapters_beside_its_weights():
    tx, batches = optax.adam(1e-2), make_batches(2, rows=12)
    plain, adapted = shard(), shard(lora=jfsdp.LoRA("head.kernel", rank=2, dropout=0.5))
    state, step = plain.init(tx), plain.train_step(token_loss, tx, check_loss=False)
    state, _ = step(state, batches[0])
    before = {name: x for name, x in logical(state).items() if name.startswith("params.")}
    state = adapted.adopt(state, tx)
    after = logical(state)
    assert not [name for name, x in before.items() if (after[name] != x).any()]
    assert {name for name in after if ".lora_" in name and name.startswith("params.")} == {
        f"params.head.kernel.lora_{part}" for part in ("a", "b", "layer")
    }
    state, _ = adapted.train_step(token_loss, tx, check_loss=False)(state, batches[1])
    assert int(state.step) == 2 and int(state.model_state["lora_dropout.count"]) == 1
    refuses(lambda: plain.adopt(adapted.init(tx), tx), "unknown to the model", "lora_a")


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(5)(x))
        return linen.Dropout(0.5, deterministic=not train)(x)


def test_linen_variables_come_back_with_all_collections():
    source = Normed(), (jnp.ones((1, 7)),)
    model = fully_shard(source, mesh=jfsdp.make_mesh(devices=jax.devices()[:3]), min_size=1)
    x = np.random.default_rng(0).normal(size=(6, 7)).astype("f")
    state, grads, _ = model.grads(lambda model, x: model(x).var(), program="xla")(model.init(TX), x)
    before, state = state, model.apply_gradients(state, grads, TX)
    assert before.step.is_deleted()
    variables = model.to_flax(state)
    wanted = model.forward(lambda model, x: model(x, train=False))(state, x)
    assert jax.tree.structure(variables) == jax.tree.structure(Normed().init(jax.random.key(0), x))
    assert np.asarray(variables["batch_stats"]["BatchNorm_0"]["mean"]).any(), "the statistics of the loss are kept"
    found: Any = Normed().apply(variables, x, train=False)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    x[0, 0] = np.nan
    mean = np.asarray(variables["batch_stats"]["BatchNorm_0"]["mean"])
    skips = model.grads(lambda model, x: model(x).var(), program="xla", skip_nonfinite=True)
    state, grads, _ = skips(state, x)
    state = model.apply_gradients(state, grads, TX, skip_nonfinite=True)
    step = model.train_step(lambda model, x: model(x).var(), TX, program="xla", skip_nonfinite=True)
    state, _ = step(state, x)
    assert int(state.num_skipped) == 2
    np.testing.assert_array_equal(model.to_flax(state)["batch_stats"]["BatchNorm_0"]["mean"], mean)
