"""What each of several processes finds out about hosts and batches; called through `tests.processes`."""

import contextlib
import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jfsdp
from jfsdp.launch import hosts
from tests.sharding import fully_shard

TX = optax.sgd(0.1)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        return x + x @ self.w


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    losses = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
    return jfsdp.Loss(losses.sum(), losses.size)


def rows(start: int, stop: int) -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)[start:stop]
    return {"x": x, "y": np.roll(x, 1, axis=-1)}


def mine() -> dict[str, Any]:
    """Four rows that only this process gives."""
    return rows(4 * jax.process_index(), 4 * jax.process_index() + 4)


def spread(batch: dict[str, Any]) -> dict[str, Any]:
    sharding = NamedSharding(jfsdp.make_mesh(), PartitionSpec("fsdp"))
    return {name: jax.make_array_from_callback(x.shape, sharding, lambda i, x=x: x[i]) for name, x in batch.items()}


def model_of(mesh=None, strategy="full_shard"):
    return fully_shard(Net, units=[Layer], min_size=0, mesh=mesh, strategy=strategy)


def train(model, batch) -> list[float]:
    step, state, losses = model.train_step(loss, TX, check_loss=False), model.init(TX), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@contextlib.contextmanager
def on_host(name):
    """Let this process say that it is on this host; None: what is true."""
    hosts._first_processes.cache_clear()
    with mock.patch.object(hosts, "host_id", return_value=name) if name is not None else contextlib.nullcontext():
        yield
    hosts._first_processes.cache_clear()


def node_on(names):
    """Shard; return the order of the processes in the mesh, how the units are kept, and what was told."""
    with on_host(names and names[jax.process_index()]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = model_of(strategy="zeropp")
    order = [device.process_index for device in model.mesh.devices.flat]
    kept = {policy.reshard_after_forward for policy in model.layout.policies[1:]}
    return order, list(kept), [str(item.message) for item in caught]


def train_on(names):
    with on_host(names[jax.process_index()]):
        return train(model_of(strategy="zeropp"), mine())


def shard_over_tensor(kind: str):
    """Shard rows over 2 x 2 processes, as `shard_batch`."""
    share = jax.process_index() // 2 if kind == "alike" else jax.process_index()
    model = fully_shard(Net, mesh=jfsdp.make_mesh(fsdp=2, tensor=2), min_size=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = model.train_step(loss, TX).shard_batch(rows(4 * share, 4 * share + 4))["x"]
    return x.shape, np.asarray(x.addressable_data(0)).tolist(), [str(item.message) for item in caught]


def shard_batch(kind: str):
    """Shard a batch of some kind; return its global shape, this process's rows of it, and what was told."""
    batch = {
        "own": mine(),
        "on own device": jax.device_put(mine(), jax.local_devices()[0]),
        "global": spread(rows(0, 16)),
        "same": rows(0, 4),
        "uneven": rows(0, 4 + jax.process_index()),
        "other leaves": mine() if jax.process_index() else {"x": mine()["x"]},
        "mixed": {"x": mine()["x"], "y": spread(rows(0, 16))["y"]},
    }[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = model_of().train_step(loss, TX).shard_batch(batch)["x"]
    return x.shape, np.asarray(x.addressable_data(0)).tolist(), [str(item.message) for item in caught]


@functools.cache
def sums():
    model = model_of()
    return model.init(TX), model.forward(lambda model, x: x.sum())


def evaluate(is_same: bool):
    state, evaluate = sums()
    return float(evaluate(state, np.ones((4, 8), np.float32) if is_same else mine()["x"]))


def examine(directory: str, is_shared: bool):
    """Return what `jfsdp doctor --processes` finds; with nothing shared each process has a directory of its own."""
    from jfsdp.plan.cluster.doctor import check_settings
    from jfsdp.plan.cluster.processes import examine_processes

    own = Path(directory) / ("all" if is_shared else str(jax.process_index()))
    own.mkdir(exist_ok=True)
    settings = {"NCCL_P2P_DISABLE": "1"} if jax.process_index() == 2 else {}
    sizes = {"replica": 2, "fsdp": 2}
    found = examine_processes(own, sizes, lambda: check_settings(settings), lambda place: contextlib.nullcontext())
    links = [dataclasses.astuple(link)[:3] for link in found.links]
    return [[one.topic for one in found.findings], links, len(found.facts)]
