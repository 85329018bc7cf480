"""The models of `models/gpt2.py`, against numpy and against each other."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jfsdp.jaxprs import all_eqns
from jfsdp_models import gpt2, losses  # pyright: ignore[reportMissingImports]
from tests.refusals import refuses
from tests.thin import thin

SMALL = gpt2.GPT2Config(
    vocab_size=61, num_positions=32, dim=32, num_layers=3, num_heads=4, dropout=0.0, attention_dropout=0.0
)


def make_tokens(batch_size=2, seq_len=12, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, SMALL.vocab_size, (batch_size, seq_len)), jnp.int32)


@functools.cache
def make_model(**overrides):
    """A small model, and weights whose norms and biases are not at their trivial initial values."""
    model = gpt2.GPT2(dataclasses.replace(SMALL, **overrides))
    rng = np.random.default_rng(1)
    flat = jax.device_get(flatten(jax.jit(model.init)(jax.random.key(0), make_tokens())))
    for name, w in flat.items():
        is_vector = name.endswith((".scale", ".bias"))
        # Tenfold, so that attention is far from uniform and GELU far from linear.
        flat[name] = w + 0.3 * rng.normal(size=w.shape).astype(np.float32) if is_vector else 10 * w
    return model, unflatten(flat)


@functools.partial(jax.jit, static_argnums=0, static_argnames="deterministic")
def apply(model, variables, tokens, ids=None, positions=None, seed=0, deterministic=True):
    rngs = {"dropout": jax.random.key(seed)}
    return model.apply(variables, tokens, ids, positions, rngs=rngs, deterministic=deterministic)


def flatten(variables) -> dict[str, Any]:
    return traverse_util.flatten_dict(variables["params"], sep=".")


def unflatten(flat):
    return {"params": traverse_util.unflatten_dict(flat, sep=".")}


def listed(flat, num_layers):
    """Bring stacked weights into the names of the listed model."""
    out = {name: w for name, w in flat.items() if not name.startswith("h.")}
    for name in flat.keys() - out.keys():
        out |= {f"h_{i}.{name.removeprefix('h.')}": flat[name][i] for i in range(num_layers)}
    return out


# ---- a second opinion in numpy, float64 ----


def numpy_norm(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}.scale"]
        + weights[f"{name}.bias"]
    )


def numpy_linear(x, weights, name):
    return x @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]


def numpy_attention(x, weights, num_heads):
    """One head and one query at a time."""
    size = x.shape[-1] // num_heads
    query, key, value = np.split(numpy_linear(x, weights, "attn.c_attn"), 3, axis=-1)
    out = np.zeros_like(x)
    for head in range(num_heads):
        mine = slice(head * size, (head + 1) * size)
        for t in range(len(x)):
            scores = np.exp(query[t, mine] @ key[: t + 1, mine].T / math.sqrt(size))
            out[t, mine] = scores @ value[: t + 1, mine] / scores.sum()
    return numpy_linear(out, weights, "attn.c_proj")


def numpy_gelu(x):
    """The tanh form of Hendrycks and Gimpel (arXiv 1606.08415), as openai/gpt-2 writes it."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def numpy_gpt2(flat, config, tokens):
    flat = {name: np.asarray(w, np.float64) for name, w in flat.items()}
    x = flat["wte.embedding"][tokens] + flat["wpe.embedding"][: len(tokens)]
    for i in range(config.num_layers):
        layer = {n.removeprefix(f"h_{i}."): w for n, w in flat.items() if n.startswith(f"h_{i}.")}
        x = x + numpy_attention(numpy_norm(x, layer, "ln_1"), layer, config.num_heads)
        wide = numpy_gelu(numpy_linear(numpy_norm(x, layer, "ln_2"), layer, "mlp.c_fc"))
        x = x + numpy_linear(wide, layer, "mlp.c_proj")
    return numpy_norm(x, flat, "ln_f") @ flat["wte.embedding"].T


@pytest.mark.parametrize("stacked", [True, False])
def test_logits_equal_a_naive_numpy_model(stacked):
    model, variables = make_model(stacked=stacked)
    flat = flatten(variables)
    tokens = make_tokens(1, 20)
    expected = numpy_gpt2(listed(flat, 3) if stacked else flat, model.config, np.asarray(tokens[0]))
    assert np.abs(expected).max() > 3, "the weights must be large enough to tell models apart"
    np.testing.assert_allclose(apply(model, variables, tokens)[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stacked", thin([True, False]))
def test_initialization_is_the_published_one(stacked):
    config = dataclasses.replace(gpt2.PRESETS["gpt2"], num_layers=3, vocab_size=500, stacked=stacked)
    flat = jax.device_get(flatten(jax.jit(gpt2.GPT2(config).init)(jax.random.key(0), make_tokens())))
    for name, w in flat.items():
        if name.endswith("bias"):
            assert not w.any(), name
        elif name.endswith("scale"):
            assert (w == 1).all(), name
        else:
            expected = 0.02 / math.sqrt(6) if name.endswith("c_proj.kernel") else 0.02
            np.testing.assert_allclose(np.std(w), expected, rtol=0.02, err_msg=name)
    first, second = (
        (flat["h.attn.c_attn.kernel"][0], flat["h.attn.c_attn.kernel"][1])
        if stacked
        else (flat["h_0.attn.c_attn.kernel"], flat["h_1.attn.c_attn.kernel"])
    )
    assert not np.allclose(first, second)


@pytest.mark.parametrize("given", [True, False], ids=["positions given", "positions counted"])
def test_a_packed_row_gives_each_document_its_own_logits(given):
    model, variables = make_model()
    lengths = [7, 1, 9]
    documents = np.asarray(make_tokens(3, 9))  # what follows a document in its own row is not seen by it
    row = np.concatenate([*(document[:n] for document, n in zip(documents, lengths)), [5] * 3])[None].astype(np.int32)
    ids = np.repeat([1, 2, 3, 0], [*lengths, 3])[None].astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*lengths, 3)])[None] if given else None
    packed = apply(model, variables, row, ids, positions)
    assert np.isfinite(packed).all()
    alone = apply(model, variables, documents)
    for n, start, logits in zip(lengths, (0, 7, 8), alone, strict=True):
        np.testing.assert_allclose(packed[0, start : start + n], logits[:n], rtol=0, atol=1e-4)


