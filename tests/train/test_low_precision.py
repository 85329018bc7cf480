"""Averages of parameters, and moments in bfloat16 with stochastic rounding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.train.update.low_precision import round_stochastically
from tests import reference
from tests.models_small import Lookup, make_batches, token_loss
from tests.refusals import refuses, refusing
from tests.sharding import fully_shard
from tests.thin import thin
from tests.ways import WAYS

RATE = 1e-2


def make(num_devices: int = 8, **options: Any) -> jfsdp.ShardedModel:
    mesh = jfsdp.make_mesh(devices=jax.devices()[:num_devices])
    options["strategy"] = WAYS[options.get("strategy", "full_shard")]
    return fully_shard(Lookup, mesh=mesh, min_size=20, **options)


def train(model: jfsdp.ShardedModel, tx: Any, num: int = 3) -> jfsdp.TrainState:
    state, step = model.init(tx), model.train_step(token_loss, tx, check_loss=False)
    for batch in make_batches(num, rows=24):
        state, _ = step(state, batch)
    return state


@functools.cache
def oracle(tx: Any, num: int = 3) -> Any:
    wanted = reference.train(Lookup, token_loss, tx, make_batches(num, rows=24))
    return wanted.params, wanted.opt_state


def test_rounding_is_right_on_average_and_takes_only_the_two_neighbours():
    x = jnp.full((100_000,), 1 + 0.25 / 128)  # a quarter of the way between two bfloat16 numbers
    rounded = np.asarray(round_stochastically(x, jax.random.key(0)).astype(jnp.float32))
    assert set(np.unique(rounded)) == {1.0, 1 + 1 / 128}
    np.testing.assert_allclose((rounded > 1).mean(), 0.25, atol=0.005)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, np.inf, -np.inf, np.nan])
def test_what_bfloat16_holds_is_not_changed(value):
    x = jnp.full((64,), value, jnp.float32)
    np.testing.assert_array_equal(round_stochastically(x, jax.random.key(1)).astype(jnp.float32), x)


def test_a_nan_whose_payload_is_in_the_lower_half_stays_one():
    bits = jnp.full((64,), 0x7F800001, jnp.uint32)
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    assert np.isnan(np.asarray(round_stochastically(x, jax.random.key(1)), np.float32)).all()


def test_to_the_nearest_a_second_moment_never_decays_and_stochastically_it_does():
    params, steps = {"w": jnp.zeros(4096)}, 1000
    grads = {"w": jnp.zeros(4096)}
    tx = jfsdp.optim.low_precision_state(optax.scale_by_adam(b2=0.999))

    def decay(_: Any, nu: jax.Array) -> jax.Array:
        return (0.999 * nu.astype(jnp.float32)).astype(jnp.bfloat16)

    assert float(jax.lax.fori_loop(0, steps, decay, jnp.ones((), jnp.bfloat16))) == 1.0
    state: Any = tx.init(params)
    assert state.inner.nu["w"].dtype == jnp.bfloat16
    state = state._replace(inner=state.inner._replace(nu={"w": jnp.ones(4096, jnp.bfloat16)}))
    state = jax.lax.fori_loop(0, steps, lambda _, state: tx.update(grads, state, params)[1], state)
    np.testing.assert_allclose(np.asarray(state.inner.nu["w"], np.float32).mean(), 0.999**steps, rtol=0.01)


@pytest.mark.parametrize("num_devices", thin([3, 8]))
def test_moments_in_bfloat16_are_those_of_one_device(num_devices):
    """The same bits are drawn, padding or not; a rounding may still turn over where the gradient's last bit differs."""
    tx = jfsdp.optim.low_precision_state(optax.adam(RATE), seed=5)
    state = train(make(num_devices), tx)
    params, arrays = oracle(tx)
    for name, wanted in params.items():
        assert np.abs(jfsdp.checkpoint.gather_leaf(state, name) - wanted).max() < 0.01 * RATE * 3, name
    for name, wanted in arrays.items():
        found = np.asarray(jfsdp.checkpoint.gather_leaf(state, f"opt_state.{name}"), np.float32)
        wanted = np.asarray(wanted, np.float32)
        assert (found == wanted).mean() > 0.98, name
        assert np.abs(found - wanted).max() <= 2**-7 * np.abs(wanted).max(), name


