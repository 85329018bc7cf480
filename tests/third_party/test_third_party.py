"""Models of other people, installed from the package index, sharded and trained as they are.

- `dantinox` (NNX; its models are in its package `core`): a decoder that is no pytree and holds its blocks in a plain
  list, with tied embeddings, dropout, masks and rotary angles as bare arrays, and projections that it never uses.
- `jax-resnet` (Linen): layers made outside and adopted by a container, convolutions, batch statistics, and a train mode
  that it reads from whether the statistics are mutable.

Limits as in tests/engine/test_parity.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core.block import Block
from core.config import Config
from core.model import Transformer
from jax_resnet import ResNet18
from jax_resnet.resnet import ResNetBlock

import jfsdp
from tests import reference
from tests.modules import parity
from tests.steps import fully_shard

STEPS, ROWS, LEARNING_RATE = 4, 16, 1e-2
TX = optax.adamw(LEARNING_RATE, eps=1e-4)
VOCAB, LENGTH, CLASSES, IMAGE = 61, 6, 10, 16  # a prime vocabulary: divides by no mesh


@dataclasses.dataclass(frozen=True)
class Case:
    """A model as `fully_shard` takes it, its loss, the class of its units and their names, and its batches."""

    source: Any
    loss: Callable
    unit: type
    names: list[str]
    batch: Callable
    runs: list[tuple[str, str, int]]


def decoder(dropout, runs):
    config = Config(
        dim=32,
        n_heads=4,
        head_size=8,
        kv_heads=2,
        num_blocks=2,
        vocab_size=VOCAB,
        max_context=8,
        dropout_rate=dropout,
        down_dim_q=16,
        down_dim_kv=16,
        expansion=2,
        gradient_checkpointing=False,
    )

    def loss(model, batch):
        logits = model(batch["tokens"], use_cache=False, kv_caches=None, cache_index=0).logits
        return mean_cross_entropy(logits, batch["targets"])

    def batch(rng):
        ids = rng.integers(0, VOCAB, (2, ROWS, LENGTH)).astype(np.int32)
        return {"tokens": ids[0], "targets": ids[1]}

    return Case(lambda rngs: Transformer(config, rngs), loss, Block, ["blocks.0", "blocks.1"], batch, runs)


def resnet():
    module = ResNet18(n_classes=CLASSES, hidden_sizes=(16, 24), stage_sizes=[1, 1])

    def loss(model, batch):
        return mean_cross_entropy(model(batch["images"]), batch["labels"])

    def batch(rng):
        pixels = rng.standard_normal((ROWS, IMAGE, IMAGE, 3)).astype(np.float32)
        return {"images": pixels, "labels": rng.integers(0, CLASSES, ROWS).astype(np.int32)}

    example = (jax.ShapeDtypeStruct((1, IMAGE, IMAGE, 3), jnp.float32),)
    # Statistics are of the rows of a microbatch: accumulation reduces each, which a hybrid strategy would warn of.
    runs = [("full_shard", "8", 1), ("zero2", "8", 2)]
    return Case((module, example), loss, ResNetBlock, ["layers_2", "layers_3"], batch, runs)


def mean_cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jfsdp.Loss(losses.sum(), jnp.float32(losses.size))


MODELS = {
    "dantinox": decoder(0.1, [("full_shard", "8", 1), ("zero2", "8", 2)]),
    # Hybrid strategies draw masks by device, where one device draws them by batch.
    "dantinox, no dropout": decoder(0.0, [("full_shard", "2x4", 2)]),
    "jax-resnet": resnet(),
}
MESHES: dict[str, Any] = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}}
RUNS = [
    pytest.param(model, *run, marks=[pytest.mark.proof] if place or model != "jax-resnet" else [])
    for model, case in MODELS.items()
    for place, run in enumerate(case.runs)
]


def batches(model):
    rng = np.random.default_rng(0)
    return [MODELS[model].batch(rng) for _ in range(STEPS)]


def shard(model, strategy="full_shard", mesh="8"):
    case = MODELS[model]
    program = None if model == "dantinox, no dropout" else "xla"  # batch statistics, and one device's dropout masks
    mesh = jfsdp.make_mesh(**MESHES[mesh])
    return fully_shard(case.source, mesh=mesh, strategy=strategy, units=[case.unit], min_size=20, program=program)


@functools.cache
def oracle(model, accumulate):
    case = MODELS[model]
    return reference.train(case.source, case.loss, TX, batches(model), accumulate=accumulate)


@pytest.mark.parametrize(("model", "strategy", "mesh", "accumulate"), RUNS)
def test_an_unmodified_model_trains_as_on_one_device(model, strategy, mesh, accumulate):
    sharded, wanted = shard(model, strategy, mesh), oracle(model, accumulate)
    state = sharded.init(TX)
    step = sharded.train_step(MODELS[model].loss, TX, accumulate=accumulate, check_loss=False)
    losses = []
    for batch in batches(model):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, wanted.losses, rtol=1e-5)
    params = {name: reference.logical(state, name, value) for name, value in state.params.items()}
    error, leaf = reference.worst_leaf(params, wanted.params, LEARNING_RATE * STEPS)
    assert error < 1e-3, f"{leaf}: {error:.2e}"
    for name, value in wanted.model_state.items():
        found = np.asarray(state.model_state[name])
        if np.issubdtype(value.dtype, np.floating):
            assert np.abs(found - value).max() < 1e-3 * max(1e-2, np.abs(value).max()), name
        else:
            np.testing.assert_array_equal(found, value, err_msg=name)  # counts of draws, masks


@pytest.mark.parametrize("model", list(MODELS))
def test_its_blocks_are_split_and_gathered_one_by_one(model, monkeypatch):
    case, sharded = MODELS[model], shard(model)
    owned = [sharded.layout.unit(name).leaves for name in case.names]
    for leaf in (sharded.layout.by_path[path] for leaves in owned for path in leaves):
        assert leaf.stage("param").axes == (("fsdp",) if np.prod(leaf.shape) >= 20 else ()), leaf.path
    counts = parity.count_calls(monkeypatch, sharded, case.loss, batches(model)[0])
    assert counts == dict.fromkeys(["", *case.names], 1)  # the root's own too
