"""Memory and time of generation on a cluster: weights and cache by formula, prompt and token programs compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import make_mesh, num_data_shards
from jfsdp.plan.cluster.compile import compile_step, without_cache
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.cluster.target import topology_devices
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.jobs import find_planned_job, mesh_sizes
from jfsdp.plan.memory.peak import RESERVE_BYTES, breakdown
from jfsdp.plan.time.timeline import Rates, simulate
from jfsdp.train.state import array_bytes
from jfsdp.trainer.generate import Generator
from jfsdp.trainer.options import ShardingOptions, shard_job


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program of generation.

    Attributes:
      needed_bytes: GPU memory: weights, cache and temporaries.
      argument_bytes: the program's inputs, according to the compiler. Part of `needed_bytes`.
      seconds: estimated as for plans.
      wire_bytes: bytes that a GPU sends.
    """

    needed_bytes: int
    argument_bytes: int
    seconds: float
    wire_bytes: float


@dataclasses.dataclass(frozen=True)
class InferencePlan:
    """Memory and time of generation; see `plan_inference`.

    Attributes:
      rows, length: rows of a data shard, and tokens of a row with its prompt.
      weight_bytes, cache_bytes: per GPU, the sum of the shards of the model's and the cache's leaves.
      prompts, token: the program for prompts that fill the rows, and the one for the next token of each row.
    """

    cluster: Cluster
    layout: Layout
    rows: int
    length: int
    weight_bytes: int
    cache_bytes: int
    prompts: Program
    token: Program
    reserve_bytes: int

    @property
    def needed_bytes(self) -> int:
        """GPU memory of the larger program."""
        return max(self.prompts.needed_bytes, self.token.needed_bytes)

    @property
    def limit_bytes(self) -> int:
        """GPU memory that the programs may use."""
        return self.cluster.gpu.memory_bytes - self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether both programs fit."""
        return self.needed_bytes <= self.limit_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU, once the prompts are computed."""
        shards = num_data_shards(dict(self.layout.mesh_sizes))
        return self.rows * shards / self.cluster.num_devices / self.token.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        names = ("rows", "length", "weight_bytes", "cache_bytes", "needed_bytes", "limit_bytes", "fits", "tokens_per_s")
        programs = {name: dataclasses.asdict(getattr(self, name)) for name in ("prompts", "token")}
        return {name: getattr(self, name) for name in names} | programs


def plan_inference(
    options: ShardingOptions,
    cluster: Cluster,
    rows: int,
    length: int | None = None,
    reserve_bytes: int = RESERVE_BYTES,
    on_progress: Callable[[str], None] = lambda text: None,
) -> InferencePlan:
    """Plan the programs of `jfsdp generate`. Allocates nothing on any device.

    Weights are stored in the compute dtype, as in generation. For each data shard, the cache has
    `2 * layers * rows * length * heads * size` elements of that dtype, with the heads split over `tensor`.

    Args:
      rows: of each data shard.
      length: tokens of a row with its prompt; None: the job's `seq_len`.

    Raises:
      PlanUnavailable: if JAX's CUDA plugin cannot compile for this GPU.
      ValueError: for a job without a cache, and for options that generation would refuse.
    """
    on_progress("sharding")
    devices, job = topology_devices(cluster), find_planned_job(options)
    dtype = options.param_dtype or "float32"
    frozen = dataclasses.replace(options, frozen=("**",), frozen_dtype=dtype)
    mesh = make_mesh(devices=devices, **mesh_sizes(options.mesh, len(devices)))  # type: ignore[arg-type]
    model, length = shard_job(frozen, job, mesh), length or job.seq_len
    generator, state = Generator(model, job), model.abstract_state(optax.identity())
    all_rows = rows * num_data_shards(dict(model.layout.mesh_sizes))
    cache = generator.cache_shapes(all_rows, length)

    # Tokens wait for memory, which no power limit slows, and data shards do not wait for each other.
    rates = Rates(cluster, sustained=1.0, spread=0.0)

    def compiled(tokens: int) -> Program:
        on_progress(f"compiling the program of {tokens} token{'s' * (tokens > 1)}")
        with without_cache(), jax.default_device(devices[0]):
            program = compile_step(generator.lower(state, all_rows, length, tokens), {})
        module = parse_module(program.text)
        collectives = find_collectives(module, cluster.num_devices, dict(model.layout.mesh_sizes))
        return Program(
            needed_bytes=breakdown(program, module, model.layout).allocated_bytes,
            argument_bytes=program.memory_stats.argument_size_in_bytes,
            seconds=simulate(module, collectives, rates).step_s,
            wire_bytes=sum(x.total_bytes for x in collectives),
        )

    return InferencePlan(
        cluster=cluster,
        layout=model.layout,
        rows=rows,
        length=length,
        weight_bytes=sum(map(array_bytes, jax.tree.leaves(state.source))),
        cache_bytes=sum(map(array_bytes, jax.tree.leaves(cache))),
        prompts=compiled(length),
        token=compiled(1),
        reserve_bytes=reserve_bytes,
    )
