"""Mixtures of experts in the Llama family: against the plain model, a plain softmax, and files of transformers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from flax import nnx

import jfsdp
from jfsdp.checkpoint.foreign.mapping import Imported, as_name_map
from jfsdp.layout.lint import LayoutWarning
from jfsdp.modules.adapt import as_model
from jfsdp.trainer.job import as_job
from jfsdp.trainer.optimizers import _muon_dims, _stacks_of_experts
from jfsdp_models import llama, llama_hf  # pyright: ignore[reportMissingImports]
from jfsdp_models.attention import attend, with_sinks  # pyright: ignore[reportMissingImports]
from tests.checkpoint.arrays import Arrays
from tests.refusals import refuses

pytestmark = pytest.mark.filterwarnings(f"ignore::{LayoutWarning.__module__}.LayoutWarning")
SMALL = {"vocab_size": 62, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24}
GPT_OSS = {"sinks": True, "swiglu_limit": 1.0, "local_window_size": 5, "full_attention_every": 2}
GPT_OSS |= {"qkv_bias": True, "out_bias": True}
KINDS = {"mixtral": {}, "qwen3-moe": {"qk_norm": True, "normalize_experts": False}, "gpt-oss": GPT_OSS}


def job_of(kind, **fields) -> Any:
    config = llama.LlamaConfig(**SMALL, num_experts=8, **KINDS[kind], **fields)
    return as_job(llama.make_job(config, seq_len=16), kind)


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    ids = np.where(np.arange(16) < rng.integers(10, 17, (8, 1)), 1 + (np.arange(16) > 6), 0)
    tokens = rng.integers(0, 61, (8, 17))
    arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids}
    return {name: x.astype(np.int32) for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("kind", "stacked"),
    [("mixtral", True), pytest.param("qwen3-moe", False, marks=pytest.mark.proof), ("gpt-oss", True)],
)
def test_a_step_on_a_mesh_equals_the_plain_model(kind, stacked):
    """The plain model computes every token by all experts, and drops the same copies."""
    job = job_of(kind, stacked=stacked, z_loss=0.01)
    model = job.with_experts(job.model, jfsdp.experts)
    mesh = jfsdp.make_mesh(fsdp=2, expert=2, tensor=2) if kind == "gpt-oss" else jfsdp.make_mesh(fsdp=2, expert=4)
    sharded = jfsdp.fully_shard(model, mesh=mesh, units=job.units, placements=job.placements)
    state = sharded.init(optax.sgd(1.0))
    plain = sharded.to_flax(state)
    rebuilt = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: job.model(nnx.Rngs(0)))), nnx.state(plain))

    def mean(model):
        sums = job.loss(model, batch())
        return sums.total / sums.weight, sums.aux

    (loss, aux), grads = nnx.jit(nnx.value_and_grad(mean, has_aux=True))(rebuilt)
    before = {name: np.asarray(x) for name, x in state.params.items()}
    state, metrics = sharded.train_step(job.loss, optax.sgd(1.0), check_loss=False)(state, batch())
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["router_loss"] > 0.005
    assert metrics["dropped"] == pytest.approx(float(aux["dropped"].total / aux["dropped"].weight), rel=1e-5)
    assert metrics["dropped"] > 0.01 and metrics["expert_load"] == pytest.approx(float(aux["expert_load"].maximum))
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(grads))}
    for name, value in before.items():
        change = value - np.asarray(state.params[name])
        np.testing.assert_allclose(change, flat[name], atol=2e-5 * max(np.abs(flat[name]).max(), 1e-3), err_msg=name)


MESHES = {
    "pipe": ({"pipe": 2, "fsdp": 2, "expert": 2}, 2, {}),
    "context": ({"fsdp": 2, "expert": 2, "context": 2}, 1, {"capacity": None}),
}


@pytest.mark.parametrize("name", ["pipe", pytest.param("context", marks=pytest.mark.proof)])
def test_experts_combine_with_stages_and_split_rows(name):
    sizes, accumulate, fields = MESHES[name]
    job = job_of("mixtral", **fields)

    def run(sizes):
        model = job.with_experts(job.model, jfsdp.experts)
        if "context" in sizes:
            functions = {"over_context": jfsdp.over_context, "whole_rows": jfsdp.whole_rows}
            model = job.in_context(model, attention=jfsdp.attention, positions=jfsdp.positions, **functions)
        mesh = jfsdp.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
        sharded = jfsdp.fully_shard(model, mesh=mesh, units=job.units, placements=job.placements)
        tx = optax.sgd(0.1)
        _, metrics = sharded.train_step(job.loss, tx, accumulate=accumulate)(sharded.init(tx), batch())
        return [float(metrics[name]) for name in ("loss", "grad_norm", "dropped", "expert_load", "router_loss")]

    assert run(sizes) == pytest.approx(run({"fsdp": 1}), rel=1e-5)


def test_muon_takes_each_expert_as_a_matrix():
    job = job_of("gpt-oss")
    mesh = jfsdp.make_abstract_mesh({"fsdp": 1})
    sharded = jfsdp.fully_shard(job.model, mesh=mesh, units=job.units, placements=job.placements)
    stacks = _stacks_of_experts(job, sharded)
    found = {leaf.path: _muon_dims(leaf, stacks) for leaf in sharded.layout.leaves if ".mlp." in leaf.path}
    is_matrix = {path.removeprefix("layers.mlp."): dims and tuple(dims) for path, dims in found.items()}
    assert is_matrix == {
        "experts.gate_up_proj": (2, 3),
        "experts.down_proj": (2, 3),
        "experts.gate_up_bias": None,
        "experts.down_bias": None,
        "router.kernel": (1, 2),
        "router.bias": None,
    }


def test_generation_with_a_cache_equals_the_forward():
    job = job_of("gpt-oss")
    model, tokens = job.model(nnx.Rngs(0)), jnp.asarray(batch()["tokens"][:2])
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), job.cache(2, 16, jnp.float32))
    cache = jax.tree.unflatten(jax.tree.structure(cache), jax.tree.leaves(cache))
    found, cache = model(
        tokens[:, :8], positions=jnp.tile(jnp.arange(8), (2, 1)), cache=cache, lengths=jnp.full((2,), 8)
    )
    logits = [found]
    for place in range(8, 16):
        given = {"positions": jnp.full((2, 1), place), "lengths": jnp.ones((2,), jnp.int32)}
        found, cache = model(tokens[:, place : place + 1], cache=cache, **given)
        logits.append(found)
    np.testing.assert_allclose(jnp.stack(logits, 1), model(tokens)[:, 7:], atol=2e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_one_more_score_in_the_softmax(window):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        query, key, value, weights = (jnp.asarray(rng.normal(size=(2, 12, n, 8))) for n in (4, 2, 2, 4))
        sinks = jnp.asarray(rng.normal(size=4))

        def ours(query, key, value, sinks):
            given = with_sinks(query, sinks), key, value, None
            return jnp.sum(weights * attend(*given, choice="xla", window=window, has_sinks=True))

        def plain(query, key, value, sinks):
            keys, values = (jnp.repeat(x, 2, axis=2) for x in (key, value))
            scores = jnp.einsum("bqha,bkha->bhqk", query, keys) * 8**-0.5
            distance = jnp.arange(12)[:, None] - jnp.arange(12)
            is_seen = (distance >= 0) & (distance < (window or 12))
            sink = jnp.broadcast_to(sinks[:, None, None], (2, 4, 12, 1))
            shares = jax.nn.softmax(jnp.concatenate([jnp.where(is_seen, scores, -jnp.inf), sink], -1), -1)
            return jnp.sum(weights * jnp.einsum("bhqk,bkha->bqha", shares[..., :-1], values))

        found, expected = (jax.grad(fn, (0, 1, 2, 3))(query, key, value, sinks) for fn in (ours, plain))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12 * np.abs(other).max())


def encode_mxfp4(weight):
    """Blocks and scales of a weight [E in out], whose values have codes: two in a byte along the inputs."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    blocks = weight.swapaxes(1, 2).reshape(weight.shape[0], weight.shape[2], -1, 32)
    scale = 2.0 ** np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True) / 6))
    codes = np.abs((blocks / scale)[..., None] - values).argmin(-1).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (np.log2(scale[..., 0]) + 127).astype(np.uint8)


