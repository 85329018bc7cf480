"""The models of `models/llama.py`, against numpy and against each other."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jfsdp.jaxprs import all_eqns
from jfsdp_models import attention, llama, llama_config, losses  # pyright: ignore[reportMissingImports]
from tests.refusals import refuses

SMALL = llama.LlamaConfig(
    vocab_size=61, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, rope_theta=10_000.0, attention="xla"
)
VARIANTS = {
    "llama": {},
    "biases": {"qkv_bias": True, "out_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "mistral": {"local_window_size": 5},
    "scaled": {"rope_scaling": llama_config.RopeScaling(original_context=16), "tied": True},
}


def make_model(**overrides):
    """A small model whose norms and biases are not at their trivial initial values."""
    model = llama.Llama(dataclasses.replace(SMALL, **overrides), nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("scale", "bias"):
            param[...] = param[...] + jnp.asarray(rng.normal(size=param.shape) * 0.3, jnp.float32)
    return model


def make_tokens(batch_size=2, seq_len=12, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, SMALL.vocab_size, (batch_size, seq_len)), jnp.int32)


def weights_by_name(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): param[...] for path, param in flat}


@nnx.jit
def forward(model, tokens, segment_ids=None, positions=None):
    return model(tokens, segment_ids, positions)


def mean_loss(model, batch):
    sums = losses.next_token_loss(model, batch)
    return sums.total / sums.weight


# ---- a second opinion in numpy, float64 ----


def numpy_rms_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def numpy_rope(x, positions, config):
    """Rotate as complex numbers, which the model does not do."""
    size = config.head_size
    inverse_wavelength = np.array([llama3_frequency(2 * i / size, config) for i in range(size // 2)])
    turned = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * np.exp(1j * positions[:, None] * inverse_wavelength)
    return np.concatenate([turned.real, turned.imag], -1)


def llama3_frequency(exponent, config):
    """The published rule, one frequency at a time (Llama 3.1's reference `apply_scaling`)."""
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    low_wavelength = scaling.original_context / scaling.low_freq_factor
    high_wavelength = scaling.original_context / scaling.high_freq_factor
    if wavelength < high_wavelength:
        return frequency
    if wavelength > low_wavelength:
        return frequency / scaling.factor
    smooth = scaling.original_context / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def numpy_attention(x, weights, config):
    """One head and one query at a time."""

    def project(name, num_heads):
        y = x @ weights[f"{name}_proj.kernel"] + weights.get(f"{name}_proj.bias", 0.0)
        return y.reshape(len(x), num_heads, config.head_size).transpose(1, 0, 2)

    query, key, value = (project(n, config.num_heads if n == "q" else config.num_kv_heads) for n in "qkv")
    if config.qk_norm:
        query = numpy_rms_norm(query, weights["q_norm.scale"], config.norm_eps)
        key = numpy_rms_norm(key, weights["k_norm.scale"], config.norm_eps)
    window = config.local_window_size or len(x)
    out = np.zeros((len(x), config.num_heads, config.head_size))
    positions = np.arange(len(x))
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        q, k = numpy_rope(query[head], positions, config), numpy_rope(key[shared], positions, config)
        for t in range(len(x)):
            seen = slice(max(0, t - window + 1), t + 1)
            scores = np.exp(q[t] @ k[seen].T / math.sqrt(config.head_size))
            out[t, head] = scores @ value[shared][seen] / scores.sum()
    return out.reshape(len(x), -1) @ weights["o_proj.kernel"] + weights.get("o_proj.bias", 0.0)


def numpy_llama(weights, config, tokens):
    weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    if not config.stacked:
        first = {name.removeprefix("layers.0.") for name in weights if name.startswith("layers.0.")}
        stacks = {
            f"layers.{n}": np.stack([weights[f"layers.{i}.{n}"] for i in range(config.num_layers)]) for n in first
        }
        weights = {name: w for name, w in weights.items() if not name.startswith("layers.")} | stacks
    x = weights["embed.embedding"][tokens]
    for i in range(config.num_layers):
        layer = {n.removeprefix("layers."): w[i] for n, w in weights.items() if n.startswith("layers.")}
        attn = {n.removeprefix("attn."): w for n, w in layer.items() if n.startswith("attn.")}
        x = x + numpy_attention(numpy_rms_norm(x, layer["attn_norm.scale"], config.norm_eps), attn, config)
        y = numpy_rms_norm(x, layer["mlp_norm.scale"], config.norm_eps)
        gate = y @ layer["mlp.gate_proj.kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj.kernel"])) @ layer["mlp.down_proj.kernel"]
    x = numpy_rms_norm(x, weights["norm.scale"], config.norm_eps)
    return x @ weights.get("lm_head.kernel", weights["embed.embedding"].T)


