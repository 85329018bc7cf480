"""Checkpoints without the frozen leaves: what they hold, onto what they go, and what they refuse."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.checkpoint.convert import convert
from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.checkpoint.frozen import frozen_digests
from jfsdp.cli import main
from jfsdp.layout.lora import Adapter
from tests.checkpoint.elastic import bits
from tests.models_small import Block, Tower, make_batches
from tests.refusals import refuses, refusing
from tests.steps import fully_shard

TX = optax.sgd(1e-2, momentum=0.9)
LORA = jfsdp.LoRA(["**.up.kernel", "**.down.kernel"], rank=4)


def tower(rngs):
    return Tower(rngs, num_layers=2)


def shard(fsdp=4, **options):
    mesh = jfsdp.make_mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    return fully_shard(tower, mesh=mesh, units=[Block], **({"lora": LORA, "min_size": 20} | options))


def moved(state):
    """Return a state as training leaves it: other adapters, moments and counts, and the frozen leaves as they were."""
    move = lambda x: jax.device_put(np.asarray(x) + 1, x.sharding)  # noqa: E731
    params = {leaf.path: move(state.params[leaf.path]) for leaf in state.layout.leaves if leaf.trainable}
    return dataclasses.replace(state, params=state.params | params, opt_state=jax.tree.map(move, state.opt_state))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path, state = tmp_path_factory.mktemp("frozen") / "c", moved(shard().init(TX))
    jfsdp.checkpoint.save(path, state, frozen=False)
    return path, state


def test_it_holds_what_is_trained_and_goes_onto_its_base_on_any_mesh(saved):
    path, state = saved
    arrays = CheckpointSource(path).arrays
    params = {name for name in arrays if name.startswith("params.")}
    assert params == {f"params.{leaf.path}" for leaf in state.layout.leaves if leaf.trainable}
    for fsdp, strategy in ((3, "full_shard"), (2, "zero2")):
        assert bits(jfsdp.checkpoint.restore(path, shard(fsdp, strategy=strategy).init(TX))) == bits(state)


def test_digests_are_those_of_every_mesh_and_change_with_any_value():
    state, other = shard().init(TX), shard(3, strategy="ddp").init(TX)
    assert frozen_digests(state) == frozen_digests(other)
    kernel = state.params["head.kernel"]
    swapped = kernel.at[0, 1].set(kernel[1, 0]).at[1, 0].set(kernel[0, 1])
    changed = dataclasses.replace(state, params={**state.params, "head.kernel": swapped})
    differing = {name for name, x in frozen_digests(changed).items() if x != frozen_digests(state)[name]}
    assert differing == {"head.kernel"}


def test_another_base_and_no_base_are_refused(saved):
    path, _ = saved
    half = shard(mp_policy=jfsdp.MixedPrecisionPolicy(frozen_dtype="bfloat16")).init(TX)
    for like, fact in (
        (shard().init(TX, seed=1), "another base"),
        (half, "another base"),
        (shard().abstract_state(TX), "live state"),
    ):
        refuses(functools.partial(jfsdp.checkpoint.restore, path, like), fact)


def test_another_adapter_is_refused_by_the_names_of_its_leaves(saved):
    path, _ = saved
    for targets, rank, fact in (
        (["**.up.kernel"], 2, "up.kernel.lora_a"),
        (["**.up.kernel", "head.kernel"], 4, "head.kernel.lora_a"),
        (["**.up.kernel"], 4, "down.kernel.lora_a"),
    ):
        like = shard(lora=jfsdp.LoRA(targets, rank=rank)).abstract_state(TX)
        refuses(functools.partial(jfsdp.checkpoint.restore, path, like), fact)
    refuses(lambda: jfsdp.checkpoint.restore(path, shard().init(TX), only="params.head"), "frozen", "only=")


def test_it_says_what_its_adapters_compute_and_refuses_another_scale(saved, capsys):
    path, state = saved
    (one, _) = CheckpointSource(path).manifest["layout"]["adapters"]
    assert (one["rank"], one["alpha"], one["rslora"], one["has_magnitude"]) == (4, 32.0, False, False)
    assert Adapter.from_dict(one) == state.layout.adapters[0]
    assert main(["checkpoint", "inspect", str(path)]) == 0
    assert "rank 4, alpha 32, of 2 arrays" in capsys.readouterr().out
    other = shard(lora=jfsdp.LoRA(["**.up.kernel", "**.down.kernel"], rank=4, alpha=16)).init(TX)
    with refusing("kernel:", "rank 4", "alpha 32", "scale 8", "alpha 16", "scale 4"):
        jfsdp.checkpoint.restore(path, other)
    jfsdp.checkpoint.restore(path, other, only="step")


def test_a_run_of_checkpoints_leaves_the_base_out_too(saved, tmp_path):
    with jfsdp.checkpoint.Checkpointer(tmp_path, frozen=False) as checkpoints:
        checkpoints.save(2, saved[1])
        assert bits(checkpoints.restore(like=shard().init(TX))[0]) == bits(saved[1])
    convert(saved[0], tmp_path / "c")
    assert bits(jfsdp.checkpoint.restore(tmp_path / "c", shard(3).init(TX))) == bits(saved[1])


def test_flat_storage_leaves_the_base_out_too(saved, tmp_path):
    model = shard(3, program="manual", storage="flat", min_size=0)
    jfsdp.checkpoint.save(tmp_path / "c", jfsdp.checkpoint.restore(saved[0], model.init(TX)), frozen=False)
    assert CheckpointSource(tmp_path / "c").arrays == CheckpointSource(saved[0]).arrays
    assert bits(jfsdp.checkpoint.restore(tmp_path / "c", shard().init(TX))) == bits(saved[1])
    with pytest.raises(ValueError, match="another base"):
        jfsdp.checkpoint.restore(tmp_path / "c", model.init(TX, seed=1))


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.proof), {"quantized": {"**.up.kernel": "nf4"}}])
def test_first_weights_with_dora_are_those_of_every_mesh_and_its_adapters_change_nothing(options):
    lora = jfsdp.LoRA(["**.up.kernel", "**.down.kernel"], rank=2, dora=True)
    models = [shard(1, lora=lora, **options), shard(lora=lora, **options), shard(lora=None, frozen="**", **options)]
    states = [model.init(optax.sgd(1.0)) for model in models]
    assert frozen_digests(states[0]) == frozen_digests(states[1])
    tokens = make_batches(1)[0]["tokens"]
    forwards = [model.forward(lambda module, ids: module(ids)) for model in models[1:]]
    adapted, plain = (np.asarray(run(state, tokens)) for run, state in zip(forwards, states[1:], strict=True))
    np.testing.assert_allclose(adapted, plain, atol=1e-4 * np.abs(plain).max())
