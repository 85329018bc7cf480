"""Proofs of jobs: the model cut to a size that a CPU computes, and a batch of its form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.layout.mesh import CONTEXT
from jfsdp.modules.adapt import as_model
from jfsdp.proof.cases import Case
from jfsdp.proof.prove import Proof, Subject, make_case_mesh
from jfsdp.train.sharded import ShardedModel
from jfsdp.trainer.job import Job
from jfsdp.trainer.options import ShardingOptions, make_optimizer, place_model, shard_job
from jfsdp.trainer.step import make_batch

MOST_PARAMETERS = 2**18  # a model is cut to this size
_TOKENS = 32
_REFUSED = ("param_dtype", "reduce_dtype", "frozen_dtype", "gather_wire", "reduce_wire", "matmul", "quantized", "lora")


def cut_to_size(job: Job, most: int = MOST_PARAMETERS) -> tuple[Job, dict[str, int]]:
    """Return a job with a smaller model of the same kind, and the fields of its configuration that changed.

    Halves, again and again, the field whose half removes the most parameters, as long as the model can be made. Fields
    from 256 on stay at 32 or more, others at 2 or more.

    Args:
      most: the number of parameters to stay below.
    """
    changed: dict[str, int] = {}
    count = num_parameters(job) or 0
    sizes = vars(job.config) if dataclasses.is_dataclass(job.config) else {}
    least = {name: 32 if size >= 256 else 2 for name, size in sizes.items() if type(size) is int}
    while count > most:
        part = 4 if count > 64 * most else 2
        tried = {name: size // part for name in least if (size := getattr(job.config, name)) // part >= least[name]}
        jobs = {name: other for name, size in tried.items() if (other := _with(job, name, size))}
        counts = {name: num for name, other in jobs.items() if (num := num_parameters(other)) and num < count}
        if not counts:
            break
        least = {name: least[name] for name in counts}  # no other field removes parameters
        best = min(counts, key=lambda name: counts[name])
        job, count, changed[best] = jobs[best], counts[best], tried[best]
    return job, changed


def _with(job: Job, name: str, value: int) -> Job | None:
    try:
        return job.with_config(**{name: value})
    except ValueError:
        return None


def num_parameters(job: Job) -> int | None:
    """Return the number of parameters of a job's model; None if it, or its loss, cannot be traced."""
    try:
        return sum(math.prod(x.shape) for x in as_model(job.model).params.values())
    except (ValueError, TypeError):
        return None


def random_batch(job: Job, rows: int, seq_len: int) -> Any:
    """Return a batch of a job's shapes: random numbers, token ids below the vocabulary, and rows of two documents."""
    rng = np.random.default_rng(0)

    def draw(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if jnp.issubdtype(x.dtype, jnp.floating):
            return (rng.random(x.shape) < 0.7 if "weight" in name else rng.normal(size=x.shape)).astype(x.dtype)
        column, half = np.arange(x.shape[-1] if x.ndim else 1), -(-seq_len // 2)
        given = {"segment_ids": 1 + column // half, "positions": column % half}
        if name in given:
            return np.broadcast_to(given[name], x.shape).astype(x.dtype)
        return rng.integers(0, job.vocab_size or 2, x.shape).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(draw, make_batch(job, rows, seq_len))


def check_options(options: ShardingOptions) -> None:
    """Check that no option changes the numbers of a step by design.

    Raises:
      ValueError: naming the option.
    """
    for name in _REFUSED:
        if getattr(options, name):
            raise ValueError(f"{name}=: a proof computes in the model's dtypes and without adapters; leave it out")


def prove_job(
    options: ShardingOptions,
    job: Job,
    columns: Mapping[str, Any],
    meshes: Sequence[Mapping[str, int]] | None = None,
    *,
    batch: Any,
    steps: int = 2,
    **more: Any,
) -> Proof:
    """Prove a job's steps; see `jfsdp.prove`.

    Args:
      options: those of the sharding, except the mesh and what `columns` vary.
      columns, meshes, more: as in `Subject.prove`.

    Raises:
      ValueError: as `check_options`.
    """
    check_options(options)

    def shard(case: Case, widen: Callable[[Any], Any]) -> ShardedModel:
        mesh = make_case_mesh(case)
        model = widen(place_model(options, job, mesh))
        fixed = dataclasses.replace(job, model=model, in_context=None, with_experts=None)
        given = {"strategy": case.strategy, "reshard_after_forward": case.reshard, "remat": case.remat}
        return shard_job(dataclasses.replace(options, **given), fixed, mesh)

    make_tx = lambda model: make_optimizer(options, job, model, 1e-3)  # noqa: E731
    axes = [CONTEXT] if job.in_context else []
    return Subject(job.model, job.loss, batch, shard, make_tx, steps, axes=axes).prove(columns, meshes, **more)


def tokens_of(job: Job) -> int:
    """Return the length of rows in a proof."""
    return min(job.seq_len, _TOKENS)