@pytest.mark.parametrize(("variant", "stacked"), [*((variant, True) for variant in VARIANTS), ("scaled", False)])
def test_logits_equal_a_naive_numpy_model(variant, stacked):
    model = make_model(**VARIANTS[variant], stacked=stacked)
    tokens = make_tokens(1, 20)
    weights = weights_by_name(model)
    assert sum(weight.size for weight in weights.values()) == model.config.num_params
    expected = numpy_llama(weights, model.config, np.asarray(tokens[0]))
    np.testing.assert_allclose(forward(model, tokens)[0], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_stacked_and_listed_layers_begin_alike(variant):
    configs = (dataclasses.replace(SMALL, **VARIANTS[variant], stacked=stacked) for stacked in (True, False))
    stacks, lists = (weights_by_name(llama.Llama(config, nnx.Rngs(7))) for config in configs)
    for name, stack in stacks.items():
        if name.startswith("layers."):
            rest = name.removeprefix("layers.")
            assert not name.endswith("kernel") or not np.allclose(stack[0], stack[1]), name
            np.testing.assert_array_equal(stack, [lists[f"layers.{i}.{rest}"] for i in range(SMALL.num_layers)])
        else:
            np.testing.assert_array_equal(stack, lists[name])


@pytest.mark.parametrize("scaling", [None, llama_config.RopeScaling(), llama_config.RopeScaling(factor=32.0)])
@pytest.mark.parametrize("name", ["llama-8b", "llama-1b"])
def test_rope_frequencies_follow_the_published_rule(name, scaling):
    config = dataclasses.replace(llama.PRESETS[name], rope_scaling=scaling)
    size = config.head_size
    expected = [llama3_frequency(i / size, config) for i in range(0, size, 2)]
    np.testing.assert_allclose(llama.rope_frequencies(config), expected, rtol=1e-12)


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_a_packed_row_gives_each_document_its_own_logits(variant):
    model = make_model(**VARIANTS[variant])
    lengths = [7, 1, 9]
    documents = np.asarray(make_tokens(3, 9))  # what follows a document in its own row is not seen by it
    row = np.concatenate([*(document[:n] for document, n in zip(documents, lengths)), [5] * 3])[None].astype(np.int32)
    packed = forward(model, row, np.repeat([1, 2, 3, 0], [*lengths, 3])[None].astype(np.int32))
    assert np.isfinite(packed).all()
    for n, start, logits in zip(lengths, (0, 7, 8), forward(model, documents), strict=True):
        np.testing.assert_allclose(packed[0, start : start + n], logits[:n], atol=1e-5, rtol=0)


def test_padding_changes_neither_logits_nor_loss_nor_gradient():
    model = make_model()
    tokens = np.asarray(make_tokens(2, 8))
    plain = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": np.ones((2, 8), np.int32)}

    def padded(garbage):
        return {k: np.concatenate([v, 0 * garbage if k == "segment_ids" else garbage], 1) for k, v in plain.items()}

    loss_and_grads = nnx.jit(nnx.value_and_grad(mean_loss))
    (loss, grads), (other_loss, other_grads) = (
        loss_and_grads(model, padded(np.asarray(make_tokens(2, 4, seed=seed)))) for seed in (9, 10)
    )
    np.testing.assert_allclose([loss, other_loss], nnx.jit(mean_loss)(model, plain), rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, other_grads)


def test_given_positions_are_used():
    model = make_model()
    tokens = make_tokens(1, 8)
    positions = jnp.arange(8)[None]
    np.testing.assert_array_equal(forward(model, tokens), forward(model, tokens, None, positions))
    shifted = forward(model, tokens, None, positions + 100)
    np.testing.assert_allclose(forward(model, tokens), shifted, atol=2e-5)  # only differences matter
    assert not np.allclose(forward(model, tokens), forward(model, tokens, None, 3 * positions), atol=1e-3)


def test_a_token_outside_the_vocabulary_is_loud():
    assert np.isnan(forward(make_model(), jnp.full((1, 4), SMALL.vocab_size))).any()


# ---- dtypes, and what the sharding library relies on ----


def matmuls(jaxpr) -> list[list[Any]]:
    found = [eqn for eqn in all_eqns(jaxpr) if eqn.primitive.name == "dot_general"]
    return [[v.aval for v in (*eqn.invars, *eqn.outvars)] for eqn in found]


@pytest.mark.parametrize(("variant", "stacked"), [("biases", True), ("qwen3", True), ("llama", False)])
def test_bfloat16_weights_meet_no_float32_matmul(variant, stacked):
    config = dataclasses.replace(SMALL, **VARIANTS[variant], stacked=stacked)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: llama.Llama(config, nnx.Rngs(0))))
    state = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), state)
    tokens = make_tokens()

    def loss(state):
        return losses.next_token_loss(nnx.merge(graphdef, state), {"tokens": tokens, "targets": tokens}).total

    avals = matmuls(jax.make_jaxpr(jax.grad(loss))(state).jaxpr)
    weight_matmuls = [operands for operands in avals if any(a.ndim == 2 for a in operands)]
    assert len(weight_matmuls) >= 3 * 8, "the search for matmuls found too few of them"
    assert all(a.dtype == jnp.bfloat16 for operands in weight_matmuls for a in operands)
    forward = jax.make_jaxpr(lambda s: nnx.merge(graphdef, s)(tokens))(state)
    assert all(a.dtype == jnp.bfloat16 for operands in matmuls(forward.jaxpr) for a in operands[:2])
    assert str(forward.out_avals[0]).startswith("bfloat16")


