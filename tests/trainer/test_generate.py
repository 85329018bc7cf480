"""Generation with a cache: the tokens of a forward over the whole row, whatever the rows beside, mesh and model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.trainer.generate import Generator, Sampling
from tests.refusals import refuses
from tests.sharding import fully_shard
from tests.thin import thin

PROMPTS = [np.random.default_rng(length).integers(0, 256, length).astype(np.int32) for length in (3, 9, 1, 6, 12)]
NUM = 8
JOBS = {
    "llama": ("llama-tiny", {}),
    "list": ("llama-tiny", {"stacked": False, "qk_norm": True, "tied": True, "local_window_size": 5, "qkv_bias": True}),
    "gpt2": ("gpt2-tiny", {}),
    "gpt2 list": ("gpt2-tiny", {"stacked": False, "dropout": 0.5}),
}
MESHES = [{"fsdp": 2}, {"fsdp": 1, "tensor": 2}, {"replica": 2, "fsdp": 2, "tensor": 2}]
DRAWN = Sampling(0.9, top_k=50, top_p=0.9, seed=1)


def make_job(name):
    model, fields = JOBS[name]
    small = {"num_layers": 2, "vocab_size": 264}
    return jfsdp.trainer.find_job(model).with_config(**small, **fields)


def shard(job, sizes):
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    return fully_shard(job.model, mesh=mesh, units=job.units, placements=job.placements)


def generate(job, sizes, sampling, prompts=PROMPTS, **options):
    model = shard(job, sizes)
    state = model.init(optax.identity(), 3)
    found = Generator(model, job, sampling, **options)(state, prompts, NUM)
    return [row.tolist() for row in found]


@functools.cache
def on_one(name, sampling):
    return generate(make_job(name), {"fsdp": 1}, sampling)


@pytest.mark.parametrize("name", thin(["list", "llama", "gpt2"]) + [pytest.param("gpt2 list", marks=pytest.mark.proof)])
def test_tokens_are_those_of_forwards_without_a_cache(name):
    """One row at a time, whole, padded at its end: causal attention does not see that."""
    job = make_job(name)
    model = shard(job, {"fsdp": 1})
    state = model.init(optax.identity(), 3)
    logits = model.forward(lambda module, tokens, end: module(tokens)[0, end - 1])
    for prompt, found in zip(PROMPTS, on_one(name, Sampling()), strict=True):
        row = np.zeros((1, 20), np.int32)
        row[0, : len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + NUM):
            token = int(jnp.argmax(logits(state, row, end)))
            assert token == found[end - len(prompt)]
            row[0, end] = token


@pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")  # GPT-2's positions are not cut
@pytest.mark.parametrize(
    ("name", "sizes", "sampling"),
    thin(
        [
            ("llama", MESHES[2], DRAWN),
            ("llama", MESHES[0], Sampling()),
            ("list", MESHES[1], Sampling()),
            ("list", MESHES[2], DRAWN),
            ("gpt2", MESHES[0], Sampling()),
            ("gpt2 list", MESHES[1], DRAWN),
        ],
        6,
    ),
)
def test_meshes_and_draws_make_no_difference(name, sizes, sampling):
    assert generate(make_job(name), sizes, sampling) == on_one(name, sampling)


def test_a_row_does_not_depend_on_those_beside_it():
    assert generate(make_job("llama"), {"fsdp": 1}, Sampling(), PROMPTS[:1]) == on_one("llama", Sampling())[:1]


def test_a_row_ends_with_its_stop_token_and_draws_are_among_the_likeliest():
    whole = on_one("llama", Sampling())
    stop = whole[0][3]
    found = generate(make_job("llama"), {"fsdp": 1}, Sampling(), stop=[stop])
    for ours, row in zip(found, whole, strict=True):
        assert ours == (row[: row.index(stop) + 1] if stop in row else row)
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]).repeat(400, 0))
    rows, positions = jnp.arange(400), jnp.zeros(400, int)
    for sampling, allowed in (
        (Sampling(1.0, top_k=2), {0, 1}),
        (Sampling(1.0, top_p=0.6), {0, 1}),
        (Sampling(1.0, top_p=0.5), {0}),
        (Sampling(1.0), {0, 1, 2, 3}),
    ):
        drawn = np.asarray(sampling.draw(logits, rows, positions))
        assert set(drawn.tolist()) == allowed
    share = np.mean(np.asarray(Sampling(1.0).draw(logits, rows, positions)) == 0)
    assert abs(share - 0.5) < 0.08


def cache_shapes(job, sizes):
    return Generator(shard(job, sizes), job).cache_shapes(1, 20)


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: Sampling(-1.0), "temperature"),
        (lambda: Sampling(0.0, top_k=3), "temperature above 0"),
        (lambda: Sampling(1.0, top_p=1.5), "top_p"),
        (lambda: generate(make_job("llama"), {"fsdp": 1}, None, []), "0 prompts"),
        (lambda: generate(make_job("llama"), {"fsdp": 1}, None, [np.array([3, 264])]), "below 264"),
        (lambda: generate(make_job("llama"), {"fsdp": 1}, None, [np.array([], int)]), "prompt 1 has 0"),
        (lambda: cache_shapes(dataclasses.replace(make_job("llama"), cache=None), {"fsdp": 1}), "field `cache`"),
        (lambda: cache_shapes(make_job("llama"), {"fsdp": 1, "tensor": 8}), "heads"),
        (lambda: cache_shapes(make_job("gpt2").with_config(num_positions=16), {"fsdp": 1}), "num_positions=16"),
    ],
)
@pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")
def test_what_cannot_be_generated_is_refused_by_name(make, fact):
    refuses(make, fact)
