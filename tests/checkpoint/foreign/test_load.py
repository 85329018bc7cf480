"""The first state of a run from given weights: in any form of sharding, cast, and read in slices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import torch

import jfsdp
from jfsdp.checkpoint.foreign import pretrained
from jfsdp.checkpoint.foreign.export import write_safetensors
from jfsdp.checkpoint.foreign.mapping import Exported
from jfsdp.checkpoint.foreign.pretrained import load_pretrained
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.checkpoint.source import read_whole
from jfsdp.modules.adapt import as_model
from jfsdp.train.update.ema import with_ema
from jfsdp.trainer.job import load_job
from tests.checkpoint.arrays import Arrays
from tests.options import config_of
from tests.refusals import refusing, warning
from tests.steps import fully_shard

FIELDS = ("dim=16", "num_layers=2", "num_heads=2", "num_kv_heads=1", "ffn_dim=24", "vocab_size=37")
TX = optax.chain(optax.sgd(1e-3, momentum=0.9), jfsdp.optim.track_ema(0.9))
TARGETS: dict[str, dict[str, Any]] = {
    "full_shard on 4": {"sizes": {"fsdp": 4}},
    "full_shard on 3": {"sizes": {"fsdp": 3}},
    "full_shard on 2x2": {"sizes": {"replica": 2, "fsdp": 2}},
    "zero1": {"sizes": {"fsdp": 4}, "strategy": "zero1", "mp_policy": jfsdp.MixedPrecisionPolicy("bfloat16")},
    "flat storage": {"sizes": {"fsdp": 4}, "program": "manual", "storage": "flat"},
}


@functools.cache
def job():
    return load_job("llama-tiny", None).with_config(**config_of(FIELDS))


def sharded(target, **more):
    settings = {**TARGETS[target], **more}
    sizes = settings.pop("sizes")
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    return fully_shard(job().model, mesh=mesh, units=job().units, min_size=8, **settings)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of random weights under the names of Hugging Face, and what it holds under ours."""
    rng = np.random.default_rng(0)
    ours = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in as_model(job().model).params.items()}
    directory = tmp_path_factory.mktemp("weights") / "hf"
    write_safetensors(Exported(Arrays(ours), job().pretrained), directory)
    return directory / "model.safetensors", ours


def load(path, target, **more):
    return load_pretrained(path, sharded(target, **more), TX, job().pretrained)


def assert_params(state, ours):
    arrays = state
    for leaf in state.layout.leaves:
        found = np.asarray(arrays.params[leaf.path])
        inside = tuple(map(slice, leaf.shape))
        assert found[inside].tobytes() == ours[leaf.path].astype(found.dtype).tobytes(), leaf.path
        padding = found.copy()
        padding[inside] = 0
        assert not padding.any(), leaf.path


@pytest.mark.parametrize("target", TARGETS)
def test_weights_come_into_any_form_and_the_optimizer_begins_from_them(target, weights):
    path, ours = weights
    state = load(path, target)
    assert_params(state, ours)
    like = sharded(target).abstract_state(TX)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for value, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (value.shape, value.dtype, value.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
    assert int(state.step) == 0
    averages = state.opt_state[1]
    found = jax.tree.leaves(averages)
    params = {np.asarray(value).tobytes() for value in state.params.values()}
    assert {np.asarray(value).tobytes() for value in found if value.ndim} == params
    assert not any(np.asarray(value).any() for value in jax.tree.leaves(state.opt_state[0]))
    for name, copy in state.work.items():
        assert np.asarray(copy).tobytes() == np.asarray(state.params[name].astype(jnp.bfloat16)).tobytes()
    if "zero1" in target:
        assert state.work


def test_a_torch_file_and_a_checkpoint_of_ours_give_the_same_state(weights, tmp_path):
    path, ours = weights
    tensors = {name: torch.from_numpy(value) for name, value in safetensors.numpy.load_file(path).items()}
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "model.pt")
    state = load_pretrained(tmp_path / "model.pt", sharded("full_shard on 3"), TX, job().pretrained, key="model")
    assert_params(state, ours)
    jfsdp.checkpoint.save(tmp_path / "ours", state)
    assert_params(load_pretrained(tmp_path / "ours", sharded("flat storage"), TX), ours)


def test_every_byte_is_read_once_and_no_slice_is_larger_than_a_device_holds(weights, monkeypatch):
    path, ours = weights
    read: list[tuple[str, int]] = []

    class Counted(SafetensorsSource):
        def read(self, name, index):
            block = super().read(name, index)
            read.append((name, block.nbytes))
            return block

    monkeypatch.setattr(pretrained, "SafetensorsSource", Counted)
    load(path, "full_shard on 4")
    totals = {name: sum(size for other, size in read if other == name) for name, _ in read}
    split = "model.layers.0.mlp.gate_proj.weight"
    assert totals[split] == 16 * 24 * 4
    assert max(size for name, size in read if name == split) == 16 * 24 * 4 // 4
    # Split leaves once, those that every device holds once for all devices of this process.
    assert sum(totals.values()) == sum(value.nbytes for value in ours.values())


@pytest.mark.parametrize("target", ["flat storage", pytest.param("full_shard on 3", marks=pytest.mark.proof)])
def test_averages_are_read_in_place_of_parameters(target, weights, tmp_path):
    state = load(weights[0], target)
    doubled = jax.tree.map(
        lambda x: jax.device_put(np.asarray(x) * np.asarray(2, x.dtype), x.sharding), state.opt_state
    )
    state = dataclasses.replace(state, opt_state=doubled)
    jfsdp.checkpoint.save(tmp_path / "c", state)
    leaves = as_model(job().model).params
    source = pretrained.our_parameters(tmp_path / "c", leaves, averages=True)
    for name in leaves:
        wanted = np.asarray(jfsdp.checkpoint.gather_leaf(with_ema(state), name))
        assert wanted.any() and np.array_equal(read_whole(source, name), wanted), name
    plain = load_pretrained(weights[0], sharded(target), optax.sgd(1.0), job().pretrained)
    jfsdp.checkpoint.save(tmp_path / "plain", plain)
    with refusing("--ema"):
        pretrained.our_parameters(tmp_path / "plain", leaves, averages=True)


@pytest.mark.parametrize("target", ["full_shard on 3", "flat storage"])
def test_weights_that_are_not_finite_are_no_beginning_unless_that_is_said(target, weights, tmp_path):
    tensors = safetensors.numpy.load_file(weights[0])
    tensors["model.norm.weight"][[0, 3]] = np.nan, np.inf
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with refusing("norm.scale", "2 of 16", "allow_nonfinite"):
        load(tmp_path / "model.safetensors", target)
    with warning("norm.scale", "2 of 16"):
        state = load_pretrained(
            tmp_path / "model.safetensors", sharded(target), TX, job().pretrained, allow_nonfinite=True
        )
    assert np.isnan(np.asarray(state.params["norm.scale"])[0])


def test_other_weights_are_refused_with_what_is_left_over(weights, tmp_path):
    tensors = safetensors.numpy.load_file(weights[0])
    del tensors["model.norm.weight"]
    safetensors.numpy.save_file({**tensors, "model.extra": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with refusing("model.extra", "model.norm.weight"):
        load(tmp_path / "model.safetensors", "full_shard on 4")