def test_rms_norm_is_float32_inside():
    norm = llama.RMSNorm(4096, eps=1e-5)
    x = (1.0 + jnp.arange(4096) / 4096).astype(jnp.bfloat16)
    wide = norm(x.astype(jnp.float32))
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), wide.astype(jnp.bfloat16))


def test_without_segment_ids_no_mask_enters_the_model():
    model = make_model()
    seen = []

    class Spy(llama.DecoderLayer):
        def __call__(self, x, rope, mask, **options):
            seen.append(mask)
            return super().__call__(x, rope, mask, **options)

    model.layers.__class__ = Spy
    nnx.eval_shape(lambda m: m(make_tokens()), model)
    assert seen and all(mask is None for mask in seen)


def test_auto_attention_is_xla_on_cpu_and_cudnn_wants_half_precision():
    query = jax.ShapeDtypeStruct((1, 8, 4, 64), jnp.bfloat16)
    assert attention.choose_attention("auto", query) == "xla"
    assert attention.choose_attention("cudnn", query) == "cudnn"
    config = dataclasses.replace(SMALL, attention="cudnn")
    call = lambda: nnx.eval_shape(lambda: llama.Llama(config, nnx.Rngs(0))(make_tokens()))  # noqa: E731
    refuses(call, "attention='cudnn'", "bfloat16", "float16", "float32")


