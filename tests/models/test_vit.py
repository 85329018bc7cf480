"""The models of `models/vit.py`, against numpy and against each other."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jfsdp_models import losses, vit, vit_config  # pyright: ignore[reportMissingImports] (installed as an import hook)
from tests.refusals import refuses

SMALL = vit.ViTConfig(
    image_size=8,
    channels=2,
    patch_size=4,
    num_classes=7,
    dim=32,
    num_layers=3,
    num_heads=4,
    ffn_dim=48,
    dropout=0.0,
    attention="xla",
)
VARIANTS = {"published": {}, "mean": {"pool": "mean"}, "batch norm": {"norm": "batch"}}


def make_model(**overrides):
    """A small model with no parameter or statistic at its trivial initial value."""
    model = vit.ViT(dataclasses.replace(SMALL, **overrides), nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for path, variable in nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat))):
        noise = jnp.asarray(rng.normal(size=variable.shape) * 0.3, jnp.float32)
        variable[...] = jnp.abs(variable[...] + noise) + 0.2 if path[-1] == "var" else variable[...] + noise
    return model


def make_images(batch_size=5, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch_size, 8, 8, 2)), jnp.float32)


def make_batch(batch_size=5):
    return {"images": make_images(batch_size), "labels": jnp.arange(batch_size) % SMALL.num_classes}


def variables_of(model):
    flat = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return {".".join(map(str, path)): np.asarray(variable[...], np.float64) for path, variable in flat}


@nnx.jit
def train(model, images):
    return model(images)


@nnx.jit
def evaluate(model, images):
    return nnx.view(model, raise_if_not_found=False, deterministic=True, use_running_average=True)(images)


# ---- a second opinion in numpy, float64 ----


def numpy_norm(x, weights, name, stored):
    """LayerNorm; or where there are statistics BatchNorm, by those stored or by those of this batch [B T D]."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    if f"{name}.mean" in weights:
        mean, var = x.mean((0, 1)), x.var((0, 1))
        if stored:
            mean, var = weights[f"{name}.mean"], weights[f"{name}.var"]
    return (x - mean) / np.sqrt(var + 1e-6) * weights[f"{name}.scale"] + weights[f"{name}.bias"]


def numpy_linear(x, weights, name):
    return x @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]


def numpy_attention(x, weights, num_heads):
    """One image and one head at a time."""
    size, out = x.shape[-1] // num_heads, np.zeros_like(x)
    for row in range(len(x)):
        query, key, value = np.split(numpy_linear(x[row], weights, "attn.qkv"), 3, axis=-1)
        for head in range(num_heads):
            mine = slice(head * size, (head + 1) * size)
            scores = query[:, mine] @ key[:, mine].T / math.sqrt(size)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out[row, :, mine] = scores / scores.sum(-1, keepdims=True) @ value[:, mine]
    return numpy_linear(out, weights, "attn.out")


def numpy_patches(images, patch):
    """Cut patch by patch, row by row."""
    size = images.shape[1]
    corners = [(i, j) for i in range(0, size, patch) for j in range(0, size, patch)]
    return np.stack([images[:, i : i + patch, j : j + patch].reshape(len(images), -1) for i, j in corners], axis=1)


