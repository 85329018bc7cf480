"""Computation on chunks of a row equals computation on the whole row, and needs less memory."""

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.jaxprs import all_eqns
from jfsdp_models.chunks import by_chunks  # pyright: ignore[reportMissingImports]
from jfsdp_models.llama import DecoderLayer  # pyright: ignore[reportMissingImports]
from jfsdp_models.losses import loss_of_model  # pyright: ignore[reportMissingImports]
from tests.models.test_llama import SMALL, VARIANTS, make_model, make_tokens
from tests.refusals import refuses

DIM, WIDE, LENGTH = 6, 20, 24


def weights(dtype):
    shapes = {"scale": (DIM,), "up": (DIM, WIDE), "down": (WIDE, DIM)}
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, dtype) for name, shape in shapes.items()}


def rows(dtype, length=LENGTH, batch_size=2):
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.normal(size=(n, length, DIM)), dtype) for n in (batch_size, 1))


def total(weights, x, shift, chunk):
    """Sum two results of a norm and an MLP, one of another shape, over `chunk` tokens at a time."""

    def layer(x, shift):
        normed = x * weights["scale"] / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) + shift
        hidden = jnp.tanh(normed @ weights["up"])
        return {"out": x + hidden @ weights["down"], "heads": hidden.reshape(*x.shape[:2], 4, -1)}

    found = by_chunks(layer, chunk, x, shift)
    places = jnp.arange(x.shape[1])[None, :, None]
    return jnp.sum(jnp.sin(found["out"] * places)) + jnp.sum(found["heads"][:, :, 1] * places)


@pytest.mark.parametrize("chunk", [1, 8, 12])
def test_values_and_gradients_equal_those_of_whole_rows(chunk):
    with jax.enable_x64(True):
        given = (weights(jnp.float64), *rows(jnp.float64))
        run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)), static_argnums=3)
        found, wanted = run(*given, chunk), run(*given, None)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), found, wanted)


def test_no_wide_array_has_a_whole_row():
    given = (weights(jnp.float32), *rows(jnp.float32))
    for chunk, largest in ((None, LENGTH), (8, 8)):
        jaxpr = jax.make_jaxpr(jax.grad(partial(total, chunk=chunk)))(*given).jaxpr
        shapes = {var.aval.shape for eqn in all_eqns(jaxpr) for var in eqn.outvars}
        assert max(shape[1] for shape in shapes if shape[2:] == (WIDE,)) == largest


def test_gradients_of_low_precision_weights_are_summed_in_float32():
    given = (weights(jnp.bfloat16), *rows(jnp.bfloat16, length=512))
    exact = jax.grad(total)(jax.tree.map(lambda x: x.astype(jnp.float32), given[0]), *given[1:], None)

    def error(chunk):
        found = jax.grad(total)(*given, chunk)
        assert {x.dtype for x in found.values()} == {jnp.dtype(jnp.bfloat16)}
        return max(float(jnp.linalg.norm(found[k] - exact[k]) / jnp.linalg.norm(exact[k])) for k in ("up", "down"))

    assert error(2) < 1.3 * error(None)


@pytest.mark.parametrize(
    ("variant", "stacked"),
    [
        case if case == ("qwen3", True) else pytest.param(*case, marks=pytest.mark.proof)
        for case in itertools.product(VARIANTS, (True, False))
    ],
)
def test_a_llama_of_chunks_equals_one_of_whole_rows(variant, stacked):
    segments = jnp.asarray(np.random.default_rng(3).integers(1, 4, (2, 12)).cumsum(1) // 6 + 1, jnp.int32)
    batch = {"tokens": make_tokens(), "targets": make_tokens(seed=1), "segment_ids": segments}

    @nnx.jit
    def run(model):
        return nnx.value_and_grad(lambda model: loss_of_model(model, batch).total)(model)

    found, wanted = (run(make_model(stacked=stacked, token_chunk=chunk, **VARIANTS[variant])) for chunk in (4, None))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, wanted)