@pytest.mark.parametrize(
    ("dtype", "head_size", "seq_len", "served"),
    [
        (jnp.bfloat16, 128, 8192, True),
        (jnp.float16, 64, 8190, True),
        (jnp.float16, 64, 8191, False),
        (jnp.float32, 128, 8192, False),
        (jnp.bfloat16, 256, 8192, False),
        (jnp.bfloat16, 36, 8192, False),
    ],
)
def test_auto_attention_on_cuda_takes_what_cudnn_serves(monkeypatch, dtype, head_size, seq_len, served):
    monkeypatch.setattr(attention, "is_cuda", lambda: True)
    monkeypatch.setattr(attention, "is_at_least", lambda capability: True)
    query = jax.ShapeDtypeStruct((1, seq_len, 4, head_size), dtype)
    assert attention.choose_attention("auto", query) == ("cudnn" if served else "xla")


# ---- loss, flops, scaled positions ----


def test_loss_sums_the_weighted_cross_entropy():
    model = make_model()
    tokens, targets = make_tokens(seed=1), make_tokens(seed=2)
    weights = jnp.asarray(np.random.default_rng(3).uniform(size=tokens.shape), jnp.float32)
    batch = {"tokens": tokens, "targets": targets, "weights": weights}
    sums = nnx.jit(losses.next_token_loss)(model, batch)
    logits = np.asarray(forward(model, tokens), np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(sums.total, -(np.log(chosen) * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums.weight, weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(sums.aux["correct"], (weights * (logits.argmax(-1) == targets)).sum(), rtol=1e-6)
    assert sums.total.dtype == sums.weight.dtype == jnp.float32


def test_flops_follow_the_stated_convention():
    config = llama.PRESETS["llama-8b"]
    matmul_params = config.num_params - config.vocab_size * config.dim - 65 * config.dim
    expected = 6 * matmul_params + 12 * 32 * 32 * 128 * 8192
    assert llama.flops_per_token(config, 8192) == expected
    tied = llama.PRESETS["llama-1b"]
    assert llama.flops_per_token(tied, 0) == 6 * (tied.num_params - 33 * tied.dim)
    mistral = llama.PRESETS["mistral-7b"]
    assert llama.flops_per_token(mistral, 32_768) == llama.flops_per_token(mistral, 4096)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"low_freq_factor": 4.0, "high_freq_factor": 1.0}, ("high_freq_factor=1.0", "low_freq_factor=4.0")),
        ({"factor": 0}, ("factor=0",)),
        ({"kind": "longrope"}, ("kind='longrope'", "yarn")),
        ({"kind": "yarn", "beta_fast": 1.0}, ("beta_fast=1.0", "beta_slow=1.0")),
        ({"kind": "yarn", "attention_factor": -1.0}, ("attention_factor=-1.0",)),
    ],
)
def test_bad_rope_scaling_is_refused(options, facts):
    refuses(lambda: llama_config.RopeScaling(**options), *facts)


def test_dynamic_rope_follows_the_longest_position_of_a_row_without_its_padding():
    scaling = llama_config.RopeScaling(kind="dynamic", factor=2.0, original_context=4)
    config = dataclasses.replace(SMALL, rope_scaling=scaling)
    plain = dataclasses.replace(SMALL, rope_scaling=None)
    positions = jnp.stack([jnp.arange(8), jnp.where(jnp.arange(8) < 4, jnp.arange(8), 99)])
    long, short = (row[None] for row in llama.rope_table(config, positions, positions < 99)[0])
    alone = llama.rope_table(config, positions[:1])[0]
    unscaled = llama.rope_table(plain, positions[1:])[0]
    np.testing.assert_array_equal(long, alone)
    np.testing.assert_array_equal(short[:, :4], unscaled[:, :4])
    assert np.abs(long - llama.rope_table(plain, positions[:1])[0]).max() > 0.1