def numpy_vit(weights, config, images, stored=True):
    x = numpy_linear(numpy_patches(images, config.patch_size), weights, "embed.patch")
    if config.pool == "token":
        x = np.concatenate([np.repeat(weights["embed.class_token"], len(x), axis=0), x], axis=1)
    x = x + weights["embed.positions"]
    for i in range(config.num_layers):
        layer = {n.removeprefix("blocks."): w[i] for n, w in weights.items() if n.startswith("blocks.")}
        x = x + numpy_attention(numpy_norm(x, layer, "norm1", stored), layer, config.num_heads)
        wide = numpy_linear(numpy_norm(x, layer, "norm2", stored), layer, "mlp.up")
        gelu = wide * 0.5 * (1 + np.vectorize(math.erf)(wide / math.sqrt(2)))
        x = x + numpy_linear(gelu, layer, "mlp.down")
    x = numpy_norm(x, weights, "norm", stored)
    return numpy_linear(x[:, 0] if config.pool == "token" else x.mean(1), weights, "head")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_a_naive_numpy_model(variant):
    model = make_model(**VARIANTS[variant])
    images = make_images()
    expected = numpy_vit(variables_of(model), model.config, np.asarray(images, np.float64))
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(evaluate(model, images), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_batch_norm_uses_the_batch_in_training_and_the_stored_statistics_in_evaluation():
    model = make_model(norm="batch")
    before, images = variables_of(model), make_images()
    trained = numpy_vit(before, model.config, np.asarray(images, np.float64), stored=False)
    np.testing.assert_allclose(train(model, images), trained, rtol=0, atol=5e-5)
    assert not np.allclose(trained, numpy_vit(before, model.config, np.asarray(images, np.float64)), atol=1e-2)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_training_call_moves_the_stored_statistics_of_every_layer(stacked):
    model = make_model(norm="batch", stacked=stacked)
    before = variables_of(model)
    x = numpy_linear(numpy_patches(np.asarray(make_images(), np.float64), 4), before, "embed.patch")
    token = np.repeat(before["embed.class_token"], len(x), axis=0)
    x = np.concatenate([token, x], axis=1) + before["embed.positions"]
    train(model, make_images())
    after = variables_of(model)
    statistics = [name for name in before if name.endswith((".mean", ".var"))]
    assert len(statistics) == (6 if stacked else 14)
    for name in statistics:
        for old, new in zip(np.atleast_2d(before[name]), np.atleast_2d(after[name]), strict=True):
            assert not np.allclose(old, new, atol=1e-4), f"{name} did not move"
    first = lambda values, name: values[f"blocks.{name}"][0] if stacked else values[f"blocks.0.{name}"]  # noqa: E731
    expected = 0.9 * first(before, "norm1.mean") + 0.1 * x.mean((0, 1))
    np.testing.assert_allclose(first(after, "norm1.mean"), expected, rtol=0, atol=1e-5)
    expected = 0.9 * first(before, "norm1.var") + 0.1 * x.var((0, 1))
    np.testing.assert_allclose(first(after, "norm1.var"), expected, rtol=0, atol=1e-5)


def test_evaluation_loss_changes_nothing_in_the_model():
    model = make_model(norm="batch", dropout=0.3)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat, nnx.RngCount))))
    evaluation_loss = nnx.jit(vit.evaluation_loss)
    first = evaluation_loss(model, make_batch())
    plain = losses.cross_entropy(evaluate(model, make_images()), make_batch()["labels"], jnp.ones(5))
    assert first.total == pytest.approx(float(plain.total), rel=1e-6)
    assert first.total == evaluation_loss(model, make_batch()).total
    after = nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat, nnx.RngCount)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    loss = nnx.jit(losses.classification_loss)
    trained = loss(model, make_batch()).total
    assert trained != loss(model, make_batch()).total, "the model must still be in training mode"


