"""Rows that two processes share, and checkpoints of any context size."""

import functools

import jax
import numpy as np
import optax
import pytest

import jfsdp
from tests.context import remote
from tests.context.test_over_context import Layer, Net, make_batch, token_loss
from tests.launch.raised import all_raise
from tests.processes import Processes
from tests.sharding import fully_shard
from tests.thin import thin

HERE = "tests.context.remote"


@pytest.fixture(scope="module")
def processes():
    running = Processes(2, devices_each=2)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("mesh", "program"),
    thin([({"context": 4}, "manual"), ({"context": 4}, "xla"), ({"fsdp": 2, "context": 2}, "xla")], 3),
)
def test_two_processes_compute_the_losses_of_one(processes, mesh, program):
    one = remote.train({"fsdp": 1}, program)
    for losses in processes.call(f"{HERE}:train", mesh, program):
        np.testing.assert_allclose(losses, one, rtol=1e-12)


def test_processes_that_share_rows_must_read_the_same_tokens(processes):
    all_raise(
        processes,
        ["processes 0 and 1 gave different rows", "'context'"],
        f"{HERE}:train",
        {"context": 4},
        "manual",
        True,
    )


TX = optax.adam(1e-2)


@functools.cache
def model_on(fsdp, context, strategy="full_shard"):
    mesh = jfsdp.make_mesh(fsdp=fsdp, context=context, devices=jax.devices()[: fsdp * context])
    return fully_shard(Net, mesh=mesh, units=[Layer], min_size=0, strategy=strategy)


@pytest.mark.parametrize(("fsdp", "context"), thin([(3, 2), (1, 8), (1, 1), (2, 4)], 4))
def test_a_checkpoint_restores_on_any_context_size_to_the_bit(tmp_path, fsdp, context):
    with jax.enable_x64(True):
        source = model_on(2, 2)
        state, _ = source.train_step(token_loss, TX, check_loss=False)(source.init(TX, 0), make_batch(packed=False))
        jfsdp.checkpoint.save(tmp_path / "c", state)
        model = model_on(fsdp, context)
        restored = jfsdp.checkpoint.restore(tmp_path / "c", model.abstract_state(TX))
        moved = jfsdp.checkpoint.reshard(state, model.layout, mesh=model.mesh)
        for path, leaf in restored.params.items():
            whole = jfsdp.checkpoint.gather_leaf(state, path)
            for other in (restored, moved):
                np.testing.assert_array_equal(whole, jfsdp.checkpoint.gather_leaf(other, path))
            assert leaf.sharding.is_equivalent_to(moved.params[path].sharding, leaf.ndim)
        # One more step on the target equals one on the source up to the order of sums.
        batch, losses = make_batch(packed=True), []
        for one, at in ((source, state), (model, restored)) if fsdp != 3 else ():
            step = one.train_step(token_loss, TX, check_loss=False)
            losses.append(float(step(at, batch)[1]["loss"]))
        assert not losses or abs(losses[0] - losses[1]) <= 1e-12 * losses[0]
