"""Offloaded states are updated parameter by parameter: what waits for what, and that no bit differs."""

import jax
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.engine.engine import is_on_host
from jfsdp.train.update import stream
from tests import models_small as small
from tests.sharding import fully_shard
from tests.thin import thin

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clipped, averaged": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2), jfsdp.optim.track_ema(0.9)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
}
OFFLOADED = jfsdp.OffloadPolicy(params=True, opt_state=True)


def shard(**options):
    return fully_shard(small.Tower, mesh=jfsdp.make_mesh(fsdp=8), units=[small.Block], min_size=0, **options)


@pytest.mark.parametrize("name", thin(["clipped, averaged", "adamw", "adafactor", "lamb"], 4))
def test_a_streamed_update_gives_the_same_bits(name):
    tx, found = OPTIMIZERS[name], []
    for options in ({}, {"offload_policy": OFFLOADED}):
        model = shard(**options)
        state = model.init(tx)
        grads = model.model.tree.build(model.trained_arrays(state))  # any numbers will do
        found.append(model.apply_gradients(state, grads, tx, skip_nonfinite=True))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    kinds = {value.sharding.memory_kind for value in found[1].params.values()}
    assert kinds == {"pinned_host"}


def test_copies_wait_for_the_update_before_the_last(monkeypatch):
    """All but the first WINDOW parameters, although optax compiles what it does to all moments at once."""
    waited = []
    barrier = jax.lax.optimization_barrier

    def watched(values):
        if isinstance(values, tuple) and isinstance(values[0], jax.Array) and is_on_host(values[0]):
            waited.append(values[1])
        return barrier(values)

    model = shard(offload_policy=jfsdp.OffloadPolicy(opt_state=True))
    tx = OPTIMIZERS["adamw"]
    step, state = model.train_step(small.token_loss, tx), model.abstract_state(tx)
    monkeypatch.setattr(stream.jax.lax, "optimization_barrier", watched)
    step.trace(state, small.make_batches(1)[0])
    waits = [value for value in waited if value is not waited[0]]
    num_leaves = len(model.layout.leaves)
    assert [len(waited), len(waits)] == [2 * num_leaves, 2 * (num_leaves - stream.WINDOW)]  # two moments each
    assert len({id(value) for value in waits}) == num_leaves - stream.WINDOW
