"""Float16: the scale of the loss moves as it should, and training equals float32 but for rounding."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.loss_scale import LossScale
from tests import reference
from tests.models_small import Block, Lookup, Tower, make_batches, token_loss
from tests.refusals import refuses
from tests.sharding import fully_shard
from tests.thin import thin

TX, SGD = optax.adamw(1e-2, eps=1e-4), optax.sgd(0.1)


def tower(rngs):
    return Tower(rngs, stacked=False, num_layers=1)


def make(source: Any = Lookup, strategy="full_shard", param_dtype="float16", loss_scale: LossScale | None = None):
    return fully_shard(
        source,
        strategy=strategy,
        units=[Block] * (source is tower),
        min_size=20,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype, loss_scale=loss_scale),
    )


def train(model, num=4, tx=TX, **step_options):
    state = model.init(tx)
    step = model.train_step(token_loss, tx, check_loss=False, **step_options)
    metrics = []
    for batch in make_batches(num):
        state, step_metrics = step(state, batch)
        metrics.append({name: float(x) for name, x in step_metrics.items()})
    return state, metrics


def test_the_scale_grows_after_an_interval_and_shrinks_at_an_overflow():
    def scales(interval, *finite):
        scale = LossScale(initial=4.0, interval=interval, minimum=1.0)
        states = itertools.accumulate(map(jnp.asarray, finite), scale.update, initial=scale.init())
        return [float(state["scale"]) for state in states][1:]

    found = scales(2, True, True, True, False, False, False, True, True)
    assert found == [4.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 2.0]
    assert scales(3, True, False, True, True, True) == [4.0, 2.0, 2.0, 2.0, 4.0], "of finite steps in a row"


def test_the_scale_never_becomes_infinite():
    scale = LossScale(initial=2.0**127, interval=1)
    assert float(scale.update(scale.init(), jnp.asarray(True))["scale"]) == 2.0**127


@pytest.mark.parametrize(
    "bad", [{"initial": 0.5}, {"growth": 0.5}, {"backoff": 0.0}, {"interval": 0}, {"minimum": 0.0}]
)
def test_settings_that_cannot_be_are_refused(bad):
    refuses(lambda: LossScale(**bad), "initial >= minimum > 0")


@pytest.mark.parametrize(
    ("strategy", "options"),
    thin(
        [
            ("zero1", {"accumulate": 2}),
            ("ddp", {"sync": "last"}),
            ("full_shard", {}),
            ("full_shard", {"accumulate": 2}),
        ],
        4,
    ),
)
def test_float16_trains_like_float32(strategy, options, tmp_path):
    """And the scale is saved and restored."""
    wanted = reference.train(tower, token_loss, SGD, make_batches(4))
    model = make(tower, strategy, loss_scale=LossScale(initial=2.0**10))
    state, found = train(model, tx=SGD, **options)
    assert all(m["loss_scale"] == 2.0**10 and m["num_skipped"] == 0 for m in found)
    np.testing.assert_allclose([m["loss"] for m in found], wanted.losses, rtol=2e-3)
    np.testing.assert_allclose([m["grad_norm"] for m in found], wanted.grad_norms, rtol=2e-2)
    jfsdp.checkpoint.save(tmp_path / "one", state)
    again = jfsdp.checkpoint.restore(tmp_path / "one", like=model.abstract_state(SGD))
    assert jax.tree.map(float, again.loss_scale) == {"scale": 2.0**10, "num_finite": 4.0}


def test_an_overflow_changes_nothing_but_the_scale_and_the_count():
    model = make(loss_scale=LossScale(initial=2.0**40))
    before = {name: np.asarray(x) for name, x in model.init(TX).params.items()}
    state, metrics = train(model, num=2)
    assert [m["num_skipped"] for m in metrics] == [1, 2]
    assert [m["loss_scale"] for m in metrics] == [2.0**40, 2.0**39]
    assert int(state.opt_state[0].count) == 0 and int(state.step) == 2
    for name, value in state.params.items():
        np.testing.assert_array_equal(value, before[name])


def test_the_scale_keeps_gradients_that_float16_does_not_hold():
    """A gradient below float16's smallest number would be zero."""

    def tiny(model, batch):
        loss = token_loss(model, batch)
        return jfsdp.Loss(loss.total * 1e-7, loss.weight)

    model, batch = make(loss_scale=LossScale(initial=2.0**16)), make_batches(1)[0]
    _, metrics = model.train_step(tiny, SGD, check_loss=False)(model.init(SGD), batch)
    grads = nnx.jit(nnx.grad(lambda model: (loss := tiny(model, batch)).total / loss.weight))(Lookup(nnx.Rngs(0)))
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=0.05)


def test_other_precisions_carry_no_scale():
    assert make(param_dtype="bfloat16").abstract_state(TX).loss_scale == {}


def test_float32_reductions_of_bfloat16_gradients_are_had_by_reducing_once():
    policy = jfsdp.MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")
    model = fully_shard(tower, strategy="zero1", units=[Block], mp_policy=policy)
    step = model.train_step(token_loss, TX, sync="last")
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batches(1)[0])
    text = step.lower(model.abstract_state(TX), batch).as_text()
    reductions = [line for line in text.splitlines() if "}) : (tensor<" in line]
    assert any("reduce_scatter" in line for line in text.splitlines())
    assert reductions and not any("bf16" in line for line in reductions)