def test_the_same_step_rounds_alike_and_another_seed_step_or_leaf_does_not():
    params = dict.fromkeys("vw", jax.random.normal(jax.random.key(0), (4096,)))
    grads = jax.tree.map(lambda x: x * 0.3, params)

    def mu(seed: int, steps: int = 1, leaf: str = "w") -> bytes:
        tx = jfsdp.optim.low_precision_state(optax.trace(0.0), seed=seed)
        state: Any = tx.init(params)
        for _ in range(steps):
            state = tx.update(grads, state, params)[1]
        return np.asarray(state.inner.trace[leaf]).tobytes()

    assert mu(0) == mu(0) != mu(1)
    assert mu(0) != mu(0, leaf="v")
    assert mu(0) != mu(0, steps=2)  # without decay the value is the same, the rounding is not


def test_only_parameter_shaped_float32_arrays_are_stored_low():
    tx = jfsdp.optim.low_precision_state(
        optax.chain(optax.adafactor(1e-2, min_dim_size_to_factor=8), optax.adam(RATE, mu_dtype="float16"))
    )
    state = make().abstract_state(tx)
    dtypes = {r.name: x.dtype for r, x in zip(state.roles.arrays, jax.tree.leaves(state.opt_state), strict=True)}
    assert dtypes["opt_state.inner.1.0.nu.embed.embedding"] == dtypes["opt_state.inner.0.0.v.head.bias"] == jnp.bfloat16
    assert dtypes["opt_state.inner.1.0.mu.embed.embedding"] == jnp.float16
    assert dtypes["opt_state.inner.0.0.v_row.embed.embedding"] == jnp.float32
    assert dtypes["opt_state.inner.1.0.count"] == jnp.int32


def test_states_in_bfloat16_take_half_the_bytes():
    full, low = (
        make().abstract_state(tx) for tx in (optax.adam(RATE), jfsdp.optim.low_precision_state(optax.adam(RATE)))
    )
    sizes = [
        sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(s.opt_state))
        for s in (full, low)
    ]
    assert sizes[0] - 4 == 2 * (sizes[1] - 8)


def test_low_precision_is_refused_for_other_dtypes_and_without_parameters():
    with refusing("'float16'", "'bfloat16'"):
        jfsdp.optim.low_precision_state(optax.adam(RATE), "float16")
    tx = jfsdp.optim.low_precision_state(optax.adam(RATE))
    refuses(lambda: tx.update({}, tx.init({})), "needs parameters")


EMA = optax.chain(optax.adam(RATE), jfsdp.optim.track_ema(0.8))
PLACES = [("zero1", "bfloat16"), ("full_shard", None), ("zero1", None), ("all", None)]


@pytest.mark.parametrize(("strategy", "param_dtype"), thin(PLACES, 4))
def test_a_state_with_averages_computes_with_them_and_training_goes_on(strategy, param_dtype):
    model = make(strategy=strategy, mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype))
    step = model.train_step(mean_loss, EMA, check_loss=False)
    state = model.init(EMA)
    averages = {name: np.asarray(jfsdp.checkpoint.gather_leaf(state, name)) for name in state.params}
    for batch in make_batches(3, rows=24):
        state, _ = step(state, batch)
        averages = {
            n: 0.8 * ema + 0.2 * np.asarray(jfsdp.checkpoint.gather_leaf(state, n)) for n, ema in averages.items()
        }
    averaged = jfsdp.optim.with_ema(state)
    for name, wanted in averages.items():
        np.testing.assert_allclose(
            jfsdp.checkpoint.gather_leaf(averaged, name), wanted, rtol=1e-5, atol=1e-6, err_msg=name
        )
    for x, y in zip(jax.tree.leaves(averaged), jax.tree.leaves(state), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
    for name, copy in averaged.work.items():
        np.testing.assert_array_equal(copy, averaged.params[name].astype(param_dtype))
    evaluate = model.forward(lambda model, scale: (model.head.kernel[...] ** 2).sum() * scale)
    wanted = (averages["head.kernel"].astype(param_dtype or np.float32).astype(np.float32) ** 2).sum()
    np.testing.assert_allclose(evaluate(averaged, 1.0), wanted, rtol=1e-2 if param_dtype else 1e-5)
    step(state, make_batches(1, rows=24)[0])
    assert not any(x.is_deleted() for x in jax.tree.leaves((averaged.params, averaged.work)))


@pytest.mark.parametrize(("strategy", "param_dtype"), [("full_shard", None), ("zero1", "bfloat16")])
def test_a_schedule_free_state_is_evaluated_with_its_averages(strategy, param_dtype):
    tx = optax.contrib.schedule_free_sgd(RATE, b1=0.8)
    model = make(strategy=strategy, mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype))
    step, state = model.train_step(mean_loss, tx, check_loss=False), model.init(tx)
    for batch in make_batches(3, rows=24):
        state, _ = step(state, batch)
    averaged = jfsdp.optim.with_ema(state)
    for name in state.params:
        z, y, x = (
            np.asarray(jfsdp.checkpoint.gather_leaf(*of))
            for of in ((state, f"opt_state.z.{name}"), (state, name), (averaged, name))
        )
        assert name == "head.bias" or not np.array_equal(x, y)
        np.testing.assert_allclose(x, (y - 0.2 * z) / 0.8, rtol=1e-5, atol=1e-6)
    for x, y in zip(jax.tree.leaves(averaged), jax.tree.leaves(state), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)


