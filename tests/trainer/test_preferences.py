"""Losses of preferences: the published formulas in float64, whatever the mesh, program, strategy and microbatches."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from examples import vit
from jfsdp.trainer.preferences import KINDS, pair_batch, preference_loss, with_preference
from tests.pairwise import cover
from tests.refusals import refuses
from tests.steps import fully_shard
from tests.thin import each_value, thin

VOCAB, DIM, LENGTH, PAIRS, BETA = 24, 8, 7, 48, 0.3
EXACT = 1e-12


class Block(nnx.Module):
    def __init__(self, rngs):
        wide = {"rngs": rngs, "param_dtype": jnp.float64, "dtype": jnp.float64}
        self.mix, self.up, self.down = (nnx.Linear(*size, **wide) for size in ((DIM, DIM), (DIM, 32), (32, DIM)))

    def __call__(self, x):
        before = jnp.cumsum(self.mix(x), axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(jax.nn.silu(self.up(x + before)))


class Language(nnx.Module):
    """A causal model in float64: each token sees the mean of those before it."""

    def __init__(self, rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, DIM), jnp.float64))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Param(jax.random.normal(rngs.params(), (DIM, VOCAB), jnp.float64))

    def __call__(self, tokens):
        x = self.embed[...][tokens]
        for block in self.blocks:
            x = block(x)
        return x @ self.head[...]


def row_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return jfsdp.Loss((losses * batch["weights"]).sum(axis=1), batch["weights"].sum(axis=1))


def make_job(kind="dpo"):
    own = {"model": Language, "loss": row_loss, "batch": pair_batch, "units": [Block], "optimizer": optax.sgd}
    return with_preference(jfsdp.trainer.Job(**own, vocab_size=VOCAB, row_loss=row_loss), kind, BETA)


def make_batch():
    """Answers of many lengths; the last pairs are padding, as evaluation has it."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCAB, (2, PAIRS, 2, LENGTH)).astype(np.int32)
    weights = (np.arange(LENGTH) >= rng.integers(0, LENGTH, (PAIRS, 2, 1))).astype(np.float64)
    weights[-5:] = 0
    reference = -3 * rng.random((PAIRS, 2)) * weights.sum(-1)
    return {"tokens": tokens, "targets": targets, "weights": weights, "reference": reference}


@pytest.fixture(autouse=True)
def _wide(request):
    with jax.enable_x64("exact" in request.node.name):
        yield


def published(kind, model, batch):
    """The formulas as their papers write them, from the whole logits of one answer at a time."""

    def ratio(tokens, targets, weights, reference):
        likelihoods = jnp.log(jax.nn.softmax(model(tokens[None])[0]))[jnp.arange(LENGTH), targets]
        ratio = (likelihoods * weights).sum() - reference
        return ratio / weights.sum() if kind.endswith("norm") else ratio

    real = [jnp.asarray(batch[name][:-5]) for name in ("tokens", "targets", "weights", "reference")]
    chosen, rejected = (jax.vmap(ratio)(*(x[:, answer] for x in real)) for answer in range(2))
    gap = chosen - rejected
    return jnp.mean(-jnp.log(jax.nn.sigmoid(BETA * gap)) if kind.startswith("dpo") else (gap - 1 / (2 * BETA)) ** 2)


@functools.cache
def wanted(kind):
    mean = nnx.value_and_grad(lambda model: published(kind, model, make_batch()))
    value, grads = nnx.jit(lambda: mean(Language(nnx.Rngs(0))))()
    return float(value), {".".join(map(str, path)): np.asarray(x) for path, x in nnx.to_flat_state(grads)}


COLUMNS = {
    "sizes": [{"fsdp": 8}, {"replica": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}],
    "program": ["xla", "manual"],
    "strategy": ["full_shard", "ddp", "zero2"],
    "accumulate": [1, 2],
}
CASES = [(list(KINDS)[place % len(KINDS)], *row) for place, row in enumerate(cover(COLUMNS))]


@pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")  # the embedding is not cut over tensor
@pytest.mark.parametrize(("kind", *COLUMNS), each_value(CASES))
def test_losses_and_gradients_are_exact(kind, sizes, program, strategy, accumulate):
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    cuts = {"blocks.*.up": (-1, "tensor"), "blocks.*.down.kernel": (0, "tensor"), "head": (-1, "tensor")}
    model = fully_shard(Language, mesh=mesh, units=[Block], strategy=strategy, program=program, min_size=4, cuts=cuts)
    state = model.init(optax.sgd(0.1))
    step = model.grads(make_job(kind).loss, accumulate=accumulate, check_loss=False)
    _, grads, metrics = step(state, make_batch())
    value, expected = wanted(kind)
    assert float(metrics["loss"]) == pytest.approx(value, rel=1e-6)  # metrics are float32
    assert float(metrics["weight"]) == PAIRS - 5
    found = {".".join(map(str, path)): np.asarray(x) for path, x in nnx.to_flat_state(grads)}
    assert found.keys() == expected.keys()
    for path, grad in expected.items():
        assert np.abs(found[path] - grad).max() < EXACT * max(np.abs(grad).max(), 1), path


@pytest.mark.parametrize(
    ("name", "program"),
    thin([("llama-tiny", "manual"), ("llama-tiny", "xla"), ("gpt2-tiny", "xla"), ("gpt2-tiny", "manual")], 4),
)
def test_models_score_answers_without_logits_of_whole_rows(name, program):
    """The loss by row in chunks, and its gradient, beside whole logits; GPT-2 without its dropout."""
    small = {"num_layers": 2, "vocab_size": 40, "dim": 32, "loss_chunk": 3}
    job = jfsdp.trainer.find_job(name).with_config(**small)
    mesh = jfsdp.make_mesh(fsdp=4, devices=jax.devices()[:4])
    model = fully_shard(job.model, mesh=mesh, units=job.units, program=program)
    state = model.init(optax.identity())
    batch = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in make_batch().items()}

    def plain(module, batch):
        rows = {name: batch[name].reshape(-1, LENGTH) for name in ("tokens", "targets", "weights")}
        return row_loss(module, rows).total.reshape(-1, 2) * -1

    by_chunks = with_preference(job, "dpo", BETA).loss

    def whole(module, batch):
        return preference_loss(plain(module, batch), batch["weights"].sum(-1), batch["reference"], beta=BETA)

    ours, theirs = (model.grads(loss, check_loss=False)(state, batch)[1:] for loss in (by_chunks, whole))
    for name in ("loss", "weight", "reward_chosen"):
        np.testing.assert_allclose(ours[1][name], theirs[1][name], rtol=2e-5, atol=2e-5)
    for a, b in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 + 2e-5 * np.abs(b).max())


def test_what_no_preference_is_is_refused_by_name():
    scores = np.zeros((3, 2), np.float32)
    loss: Any = functools.partial(preference_loss, scores, scores, scores)
    refuses(lambda: loss(kind="kto"), "preference='kto'", "dpo, dpo_norm, ipo, ipo_norm")
    refuses(lambda: loss(beta=0.0), "beta=0.0")
    refuses(lambda: loss(beta=float("inf")), "beta=inf")
    refuses(lambda: preference_loss(scores, scores[:, 0], scores), "(3,)", "[B, 2]")
    refuses(lambda: with_preference(vit.job(), "dpo", 0.1), "model of tokens", "'vit'")
    own = {"model": Language, "loss": row_loss, "batch": pair_batch, "units": [Block], "optimizer": optax.sgd}
    refuses(lambda: with_preference(jfsdp.trainer.Job(**own, name="mine"), "dpo", 0.1), "'mine'", "`row_loss`")
