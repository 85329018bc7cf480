"""Measure the memory of one rank of a cluster on one GPU: `one_rank.py --model llama-8b --nodes 8`.

JAX's flag `jax_mock_gpu_topology` simulates the cluster. The step of one rank is compiled with XLA's autotuning and
runs on this machine's GPU, with collectives that send nothing. Its peak memory equals the rank's, without NCCL's
buffers (`jfsdp plan --reserve`). Values and times are meaningless and not printed. State and batch are zeros with the
shapes and shardings of the job.

Autotuning allocates memory for trial kernels. Therefore one process compiles, and a second one measures.

Exit status: 0; 2 for invalid options; 3 if the step does not fit into the GPU's memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from jfsdp.extras import MissingExtra, need

try:
    need("cli")
except MissingExtra as error:
    sys.exit(f"one_rank.py: error: {error}")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jfsdp.cli.console import GIB
from jfsdp.launch.runtime import merge_flags, plain_warnings, start_jax
from jfsdp.layout.mesh import place_devices
from jfsdp.plan.jobs import mesh_sizes, shard_planned
from jfsdp.train.step.step import batch_sharding
from jfsdp.train.update.update import lend_host_params
from jfsdp.trainer.help_groups import option, read_command
from jfsdp.trainer.options import Count, StepOptions, describe_error


@dataclasses.dataclass(frozen=True)
class RankOptions(StepOptions):
    """Options of a step and its cluster."""

    nodes: Count = option(1, "cluster", least=1)
    """Number of machines."""
    gpus_per_node: Count = option(8, "cluster", least=1)
    """GPUs of each machine."""
    steps: Count = option(2, least=1)
    """Steps to run."""
    json: bool = False
    """Print JSON, in bytes."""


def main(argv: Sequence[str]) -> int:
    """Compile, measure and print. Return the exit status."""
    try:
        options = read_command(RankOptions, argv, prog="one_rank.py", description=__doc__)
        mesh_sizes(options.mesh, options.nodes * options.gpus_per_node)
        with plain_warnings(), tempfile.TemporaryDirectory(prefix="jfsdp-rank-") as cache:
            # Sharded autotuning would wait for the other processes of the cluster.
            flags = {"xla_gpu_shard_autotuning": "false"}
            os.environ["XLA_FLAGS"] = merge_flags(os.environ.get("XLA_FLAGS", ""), flags)
            compiled, measured = _in_new_process(options, cache), _in_new_process(options, cache)
    except (MissingExtra, ValueError) as error:
        print(f"one_rank.py: error: {describe_error(error, RankOptions)}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"one_rank.py: does not fit: {str(error).splitlines()[0]}", file=sys.stderr)
        return 3
    found = measured | {"compiled_bytes": compiled["compiled_bytes"]}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        num_ranks = options.nodes * options.gpus_per_node
        print(f"{found['device']}, as one of {num_ranks}: peak {found['peak_bytes'] / GIB:.2f} GiB")
        print(f"state {found['state_bytes'] / GIB:.2f} GiB; compiled step {found['compiled_bytes'] / GIB:.2f} GiB")
    return 0


def _in_new_process(options: RankOptions, cache: str) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure_mocked, options, cache).result()


def _measure_mocked(options: RankOptions, cache: str) -> dict[str, Any]:
    jax.config.update("jax_mock_gpu_topology", f"{options.nodes}x{options.gpus_per_node}x1")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    start_jax()
    if jax.default_backend() != "gpu":
        raise ValueError("JAX sees no GPU, but the measurement needs one; use jfsdp plan on machines without")
    num_ranks = options.nodes * options.gpus_per_node
    # The order of jfsdp.make_mesh, which cannot be called: it exchanges host names with the other processes.
    devices = np.asarray(jax.devices()[:num_ranks], dtype=object)
    return measure(options, place_devices(devices, mesh_sizes(options.mesh, num_ranks)))


def measure(options: RankOptions, mesh: Mesh) -> dict[str, Any]:
    """Run the step on zeros, on the local devices of the mesh. Return bytes of the first local device.

    `peak_bytes` is the allocator's peak, 0 on CPUs. `compiled_bytes` is XLA's analysis of the step, 0 for a cached
    program.
    """
    planned = shard_planned(options, mesh=mesh)
    shapes = planned.step.abstract_state()
    compiled = planned.step.lower(shapes, planned.batch).compile()
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh, x))  # noqa: E731
    batch = jax.tree.map(lambda x: _zeros(place(x)), planned.batch)
    state = jax.tree.map(_zeros, shapes)
    here = jax.local_devices()[0]
    shards = [shard.data for x in jax.tree.leaves(state) for shard in x.addressable_shards if shard.device == here]
    state_bytes = sum(x.nbytes for x in shards)
    del shards
    for _ in range(options.steps):
        donated, lent = lend_host_params(state)
        state, metrics = compiled(donated, lent, batch)
        for value in jax.tree.leaves(lent):
            value.delete()
        jax.block_until_ready((state, metrics))
    return {
        "device": here.device_kind,
        "state_bytes": state_bytes,
        "peak_bytes": (here.memory_stats() or {}).get("peak_bytes_in_use", 0),
        "compiled_bytes": compiled.memory_analysis().peak_memory_in_bytes,
    }


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array with zeros in its local shards."""
    sharding = shape.sharding
    assert sharding is not None
    local = sharding.shard_shape(shape.shape)

    def zeros() -> jax.Array:
        is_key = jnp.issubdtype(shape.dtype, jax.dtypes.prng_key)
        return jnp.broadcast_to(jax.random.key(0), local) if is_key else jnp.zeros(local, shape.dtype)

    shardings = [SingleDeviceSharding(x, memory_kind=sharding.memory_kind) for x in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(
        shape.shape, sharding, [jax.jit(zeros, out_shardings=one)() for one in shardings]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
