"""Matrix products in float8: values and gradients against NumPy, on every mesh and number of microbatches alike."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jfsdp
from jfsdp.float8 import NOT_CHOSEN, TOKENS, check_devices
from jfsdp.layout.wire import Wire
from jfsdp.trainer.job import Job, find_job
from jfsdp.trainer.options import ShardingOptions, shard_job
from tests.models_small import Scale, make_batches, token_loss
from tests.refusals import refuses
from tests.sharding import fully_shard

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
float8 = jfsdp.float8_dot_general


def rounded(x, dtype, dims):
    top = float(ml_dtypes.finfo(dtype).max)
    amax = np.abs(x).max(dims, keepdims=True).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.where(amax == 0, top, amax) / top))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def multiply(x, w):
    return float8(x, w, (((x.ndim - 1,), (0,)), ((), ())))


@pytest.mark.parametrize("rows", [1, 3])
def test_products_and_gradients_are_those_of_rounded_operands(rows):
    x, w, g = normal(0, rows, 32, 64), normal(1, 64, 48), normal(2, rows, 32, 48)
    y, pull = jax.vjp(multiply, jnp.asarray(x), jnp.asarray(w))
    dx, dw = pull(jnp.asarray(g))
    x8, w8, g8 = rounded(x, E4M3, (1, 2)), rounded(w, E4M3, (0, 1)), rounded(g, E5M2, (1, 2))
    for found, expected in ((y, x8 @ w8), (dx, g8 @ w8.T), (dw, np.einsum("btd,btf->df", x8, g8))):
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())


def test_operands_reach_every_product_in_float8():
    def loss(x, w):
        return jnp.sum(multiply(x, w).astype(jnp.float32) ** 2)

    shapes = (jax.ShapeDtypeStruct((2, 32, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 48), jnp.bfloat16))
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) == 3 and all("f8E4M3FN" in line and "-> tensor" in line for line in dots)
    assert sum("f8E5M2" in line for line in dots) == 2
    assert all(line.rstrip().endswith("bf16>") for line in dots)


def test_rows_without_tokens_have_the_gradient_of_the_weight_in_their_dtype():
    x, w, g = normal(0, 32, 64), normal(1, 64, 48), normal(2, 32, 48)
    y, pull = jax.vjp(multiply, jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(y, rounded(x, E4M3, 1) @ rounded(w, E4M3, (0, 1)), atol=1e-4)
    np.testing.assert_allclose(pull(jnp.asarray(g))[1], x.T @ g, atol=1e-4)


def test_layers_with_several_dims_multiply_alike():
    def layer(**options):
        return nnx.LinearGeneral((4, 16), (2, 32), axis=(-2, -1), rngs=nnx.Rngs(0), **options)

    x, weights = jnp.asarray(normal(0, 4, 16, 4, 16)), jnp.asarray(normal(1, 4, 16, 2, 32))
    loss = lambda model, x: jnp.sum(model(x) * weights)  # noqa: E731
    found, expected = (
        jax.tree.leaves(nnx.grad(loss, argnums=(0, 1))(model, x)) for model in (layer(dot_general=float8), layer())
    )
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert jnp.linalg.norm(one - other) / jnp.linalg.norm(other) < 0.1


@pytest.mark.parametrize(
    ("x", "w", "dims"),
    [
        ((2, 16, 64), (64, 40), (((2,), (0,)), ((), ()))),
        ((2, 16, 24), (24, 32), (((2,), (0,)), ((), ()))),
        ((2, 16, 32), (2, 32, 16), (((2,), (1,)), ((0,), (0,)))),
        ((32,), (32, 16), (((0,), (0,)), ((), ()))),
    ],
)
def test_other_products_are_not_in_float8(x, w, dims):
    x, w = normal(0, *x), normal(1, *w)
    np.testing.assert_array_equal(float8(x, w, dims), jax.lax.dot_general(x, w, dims))


def test_values_that_are_not_finite_stay_so():
    x = jnp.ones((2, 16, 16)).at[0, 3, 4].set(jnp.inf)
    found = multiply(x, jnp.ones((16, 16)))
    assert not jnp.isfinite(found[0]).any() and (found[1] == 16).all()


def test_a_weight_that_was_gathered_in_float8_has_the_same_codes():
    w = jnp.asarray(normal(0, 64, 48))
    codec = Wire("float8").codec
    scale = codec.to_scales(jnp.abs(w).max())
    codes, _ = codec.encode(w, scales=scale)
    decoded = codec.decode(codes, scale, jnp.bfloat16)
    x = jnp.asarray(normal(1, 2, 16, 64))
    np.testing.assert_array_equal(multiply(x, decoded.astype(jnp.float32)), multiply(x, w))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = Scale(32)
        self.up = nnx.Linear(32, 64, rngs=rngs, dot_general=float8)
        self.down = nnx.Linear(64, 32, rngs=rngs, dot_general=float8)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(37, 32, rngs=rngs)
        # Few tokens are large, so that the parts of a row have different scales.
        self.embed.embedding[...] *= jnp.exp2(jnp.arange(37) % 13 - 8.0)[:, None]
        self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)
        self.head = nnx.Linear(32, 37, rngs=rngs)

    def __call__(self, tokens):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(self.embed(tokens), self.blocks))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(32, dot_general=float8, name="down")(
            linen.relu(linen.Dense(64, dot_general=float8, name="up")(x))
        )


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(37, 32, name="embed")(tokens)
        for place in range(2):
            x = LinenBlock(name=f"blocks_{place}")(x)
        return linen.Dense(37, name="head")(x)


MODELS = {
    "nnx": (Net, Block),
    "linen": ((LinenNet(), (jax.ShapeDtypeStruct((1, 16), jnp.int32),)), LinenBlock),
}


def gradients(model, sizes, *, gather=None, options=None, **step_options):
    source, unit = MODELS[model]
    num = int(np.prod(list(sizes.values())))
    mesh = jfsdp.make_mesh(devices=jax.devices()[:num], **sizes)
    policy = jfsdp.MixedPrecisionPolicy(gather_wire=gather)
    sharded = fully_shard(source, mesh=mesh, units=[unit], mp_policy=policy, min_size=0, **(options or {}))
    batch = make_batches(1, length=24)[0]
    step = sharded.grads(token_loss, **step_options)
    _, grads, metrics = step(sharded.init(optax.sgd(0.1)), batch)
    shapes = {leaf.path: tuple(map(slice, leaf.shape)) for leaf in sharded.layout.leaves}
    flat = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(grads) if model == "nnx" else grads)[0]
    found = {".".join(str(key.key) for key in path): np.asarray(x) for path, x in flat}
    return {path: x[shapes[path]] for path, x in found.items()}, float(metrics["loss"]), step


@functools.cache
def one_device(model):
    return gradients(model, {"fsdp": 1})


TENSOR = {"cuts": {"**.up.kernel": (1, "tensor"), "**.up.bias": (0, "tensor"), "**.down.kernel": (0, "tensor")}}


@pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")
@pytest.mark.parametrize(
    ("model", "sizes", "options", "step_options"),
    [
        pytest.param("nnx", {"fsdp": 1}, {}, {"accumulate": 4}, marks=pytest.mark.proof),
        ("nnx", {"fsdp": 8}, {}, {"accumulate": 2}),
        ("nnx", {"fsdp": 4}, {"remat": "dots"}, {"program": "xla"}),
        pytest.param("nnx", {"replica": 2, "fsdp": 2}, {"remat": "none"}, {}, marks=pytest.mark.proof),
        ("nnx", {"fsdp": 2, "tensor": 2}, TENSOR, {}),
        ("nnx", {"fsdp": 2, "context": 2}, {}, {"check_loss": False}),
        ("nnx", {"fsdp": 2, "pipe": 2}, {}, {"accumulate": 2}),
        ("linen", {"fsdp": 4}, {}, {"accumulate": 2}),
        pytest.param("linen", {"fsdp": 4}, {}, {"program": "xla"}, marks=pytest.mark.proof),
    ],
)
def test_results_do_not_depend_on_mesh_and_microbatches(model, sizes, options, step_options):
    expected, loss, _ = one_device(model)
    found, other, _ = gradients(model, sizes, options=options, **step_options)
    assert other == pytest.approx(loss, rel=1e-6)
    for path, grad in expected.items():
        assert np.abs(found[path] - grad).max() < 1e-6 * np.abs(grad).max(), path


def test_gathers_and_products_in_float8_agree():
    expected, loss, step = one_device("nnx")
    found, other, _ = gradients("nnx", {"fsdp": 4}, gather="float8")
    assert other == pytest.approx(loss, rel=1e-6)
    assert all(np.abs(found[path] - grad).max() < 1e-6 * np.abs(grad).max() for path, grad in expected.items())
    assert dict(step.spec.products) == {"blocks.up.kernel": "", "blocks.down.kernel": "", "head.kernel": NOT_CHOSEN}


def test_a_step_knows_which_products_are_not_in_float8():
    model = fully_shard(MODELS["nnx"][0], mesh=jfsdp.make_mesh(fsdp=1, devices=jax.devices()[:1]), units=[Block])
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4,), x.dtype), make_batches(1)[0])
    assert dict(model.grads(token_loss).resolve(batch).products)["blocks.up.kernel"] == TOKENS


def test_the_option_needs_a_model_and_a_gpu_with_float8():
    mesh = jfsdp.make_mesh(fsdp=1, devices=jax.devices()[:1])
    options = ShardingOptions(model="llama-tiny", matmul="float8")
    model = shard_job(options, find_job("llama-tiny"), mesh)
    step = model.train_step(find_job("llama-tiny").loss, optax.sgd(0.1))
    products = dict(step.resolve(find_job("llama-tiny").batch(1, 32)).products)
    assert [path for path, why in products.items() if why] == ["lm_head.kernel"] and len(products) == 8
    job = Job(
        model=Net, loss=token_loss, batch=lambda rows, length: None, units=[Block], optimizer=optax.sgd, name="own"
    )
    refuses(lambda: shard_job(options, job, mesh), "--matmul", "own", "float8_dot_general")
    refuses(lambda: shard_job(ShardingOptions(matmul="fp8"), job, mesh), "--matmul", "fp8", "float8")
    adapted = ShardingOptions(matmul="float8", lora=((("rank", 4),),))
    refuses(lambda: shard_job(adapted, find_job("llama-tiny"), mesh), "--matmul", "--lora")


def test_gpus_without_float8_are_refused():
    class Device:
        compute_capability, device_kind = "8.0", "NVIDIA A100"

    class FakeMesh:
        devices = np.array([Device()])

    refuses(lambda: check_devices(FakeMesh()), "A100", "8.0", "8.9", "--matmul")
    Device.compute_capability = "9.0"
    check_devices(FakeMesh())
