"""Contenders in JAX: jfsdp with one of its settings, or the same model under plain `jax.jit`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jfsdp.extras import install_command
from jfsdp.layout.mesh import make_abstract_mesh, make_mesh
from jfsdp.train.fully_shard import fully_shard
from jfsdp.train.step.loss import as_loss
from jfsdp.train.update.update import clip_by_norm
from jfsdp.trainer.job import Job
from jfsdp.trainer.options import make_optimizer, shard_job, train_arguments

from .case import LEARNING_RATE, count_rows, find_job, mesh_sizes, read_batches
from .options import PLAIN, BenchOptions, as_jfsdp


class JaxContender:
    """A step with its state and batches. The first step compiles it.

    Args:
      path: the file of `write_batches`.
      is_cuda: whether the devices must be GPUs.

    Raises:
      ValueError: for invalid options, and fewer devices than requested.
    """

    def __init__(self, name: str, options: BenchOptions, path: str, num_devices: int, *, is_cuda: bool):
        if is_cuda and jax.default_backend() != "gpu":
            raise ValueError(
                f"JAX sees none of this machine's GPUs; {install_command('cuda12')}; or set JAX_PLATFORMS=cpu"
            )
        if jax.device_count() < num_devices:
            raise ValueError(f"--devices {num_devices}: JAX sees {jax.device_count()}; lower it")
        job, rows = find_job(options), count_rows(options, num_devices)
        batches = read_batches(options, job, rows, path)
        if name == PLAIN:
            self._step, self._state = _plain(job, options)
        else:
            mesh = make_mesh(devices=jax.devices()[:num_devices], **mesh_sizes(options, num_devices))  # type: ignore[arg-type]
            options = as_jfsdp(options, name)
            model = shard_job(options, job, mesh)
            tx = make_optimizer(options, job, model, LEARNING_RATE)
            self._step = model.train_step(job.loss, tx, **train_arguments(options))
            self._state = model.init(tx, options.seed)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state)
        self._lower = lambda: self._step.lower(shapes, batches[0])
        self._next = itertools.cycle(batches)

    def steps(self, count: int) -> dict[str, Any]:
        """Run steps, wait for each, and return seconds and losses."""
        seconds, losses = [], []
        for _ in range(count):
            batch, start = next(self._next), time.perf_counter()
            self._state, metrics = self._step(self._state, batch)
            jax.block_until_ready((self._state, metrics))
            seconds.append(time.perf_counter() - start)
            losses.append(float(metrics["loss"]))
        return {"seconds": seconds, "losses": losses}

    def memory(self, *, is_first: bool) -> dict[str, int]:
        """Return memory peaks in bytes, and `compiled`, which compiles the step again, if `is_first`."""
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
        found = {"allocated": max(peaks)} if any(peaks) else {}
        return found | (
            {"compiled": self._lower().compile().memory_analysis().peak_memory_in_bytes} if is_first else {}
        )


def _plain(job: Job, options: BenchOptions) -> tuple[Any, Any]:
    """Return a step of plain Flax and optax, computed in `param_dtype`, and its initial state.

    The step is one function under `jax.jit` with donation, as in the documentation of Flax and JAX, without remat.
    """
    dtype = options.param_dtype
    key = options.seed
    model = fully_shard(job.model, mesh=make_abstract_mesh({"fsdp": 1}), units=job.units)
    tx = make_optimizer(options, job, model, LEARNING_RATE)
    if isinstance(job.model, tuple):
        module, inputs = job.model[:2]
        variables = dict(module.init(jax.random.key(key), *(jnp.zeros(x.shape, x.dtype) for x in inputs)))
        params, rest = variables.pop("params"), variables

        def bind(params: Any) -> Any:
            return lambda *args, **kwargs: module.apply({"params": params, **rest}, *args, **kwargs)
    else:
        graph, params, rest = nnx.split(job.model(nnx.Rngs(key)), nnx.Param, ...)

        def bind(params: Any) -> Any:
            return nnx.merge(graph, params, jax.tree.map(lambda x: x, rest))

    def total(params: Any, batch: Any) -> Any:
        cast = jax.tree.map(lambda x: x.astype(dtype or x.dtype), params)
        loss = as_loss(job.loss(bind(cast), batch))
        return loss.total / loss.weight

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(total)(params, batch)
        with jax.named_scope("update"):
            leaves, tree = jax.tree.flatten(grads)
            named: Mapping[Any, Any] = dict(enumerate(leaves))
            clipped = clip_by_norm(named, optax.tree.norm(grads), options.max_grad_norm)
            updates, opt_state = tx.update(jax.tree.unflatten(tree, list(clipped.values())), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = jax.tree.map(jnp.asarray, params)
    return jax.jit(step, donate_argnums=0), (params, jax.jit(tx.init)(params))