@pytest.mark.parametrize(
    ("length", "chunk", "tensor", "facts"),
    [
        (24, 7, 1, ("chunk=7", "24 tokens", "use 6")),
        (23, 5, 1, ("chunk=5", "23 tokens", "use 1")),
        (24, 3, 2, ("chunk=3", "'tensor' (size 2)", "use 2")),
        (24, 16, 2, ("chunk=16", "use 12")),
        (23, 4, 2, ("chunk=4", "use None")),
    ],
)
def test_a_chunk_that_does_not_divide_is_refused_with_one_that_does(length, chunk, tensor, facts):
    mesh = jfsdp.make_mesh(fsdp=-1, tensor=tensor)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        refuses(lambda: by_chunks(jnp.sin, chunk, jnp.ones((1, length, 2))), *facts)


@pytest.mark.parametrize(
    ("chunk", "shapes", "facts"),
    [
        *(((chunk, [(1, 8, 2)], (f"chunk={chunk!r}", "at least 1"))) for chunk in (0, -4, 2.0, "4", True)),
        (4, [(1, 8, 2), (1, 12, 2)], ("(1, 8, 2)", "(1, 12, 2)", "same T")),
        (4, [(8,)], ("(8,)", "[B, T, ...]")),
        (4, [], ("[]",)),
    ],
)
def test_bad_chunks_and_arrays_are_refused(chunk, shapes, facts):
    refuses(lambda: by_chunks(lambda *xs: xs, chunk, *map(jnp.ones, shapes)), *facts)


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True])
def test_a_chunk_that_is_no_count_is_refused_by_the_config(chunk):
    refuses(lambda: dataclasses.replace(SMALL, token_chunk=chunk), "LlamaConfig.token_chunk", chunk)


def gradients(batch_size, **options):
    """Trace the gradients of a sharded Llama of chunks; return the trace and the shapes of the saved values."""
    source = lambda rngs: make_model(token_chunk=4)  # noqa: E731
    lora = options.pop("lora", None)
    model = jfsdp.fully_shard(jfsdp.lora(source, lora) if lora else source, units=[DecoderLayer], **options)
    state = model.abstract_state(optax.sgd(0.1))
    batch = {name: jax.ShapeDtypeStruct((batch_size, 12), jnp.int32) for name in ("tokens", "targets")}
    trained = {path for path in state.params if model.layout.by_path[path].trainable}

    def forward(params, model_state, batch):
        def loss(chosen):
            return model.apply(loss_of_model, params | chosen, model_state, batch)[0].total

        return jax.vjp(loss, {path: params[path] for path in trained})

    def backward(*given):
        return forward(*given)[1](jnp.float32(1))

    given = (state.params, state.model_state, batch)
    saved = jax.tree.leaves(jax.eval_shape(lambda *given: forward(*given)[1], *given))
    return jax.make_jaxpr(backward)(*given).jaxpr, [x.shape for x in saved]


@pytest.mark.parametrize("remat", [("mlp_hidden",), "dots"])
def test_a_remat_policy_saves_values_inside_of_chunks(remat):
    """So no name in a policy is silently ignored."""
    _, saved = gradients(8, remat=remat)
    config = make_model().config
    assert sum(math.prod(shape) for shape in saved if shape[-1:] == (config.ffn_dim,) and len(shape) > 3) == (
        2 * config.num_layers * 8 * 12 * config.ffn_dim
    )


@pytest.mark.parametrize("lora", [None, jfsdp.LoRA(rank=2, targets=["**.mlp.up_proj.kernel"])])
def test_adapters_need_no_gradient_of_the_whole_weight(lora):
    jaxpr, _ = gradients(8, **({"lora": lora} if lora else {}))
    config = make_model().config
    outputs = [eqn.outvars[0].aval.shape for eqn in all_eqns(jaxpr) if eqn.primitive.name == "dot_general"]
    wide = {(config.dim, config.ffn_dim), (config.ffn_dim, config.dim)}
    assert bool(wide & set(outputs)) == (lora is None)