def test_mxfp4_of_gpt_oss_is_decoded():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = np.random.default_rng(0).normal(size=(2, 64, 6)).astype(np.float32)
    blocks, scales = encode_mxfp4(weight)
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    source = llama_hf.Mxfp4(Arrays({"w_blocks": blocks, "w_scales": scales}))
    assert source.arrays["w"].shape == weight.shape
    whole = source.read("w", (slice(0, 2), slice(0, 64), slice(0, 6)))
    np.testing.assert_array_equal(whole.astype(np.float32), theirs)
    assert np.corrcoef(whole.astype(np.float32).ravel(), weight.ravel())[0, 1] > 0.97
    part = source.read("w", (slice(1, 2), slice(17, 40), slice(2, 5)))
    np.testing.assert_array_equal(part, whole[1:2, 17:40, 2:5])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_state_dict_with_fused_experts_is_read(kind):
    options = {"num_local_experts": 8, "moe_intermediate_size": 24, "hidden_size": 32, "intermediate_size": 24}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 62}
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=2, num_experts_per_tok=2, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    job = job_of("mixtral" if kind == "mixtral" else "qwen3-moe")
    names = as_name_map(job.pretrained)
    source = Arrays({name: weight.numpy() for name, weight in model.state_dict().items()})
    found = Imported(source, names.chosen_for(source), as_model(job.model).params)
    whole = {name: found.read(name, tuple(slice(0, size) for size in x.shape)) for name, x in found.arrays.items()}
    fused = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"].numpy()
    np.testing.assert_array_equal(whole["layers.mlp.experts.gate_proj"][1, 3], fused[3, :24].T)
    np.testing.assert_array_equal(whole["layers.mlp.experts.up_proj"][1, 3], fused[3, 24:].T)