@pytest.mark.parametrize("variant", ["batch norm"])
def test_stacked_and_listed_blocks_are_the_same_model(variant):
    stacked, listed = (
        vit.ViT(dataclasses.replace(SMALL, **VARIANTS[variant], stacked=stacked), nnx.Rngs(7))
        for stacked in (True, False)
    )
    stack, flat = variables_of(stacked), variables_of(listed)
    for name, value in stack.items():
        if name.startswith("blocks."):
            rest = name.removeprefix("blocks.")
            np.testing.assert_array_equal(value, [flat[f"blocks.{i}.{rest}"] for i in range(SMALL.num_layers)])
        else:
            np.testing.assert_array_equal(value, flat[name])
    for model in (stacked, listed):
        model.head.kernel[...] = jnp.ones_like(model.head.kernel[...])
    np.testing.assert_allclose(evaluate(stacked, make_images()), evaluate(listed, make_images()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stacked", [True, False])
def test_dropout_masks_differ_between_calls_and_layers(stacked):
    model = make_model(dropout=0.5, stacked=stacked)
    images = make_images()
    assert not np.allclose(train(model, images), train(model, images), atol=0.1)
    state = nnx.to_flat_state(nnx.state(model, nnx.RngKey))
    keys = [np.asarray(jax.random.key_data(key[...])).reshape(-1, 2) for _, key in state]
    distinct = {tuple(row) for rows in keys for row in rows}
    assert len(distinct) == 1 + 2 * SMALL.num_layers, "each dropout of each layer draws from its own key"


@pytest.mark.parametrize("variant", ["mean", "batch norm"])
def test_bfloat16_weights_keep_activations_in_bfloat16(variant):
    model = make_model(**VARIANTS[variant])
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    half = nnx.merge(graphdef, jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), rest)
    seen = []

    class Spy(vit.EncoderBlock):
        def __call__(self, x):
            seen.append(x.dtype)
            return super().__call__(x)

    half.blocks.__class__ = Spy
    assert half(make_images()).dtype == jnp.bfloat16
    assert seen and set(seen) == {jnp.dtype(jnp.bfloat16)}
    statistics = nnx.to_flat_state(nnx.state(half, nnx.BatchStat))
    assert all(variable[...].dtype == jnp.float32 for _, variable in statistics)


def test_images_of_another_shape_are_refused():
    model = nnx.eval_shape(lambda: vit.ViT(SMALL, nnx.Rngs(0)))
    refuses(lambda: model(jnp.zeros((1, 8, 8, 3))), "[B 8 8 2]", "image_size=", "channels=")


def test_the_loss_sums_the_weighted_cross_entropy_and_counts_what_is_right():
    logits = jnp.asarray([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0]], jnp.bfloat16)
    batch = {"images": logits, "labels": jnp.asarray([0, 2, 2]), "weights": jnp.asarray([1.0, 0.5, 0.0])}
    sums = losses.classification_loss(lambda images: images, batch)
    expected = (math.log(math.e**2 + 2) - 2) + 0.5 * math.log(math.e**3 + 2)
    assert float(sums.total) == pytest.approx(expected, rel=1e-6)
    assert (float(sums.weight), float(sums.aux["correct"])) == (1.5, 1.0)
    assert losses.classification_loss(lambda images: images, {**batch, "weights": None}).weight == 3
    assert sums.total.dtype == jnp.float32
    outside = losses.classification_loss(lambda images: images, batch | {"labels": jnp.asarray([0, 3, 2])})
    assert np.isnan(outside.total)


def test_decay_takes_kernels_only():
    params = {name: np.ones(value.shape, np.float32) for name, value in variables_of(make_model()).items()}
    tx = vit.adamw(1.0)
    zeros = {name: jnp.zeros(value.shape) for name, value in params.items()}
    updates, _ = jax.jit(lambda params: tx.update(zeros, tx.init(params), params))(params)
    decayed = {name for name, update in updates.items() if np.any(update)}
    assert decayed == {name for name in params if name.endswith(".kernel")}


def test_flops_follow_the_stated_convention():
    config = vit_config.PRESETS["vit-b16"]
    matmuls = 12 * (4 * 768**2 + 2 * 768 * 3072) * 197 + 196 * 768 * 768 + 768 * 1000
    assert vit_config.flops_per_image(config) == 6 * matmuls + 12 * 12 * 768 * 197**2
    # The usual count for ViT-B/16 at 224 is 17.5 GMACs forward; forward and backward are six FLOPs per MAC.
    assert vit_config.flops_per_image(config) / 6 == pytest.approx(17.5e9, rel=0.01)
