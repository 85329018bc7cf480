"""Evaluation and sampling of a sharded model against the same done plainly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfsdp
from jfsdp.train.data import ByteTokenizer
from jfsdp.train.job import find_job
from jfsdp.train.run.evaluate import Evaluator
from jfsdp.train.run.sample import sample_texts

TINY = {"dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 32}


@pytest.fixture(scope="module")
def sharded():
    job = find_job("llama-tiny").with_config(**TINY)
    model = jfsdp.fully_shard(job.model, units=job.units, min_size=1, remat="none")
    return job, model, model.init(job.optimizer(1e-3), seed=0)


def _batches():
    rng = np.random.default_rng(0)
    for keep in (0.9, 0.1, 0.0):
        tokens = rng.integers(0, 257, (8, 12), dtype=np.int32)
        weights = (rng.random((8, 12)) < keep).astype(np.float32)
        yield {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}


def test_evaluation_is_the_mean_over_tokens_and_not_over_batches(sharded):
    job, model, state = sharded
    loss, weight = Evaluator(model, job.loss, _batches)(state)
    plain = job.model(nnx.Rngs(jax.random.key(0)))
    sums = [nnx.jit(job.loss)(plain, batch) for batch in _batches()]
    assert weight == sum(float(s.weight) for s in sums)
    assert loss == pytest.approx(sum(float(s.total) for s in sums) / weight, rel=1e-5)
    means = [float(s.total / s.weight) for s in sums[:2]]
    assert abs(np.mean(means) - loss) > 1e-3, "the test must tell the two means apart"


def test_evaluation_takes_the_same_batches_every_time(sharded):
    job, model, state = sharded
    evaluator = Evaluator(model, job.loss, _batches, num_batches=2)
    assert evaluator(state) == evaluator(state)
    assert evaluator(state)[1] == sum(float(batch["weights"].sum()) for batch in list(_batches())[:2])


def test_nothing_held_out_is_an_error(sharded):
    job, model, state = sharded
    with pytest.raises(ValueError, match="hold no tokens"):
        Evaluator(model, job.loss, lambda: list(_batches())[2:])(state)


def test_a_greedy_sample_is_what_the_unsharded_model_says(sharded):
    job, model, state = sharded
    texts = sample_texts(model, state, ByteTokenizer(), num_tokens=5, max_len=64, prompt="def ", temperature=0.0)
    plain, ids = job.model(nnx.Rngs(jax.random.key(0))), [256, *b"def "]
    forward = nnx.jit(lambda model, tokens: model(tokens))
    for end in range(5, 10):
        padded = jnp.asarray([ids + [0] * (10 - end)])
        ids.append(int(jnp.argmax(forward(plain, padded)[0, end - 1, :257])))
    expected = ids[1 : ids.index(256, 1)] if 256 in ids[1:] else ids[1:]
    assert texts == [ByteTokenizer().decode(expected)] * 8


def test_samples_repeat_with_their_seed_and_differ_between_rows(sharded):
    _, model, state = sharded

    def sample(seed):
        return sample_texts(model, state, ByteTokenizer(), num_tokens=6, max_len=64, seed=seed)

    assert sample(1) == sample(1) != sample(2)
    assert len(set(sample(1))) > 1


def test_a_prompt_that_fills_the_window_is_refused(sharded):
    _, model, state = sharded
    with pytest.raises(ValueError, match="nothing is left to generate"):
        sample_texts(model, state, ByteTokenizer(), num_tokens=6, max_len=4, prompt="def ")