BAD = {
    "k above E": ({"experts_per_token": 9}, ["experts_per_token=9", "num_experts=8"]),
    "capacity": ({"capacity": 0.9}, ["capacity=0.9", "at least 1"]),
    "loss": ({"balance_loss": -1.0}, ["balance_loss=-1.0"]),
    "chunks": ({"token_chunk": 4}, ["token_chunk=4"]),
    "send": ({"expert_send": "all"}, ["expert_send", "copies", "tokens"]),
    "pattern without a window": ({"full_attention_every": 2}, ["full_attention_every=2", "local_window_size"]),
    "pattern by keys": (
        {"full_attention_every": 2, "local_window_size": 8, "context_by": "keys"},
        ["full_attention_every=2", "heads"],
    ),
    "clipped, not normalized": ({"swiglu_limit": 7.0, "normalize_experts": False}, ["swiglu_limit=7.0"]),
    "sinks by cuDNN": ({"sinks": True, "attention": "cudnn"}, ["sinks", "xla"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configurations_are_named(name):
    fields, words = BAD[name]
    refuses(lambda: llama.LlamaConfig(**SMALL, num_experts=8, **fields), *words)


def test_a_mixture_without_the_function_on_its_axis_is_told_to_take_it():
    job = job_of("mixtral")
    mesh = jfsdp.make_mesh(fsdp=4, expert=2)
    model = jfsdp.fully_shard(job.model, mesh=mesh, units=job.units, placements=job.placements)
    step = model.train_step(job.loss, optax.sgd(0.1))
    refuses(lambda: step(model.init(optax.sgd(0.1)), batch()), "experts=jfsdp.experts")