def mean_loss(model: Any, batch: Any) -> jax.Array:
    """A loss that a scan in two dtypes does not stand in the way of."""
    return (model.embed(batch["tokens"]) @ model.head.kernel[...]).astype(jnp.float32).var()


def test_averages_of_low_precision_parameters_are_kept_in_float32():
    ema = jfsdp.optim.track_ema(0.999).init({"w": jnp.ones(3, jnp.bfloat16)}).ema["w"]  # type: ignore[union-attr]
    assert ema.dtype == jnp.float32


AFTER = {
    "scaled after": optax.chain(optax.adam(RATE), jfsdp.optim.track_ema(0.8), optax.scale(0.5)),
    "first": optax.chain(jfsdp.optim.track_ema(0.8), optax.adam(RATE)),
    "twice": optax.chain(jfsdp.optim.track_ema(0.8), optax.adam(RATE), jfsdp.optim.track_ema(0.8)),
    "inside": optax.chain(jfsdp.optim.low_precision_state(EMA), optax.add_decayed_weights(0.1)),
    "behind a mask": optax.chain(
        optax.masked(jfsdp.optim.track_ema(0.8), lambda p: jax.tree.map(lambda _: True, p)), optax.sgd(RATE)
    ),
    "in a condition": optax.apply_if_finite(EMA, 3),
}


@pytest.mark.parametrize("place", AFTER)
def test_averages_of_updates_that_are_changed_afterwards_are_refused(place):
    model, tx = make(), AFTER[place]
    facts = "track_ema", "optax.chain", "jfsdp.optim.track_ema(decay"
    refuses(lambda: model.train_step(mean_loss, tx), *facts)
    if place == "first":
        state = model.init(tx)
        grads = model.model.tree.build(model.trained_arrays(state))  # any numbers will do
        refuses(lambda: model.apply_gradients(state, grads, tx), "track_ema")


def test_averages_may_be_followed_by_what_changes_no_update():
    some = optax.masked(jfsdp.optim.track_ema(0.8), lambda p: jax.tree.map(lambda _: True, p))
    of_part = optax.partition({"a": EMA}, lambda p: jax.tree.map(lambda _: "a", p))
    for tx in (optax.chain(EMA, optax.identity()), optax.chain(optax.adam(RATE), some), of_part):
        make().train_step(mean_loss, tx)


def test_averages_are_refused_where_they_cannot_be():
    refuses(lambda: jfsdp.optim.track_ema(1), "decay=1")
    ema = jfsdp.optim.track_ema(0.9)
    refuses(lambda: ema.update({}, ema.init({})), "needs the parameters")
    for tx in (optax.sgd(RATE), optax.chain(jfsdp.optim.track_ema(0.9), jfsdp.optim.track_ema(0.99))):
        with refusing("jfsdp.optim.track_ema"):
            jfsdp.optim.with_ema(make().init(tx))