def test_a_row_longer_than_the_table_of_positions_is_refused():
    model, variables = make_model()
    refuses(lambda: model.apply(variables, make_tokens(1, 33)), "33", "GPT2Config.num_positions=32")


def test_a_token_outside_the_vocabulary_is_loud():
    model, variables = make_model()
    assert np.isnan(apply(model, variables, jnp.full((1, 20), SMALL.vocab_size))).any()


@pytest.mark.parametrize(("stacked", "dropout"), thin([(True, 0.0), (False, 0.0), (True, 0.1)]))
def test_bfloat16_weights_meet_no_float32_matmul_with_a_weight(stacked, dropout):
    model, variables = make_model(stacked=stacked, dropout=dropout, attention_dropout=dropout)
    variables = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), variables)
    tokens = make_tokens()

    def loss(variables):
        def call(*args, **kwargs):
            return model.apply(variables, *args, rngs={"dropout": jax.random.key(0)}, deterministic=False, **kwargs)

        return losses.next_token_loss(call, batch_of(tokens)).total

    eqns = all_eqns(jax.make_jaxpr(jax.grad(loss))(variables).jaxpr)
    avals = [[v.aval for v in (*e.invars, *e.outvars)] for e in eqns if e.primitive.name == "dot_general"]
    weight_matmuls = [operands for operands in avals if any(a.ndim == 2 or 3 in a.shape for a in operands)]  # [D 3 H A]
    assert len(weight_matmuls) >= 3 * 5, "the search for matmuls found too few of them"
    assert all(a.dtype == jnp.bfloat16 for operands in weight_matmuls for a in operands)
    assert jax.eval_shape(model.apply, variables, tokens).dtype == jnp.bfloat16


def batch_of(tokens):
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}


# ---- dropout ----


def test_dropout_acts_in_training_only_and_differs_between_keys():
    model, variables = make_model(dropout=0.2)
    tokens = make_tokens()
    plain, _ = make_model()
    np.testing.assert_array_equal(apply(model, variables, tokens), apply(plain, variables, tokens))
    noisy = functools.partial(apply, model, variables, tokens, deterministic=False)

    np.testing.assert_array_equal(noisy(seed=0), noisy(seed=0))
    assert not np.allclose(noisy(seed=0), noisy(seed=1), atol=0.1)


@pytest.mark.parametrize("packed", [True, False])
def test_attention_with_dropout_that_drops_nothing_is_the_fused_attention(packed):
    """A rate too small to ever be drawn takes the plain path, which must agree with the fused one."""
    model, variables = make_model(attention_dropout=1e-12)
    tokens = make_tokens()
    ids = jnp.asarray(np.repeat([[1] * 7 + [2] * 5], 2, axis=0)) if packed else None
    trained = apply(model, variables, tokens, ids, deterministic=False)
    np.testing.assert_allclose(trained, apply(model, variables, tokens, ids), rtol=0, atol=1e-4)


def test_attention_dropout_masks_differ_between_rows_heads_and_layers():
    model, variables = make_model(attention_dropout=0.5)
    row = make_tokens(1)
    tokens = jnp.concatenate([row, row])
    logits = apply(model, variables, tokens, deterministic=False)
    assert not np.allclose(logits[0], logits[1], atol=0.1)


def test_a_job_trains_with_dropout_and_is_evaluated_without():
    job = gpt2.JOBS["gpt2"]["configure"](num_layers=1, dim=32, num_heads=2, vocab_size=61)
    module, inputs = job["model"]

    @jax.jit
    def totals():
        variables = module.init(jax.random.key(0), jnp.zeros(inputs[0].shape, jnp.int32))
        call = functools.partial(module.apply, variables, rngs={"dropout": jax.random.key(0)})
        plain = functools.partial(module.apply, variables)
        each = (losses.next_token_loss, plain), (job["eval_loss"], plain), (job["loss"], call)
        return [loss(model, batch_of(make_tokens())).total for loss, model in each]

    expected, evaluated, trained = totals()
    assert evaluated == expected
    assert abs(trained - expected) > 1e-3


# ---- flops ----


def test_flops_follow_the_stated_convention():
    config = gpt2.PRESETS["gpt2-xl"]
    lookups, vectors = config.num_positions * config.dim, (13 * 48 + 2) * config.dim
    expected = 6 * (config.num_params - lookups - vectors) + 12 * 48 * 1600 * 1024
    assert gpt2.flops_per_token(config, 1024) == expected
