"""Gemma 2 and Gemma 3 of `models/llama.py`, against `transformers`: small models with random weights, made here."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jfsdp.checkpoint.foreign.export import export_safetensors
from jfsdp.checkpoint.foreign.pretrained import config_json, pretrained_fields, pretrained_source
from jfsdp.modules.adapt import as_model
from jfsdp.trainer.job import as_job
from jfsdp_models import attention, llama, llama_config, llama_hf, losses  # pyright: ignore[reportMissingImports]
from tests.checkpoint.arrays import arrays_of
from tests.refusals import refuses

WINDOW, ROWS, LENGTH = 5, 2, 24
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"intermediate_size": 48, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
ROPES |= {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
MODELS = {
    "gemma2": {"num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"num_hidden_layers": 7, "final_logit_softcapping": 3.0, "rope_parameters": ROPES},
}
TOKENS = np.random.default_rng(0).integers(1, 61, (ROWS, LENGTH)).astype(np.int32)
BOTH = pytest.mark.parametrize(("name", "stacked"), [(name, stacked) for name in MODELS for stacked in (True, False)])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints of `transformers`, whose norms are not at their initial values, and their logits."""
    made = {}
    for name, options in MODELS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name, initializer_range=0.2, **SIZES, **options)
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in theirs.parameters():
                weight += 0.2 * torch.randn_like(weight)
        made[name] = tmp_path_factory.mktemp(name), their_logits(theirs)
        theirs.save_pretrained(made[name][0])
    return made


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.int64)).logits.numpy()


def load(directory, **fields) -> Any:
    """Our job and model with the weights of a checkpoint, and its source."""
    job = as_job(llama.make_job(llama.PRESETS["llama-tiny"], LENGTH), "llama-tiny")
    job = job.with_config(**pretrained_fields(directory, job.pretrained), **fields)
    source = pretrained_source(directory, job.pretrained, as_model(job.model).params, config=job.config)
    arrays = arrays_of(source)
    graph, state = nnx.split(nnx.eval_shape(lambda: job.model(nnx.Rngs(0))))
    leaves = [
        (path, leaf.replace(jnp.asarray(arrays[".".join(map(str, path))]))) for path, leaf in nnx.to_flat_state(state)
    ]
    assert sum(leaf[...].size for _, leaf in leaves) == job.config.num_params
    return job, nnx.merge(graph, nnx.from_flat_state(leaves)), source


def relative(ours, reference):
    return np.abs(np.asarray(ours) - reference).max() / np.abs(reference).max()


@BOTH
def test_logits_in_and_out_equal_those_of_transformers(checkpoints, tmp_path, name, stacked):
    directory, reference = checkpoints[name]
    job, model, source = load(directory, stacked=stacked)
    assert isinstance(model.layers, nnx.List) != stacked
    assert relative(nnx.jit(lambda model: model(TOKENS))(model), reference) < 1e-5
    export_safetensors(source, tmp_path / "out", job.pretrained, config=config_json(job.pretrained, job.config, LENGTH))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    np.testing.assert_array_equal(their_logits(back), reference)


@BOTH
def test_greedy_tokens_with_the_cache_are_those_of_the_forward(checkpoints, name, stacked):
    job, model, _ = load(checkpoints[name][0], stacked=stacked)
    step = nnx.jit(lambda m, t, p, c, n: m(t, positions=p, cache=c, lengths=n))
    whole = nnx.jit(lambda model, tokens: model(tokens))
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), job.cache(ROWS, LENGTH, jnp.float32))
    rows, lengths, start = TOKENS.copy(), np.array([7, 9]), 9
    positions = np.where(np.arange(start) < lengths[:, None], np.arange(start), LENGTH)
    logits, cache = step(model, rows[:, :start], positions, cache, lengths)
    for _ in range(10):
        np.testing.assert_allclose(logits, whole(model, rows)[np.arange(ROWS), lengths - 1], atol=2e-5)
        token = np.asarray(jnp.argmax(logits, -1))
        rows[np.arange(ROWS), lengths] = token
        logits, cache = step(model, token[:, None], lengths[:, None], cache, np.ones(ROWS, int))
        lengths = lengths + 1


def test_the_loss_of_chunks_and_its_gradient_equal_those_of_logits(checkpoints):
    _, model, _ = load(checkpoints["gemma2"][0], loss_chunk=7)
    batch = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1)}

    def of(loss, **options):
        return nnx.jit(nnx.value_and_grad(lambda model: jnp.sum(loss(model, batch, **options).total)))(model)

    expected, expected_grads = of(losses.next_token_loss)
    for options in ({}, {"by_row": True}):
        found, grads = of(losses.loss_of_model, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), grads, expected_grads)


def test_limited_scores_of_long_packed_rows_are_those_of_whole_ones(checkpoints, monkeypatch):
    _, model, _ = load(checkpoints["gemma2"][0])
    segment_ids = np.repeat([[1, 2, 0]], [10, 11, 3], axis=1).repeat(ROWS, 0)
    whole = model(TOKENS, segment_ids)
    np.testing.assert_allclose(model(TOKENS[:, 10:21])[0], whole[0, 10:21], atol=1e-5)
    monkeypatch.setattr(attention, "LONGEST_WHOLE", 8)
    monkeypatch.setattr(attention, "QUERIES", 7)
    np.testing.assert_allclose(model(TOKENS, segment_ids), whole, atol=1e-5)


def test_options_that_the_model_lacks_are_refused_by_name():
    sizes = {**SIZES, "num_hidden_layers": 12}
    scaled = {"rope_type": "linear", "factor": 2.0}
    for kind, option, value in (
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "layer_types", ["sliding_attention"] * 12),
        ("gemma3_text", "rope_parameters", {"sliding_attention": scaled}),
        ("gemma2", "query_pre_attn_scalar", 0),
    ):
        refuses(lambda: llama_hf.fields_from_config({**sizes, "model_type": kind, option: value}), option)  # noqa: B023
    published = {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "rope_theta": 1e6, "rope_scaling": scaled}
    fields = llama_hf.fields_from_config({**sizes, "model_type": "gemma3_text", **published})
    found = [fields[name] for name in ("full_attention_every", "rope_theta", "local_rope_theta")]
    assert found == [6, 1e6, 1e4] and fields["rope_scaling"].factor == 2.0
    gemma = llama_config.PRESETS["gemma2-9b"]
    for change in ({"attention": "cudnn"}, {"context_by": "keys"}, {"num_experts": 4}, {"final_softcap": 0.0}):
        refuses(lambda: dataclasses.replace(gemma, **change), *change)  # noqa: B023
    refuses(lambda: llama_hf.config_from_fields(dataclasses.replace(gemma, qk_norm=True), 64), "no architecture")
