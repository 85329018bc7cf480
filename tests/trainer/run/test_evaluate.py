"""Evaluation and sampling of sharded models, of both Flax APIs, against the same done plainly."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from examples import vit
from jfsdp.trainer.job import find_job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.evaluate import make_evaluator
from jfsdp.trainer.sources.tokens import TokenSource
from tests.refusals import refuses
from tests.sharding import fully_shard

TINY = {
    "llama-tiny": {"dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 32},
    "gpt2-tiny": {"dim": 16, "num_layers": 2, "num_heads": 2, "dropout": 0.2, "attention_dropout": 0.2},
}


@pytest.fixture(scope="module", params=TINY)
def sharded(request):
    job = find_job(request.param).with_config(**TINY[request.param])
    model = fully_shard(job.model, units=job.units, min_size=1, remat="none")
    return job, model, model.init(job.optimizer(1e-3), seed=0)


def make_plain(job):
    """The same model with the same weights, as a function of its inputs, on one device."""
    if not isinstance(job.model, tuple):
        model = job.model(nnx.Rngs(jax.random.key(0)))
        forward = nnx.jit(lambda model, *args, **kwargs: model(*args, **kwargs))
        return lambda *args, **kwargs: forward(model, *args, **kwargs)
    module, _ = job.model
    variables = module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return jax.jit(lambda *args, **kwargs: module.apply(variables, *args, **kwargs))


def _batches():
    rng = np.random.default_rng(0)
    for keep in (0.9, 0.1, 0.0):
        tokens = rng.integers(0, 257, (8, 12), dtype=np.int32)
        weights = (rng.random((8, 12)) < keep).astype(np.float32)
        yield {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}


def test_evaluation_is_the_mean_over_tokens_and_not_over_batches(sharded):
    job, model, state = sharded
    plain = make_plain(job)

    def loss_fn(model: Any, batch: Any) -> Any:
        found = (job.eval_loss or job.loss)(model, batch)
        return jfsdp.Loss(found.total, found.weight, {**found.aux, "most": jfsdp.Max(batch["tokens"].max())})

    loss, weight, aux = make_evaluator(model, loss_fn, _batches)(state)
    sums = [loss_fn(plain, batch) for batch in _batches()]
    assert weight == sum(float(s.weight) for s in sums)
    assert loss == pytest.approx(sum(float(s.total) for s in sums) / weight, rel=1e-5)
    assert aux.pop("most") == max(batch["tokens"].max() for batch in _batches())
    assert aux == {"correct": pytest.approx(sum(float(s.aux["correct"]) for s in sums) / weight)}
    means = [float(s.total / s.weight) for s in sums[:2]]
    assert abs(np.mean(means) - loss) > 1e-3, "the test must tell the two means apart"


def test_evaluation_takes_the_same_batches_every_time(sharded):
    job, model, state = sharded
    evaluator = make_evaluator(model, job.loss, _batches, num_batches=2)
    assert evaluator(state) == evaluator(state)
    assert evaluator(state)[1] == sum(float(batch["weights"].sum()) for batch in list(_batches())[:2])


def test_nothing_held_out_is_an_error(sharded):
    job, model, state = sharded
    with pytest.raises(ValueError, match="the held-out batches have no weight"):
        make_evaluator(model, job.loss, lambda: list(_batches())[2:])(state)


@pytest.fixture
def sample(sharded, tmp_path):
    job, model, state = sharded
    (tmp_path / "a.txt").write_text("def f(): pass\n" * 20)

    def sample(seq_len=64, **options):
        config = TrainConfig(data=str(tmp_path), tokenizer="byte", eval_fraction=0.0, sample_tokens=6, **options)
        return TokenSource(config, job, seq_len).sample(job, model, state)

    return sample


@pytest.mark.parametrize("sharded", ["llama-tiny"], indirect=True)
def test_samples_begin_with_the_prompt_repeat_with_their_seed_and_differ_between_rows(sample):
    texts = sample(seed=1, prompt="def ")
    assert len(texts) == 8 and len(set(texts)) > 1 and all(text.startswith("def ") for text in texts)
    assert sample(seed=1, prompt="def ") == texts != sample(seed=2, prompt="def ")


def test_a_prompt_that_fills_a_row_is_refused(sample):
    refuses(lambda: sample(seq_len=5, prompt="def "), "0 tokens to generate")


# ---- a loss of its own for evaluation ----


@pytest.fixture(scope="module")
def images():
    """A Vision Transformer with dropout, a head, and batch statistics that no batch has."""
    sizes = {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 32}
    config = dataclasses.replace(vit.CONFIG, **sizes, norm="batch", dropout=0.3)
    job = dataclasses.replace(vit.job(), model=functools.partial(vit.ViT, config))
    model = fully_shard(job.model, units=job.units, min_size=1, remat="none")
    state = model.init(optax.identity(), seed=0)
    moved = {name: x + 0.5 if name.endswith((".mean", ".var")) else x for name, x in state.model_state.items()}
    head = state.params["head.kernel"]  # zeros at first
    weights = jax.device_put(np.random.default_rng(1).normal(size=head.shape).astype(np.float32), head.sharding)
    params = {**state.params, "head.kernel": weights}
    return job, model, dataclasses.replace(state, params=params, model_state=moved)


def _image_batch(seed):
    rng = np.random.default_rng(seed)
    weights = (rng.random(16) < 0.7).astype(np.float32)
    labels = rng.integers(0, 10, 16, dtype=np.int32)
    return {"images": rng.random((16, 8, 8, 1), np.float32) * 3, "labels": labels, "weights": weights}


def _logits_of_stored_statistics(job, state, images):
    """The model rebuilt on one device from the names in the state, in evaluation mode."""
    model = job.model(nnx.Rngs(0))
    flat = nnx.to_flat_state(nnx.state(model))
    named = {**state.params, **state.model_state}
    for path, variable in flat:
        stored = jax.device_get(named[".".join(map(str, path))])
        variable[...] = stored[tuple(map(slice, variable.shape))]  # without the padding that sharding may have added
    model.eval()
    return nnx.jit(lambda model, images: model(images))(model, images)


def test_evaluation_drops_nothing_and_uses_the_stored_statistics(images):
    job, model, state = images
    batch = _image_batch(9)
    loss, weight, aux = make_evaluator(model, job.eval_loss, lambda: [batch])(state)
    logits = np.asarray(_logits_of_stored_statistics(job, state, batch["images"]), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = log_probabilities[np.arange(16), batch["labels"]]
    assert weight == batch["weights"].sum()
    assert loss == pytest.approx(-(chosen * batch["weights"]).sum() / weight, rel=1e-4)
    correct = (logits.argmax(-1) == batch["labels"]) * batch["weights"]
    assert aux == {"correct": pytest.approx(correct.sum() / weight)}
