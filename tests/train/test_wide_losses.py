"""With `jax_enable_x64`, losses in float64 are summed, divided and reported in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.train.step.loss import as_loss
from tests.steps import fully_shard
from tests.thin import thin

DIM, ROWS = 8, 16
TX = optax.sgd(0.1)


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def deep(dtype, compute=None):
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(DIM, 3 * DIM, rngs=rngs, param_dtype=dtype, dtype=compute)
            self.down = nnx.Linear(3 * DIM, DIM, rngs=rngs, param_dtype=dtype, dtype=compute)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    return Deep


def loss(model, batch):
    errors = ((model(batch["x"]).astype(jnp.float64) - batch["y"]) ** 2).sum(-1) * batch["weights"]
    aux = {"size": errors.sum(), "largest": jfsdp.Max(errors.max()), "other": jfsdp.Mean(errors.sum(), len(errors))}
    return jfsdp.Loss(errors.sum(), batch["weights"].sum(), aux)


def make_batch():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, ROWS, DIM))
    return {"x": x, "y": y, "weights": rng.random(ROWS)}


@pytest.mark.parametrize(("program", "accumulate"), thin([("manual", 2), ("manual", 1), ("xla", 1), ("xla", 2)]))
def test_a_loss_in_float64_is_that_of_one_device(program, accumulate):
    model = fully_shard(deep(jnp.float64), min_size=1, program=program)
    state, metrics = model.train_step(loss, TX, accumulate=accumulate, check_loss=False)(model.init(TX), make_batch())

    plain = deep(jnp.float64)(nnx.Rngs(0))
    wanted, grads = nnx.jit(nnx.value_and_grad(lambda m: (f := loss(m, make_batch())).total / f.weight))(plain)
    found = loss(plain, make_batch())
    assert found.aux is not None
    expected = {
        "loss": wanted,
        "weight": found.weight,
        "grad_norm": optax.tree.norm(grads),
        "size": wanted,
        "largest": found.aux["largest"].maximum,
        "other": found.total / ROWS,
    }
    for name, value in expected.items():
        assert metrics[name].dtype == jnp.float64, name
        np.testing.assert_allclose(metrics[name], value, rtol=1e-12, err_msg=name)
    nnx.update(plain, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(plain, nnx.Param), grads))
    for path, value in nnx.to_flat_state(nnx.state(plain, nnx.Param)):
        np.testing.assert_allclose(state.params[".".join(map(str, path))], value[...], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("program", "low"), thin([("manual", "float32"), ("manual", "float16"), ("xla", "float16"), ("xla", "float32")])
)
def test_a_wide_loss_widens_no_gradient(program, low):
    policy = jfsdp.MixedPrecisionPolicy(low)
    model = fully_shard(deep(jnp.float32), min_size=1, program=program, mp_policy=policy)
    state = model.init(TX)
    before = jax.tree.map(lambda x: x.dtype, state)
    state, grads, metrics = model.grads(loss, accumulate=2)(state, make_batch())
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert jax.tree.map(lambda x: x.dtype, state) == before
    assert metrics["loss"].dtype == jnp.float64 and metrics["grad_norm"].dtype == jnp.float32


def test_a_loss_in_float32_stays_one():
    model = fully_shard(deep(jnp.float32, jnp.float32), min_size=1)
    _, metrics = model.train_step(lambda m, batch: m(batch["x"]).mean(), TX)(model.init(TX), make_batch())
    assert {x.dtype for x in metrics.values()} == {jnp.dtype("float32")}


def test_a_loss_in_low_precision_is_summed_in_float32():
    found = as_loss(jfsdp.Loss(jnp.bfloat16(1), 3, {"size": jnp.bfloat16(2)}))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
