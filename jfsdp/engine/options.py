"""What jfsdp asks of XLA, computed from the layout: without it a promise would not hold, or communication not hide.

[Note: how communication hides]
XLA:GPU's own defaults leave most of it bare: of the bytes that Llama-3-8B moves inside its layer loop on 64 H100, 56 %
(JAX 0.10.2) and 52 % (0.12) have a matrix product behind them. Three options together give 100 %, with the same bytes
and no more memory: one collective per unit (combining up to a unit's bytes, and no further), the next unit's gather
moved one iteration of the loop ahead (pipelining), and several collectives in flight. Two of the three are not enough:
combining alone gives 0 %, the other two 97 to 99 %. docs/log.md has the table.

Besides, XLA's scheduler gives up overlap where it believes memory to be short: beyond 80 % of the GPU's, less 5 % for
safety. Llama-3-405B on 1024 H100 takes 55 of 79 GiB and lost its backward gathers that way (67 %); with 96 % of the
GPU's memory as the limit all of them hide. Under the manual engine's schedule a loop's memory is bounded without the
scheduler's help, and the limit is set where it never binds: the same job then waits 0.2 % of its step, with 120 and
flat storage 6.2 %.

[Note: slices of stacks]
From JAX 0.12 on, XLA's pass `dynamic-slice-copy-fusion-async-wrapper` (openxla/xla#44359) makes each slice of a stack
an asynchronous copy. The latency estimator does not know these copies and falls back to an abstract constant, 5000,
which the scheduler reads as 5 ms: longer than any collective of a layer. So all matrix products of a layer are
scheduled next to the copies, and the reduce-scatter has nothing left to hide behind. In program manual 66.7 % of the
bytes in Llama-3-8B's layer loop (64 H100) are hidden with that pass, and 100 % without it. Program xla hides them
either way, and keeps the pass.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jfsdp.compat import pipelining
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.precision import item_bytes
from jfsdp.layout.units import ROOT

COMBINE_BYTES = 30 * 2**20  # XLA's own threshold: small leaves of a step are combined up to it in any case
COMBINE_SHARD_BYTES = 2**20
NUM_IN_FLIGHT = 8  # fewer than 4 leave a third of the bytes bare
LIST_IN_FLIGHT = 2  # a gather and a reduction; with 1, JAX 0.12 leaves every second reduction bare
MEMORY_PERCENT = 120
MANUAL_MEMORY_PERCENT = 200
SLICE_COPIES = "dynamic-slice-copy-fusion-async-wrapper"


def compiler_options(mesh: Any, layout: Layout | None = None, *, is_scheduled: bool = False) -> dict[str, Any]:
    """Return compiler options for a step on this mesh's platform.

    GPU: XLA's own rematerialization pass is off. Near the memory limit it recomputes gathers without a word and
    multiplied the traffic of a 469B model (gathers 1.49x, scatters 2.95x); what is recomputed is the units' remat
    policy. With a layout, collectives are combined by unit, pipelined, and several may be in flight; see
    [Note: how communication hides]. Where gathers are scheduled by us, slices of stacks are not copied asynchronously;
    see [Note: slices of stacks].

    Args:
      layout: that of the step; None for programs without a backward.
      is_scheduled: whether gathers are ordered by a schedule of ours.
    """
    if not is_gpu(mesh):
        return {}
    options: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
    if layout is None:
        return options
    options |= {} if layout.buffers else _combined(layout)
    options["xla_gpu_enable_latency_hiding_scheduler"] = True  # XLA's default on an H100, and not on an A100
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
    if is_scheduled:
        options["xla_disable_hlo_passes"] += f",{SLICE_COPIES}"
        if not any(unit.stacked for unit in layout.units):
            # In a list, where no loop bounds them, whole gradients pile up: 15.8 GiB with 1 in flight, 18.9 with 8.
            return options | {limit: LIST_IN_FLIGHT}
        return options | {limit: NUM_IN_FLIGHT, "xla_gpu_memory_limit_slop_factor": MANUAL_MEMORY_PERCENT}
    return options | {
        limit: NUM_IN_FLIGHT,
        "xla_gpu_memory_limit_slop_factor": MEMORY_PERCENT,
        **pipelining("all_gather", "all_reduce"),
    }


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that the XLA of this process does not take. Cost: compiles a program of one number.

    Raises:
      ValueError: as `naming_options`.
    """
    with naming_options():
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()


@contextlib.contextmanager
def naming_options() -> Iterator[None]:
    """Say of an option that XLA refuses which one it is.

    Raises:
      ValueError: naming the option, and what XLA says of its value.
    """
    try:
        yield
    except Exception as error:  # JAX wraps XLA's refusals in a RuntimeError of its own, from 0.10.2 to 0.12
        if unknown := re.search(r"No such compile option: '(\w+)'", str(error)):
            raise ValueError(
                f"compiler_options[{unknown[1]!r}]: the XLA of this jaxlib has no such option; leave it out"
            ) from error
        if refused := re.search(r"While setting option (\w+), ([^\n]*)", str(error)):
            raise ValueError(
                f"compiler_options[{refused[1]!r}]: {refused[2].rstrip('. ')}; give another value"
            ) from error
        raise


def _combined(layout: Layout) -> dict[str, Any]:
    """Return the options by which the collectives of a unit are combined, where each leaf moves by itself."""
    whole, shard = unit_bytes(layout)
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": max(whole, COMBINE_BYTES),
        "xla_gpu_all_reduce_combine_threshold_bytes": max(whole, COMBINE_BYTES),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": max(shard, COMBINE_SHARD_BYTES),
    }


def unit_bytes(layout: Layout) -> tuple[int, int]:
    """Return the bytes of the largest unit but the root as one call gathers it, and of its gradient's shard.

    In the dtypes in use and of the reduction; what XLA counts of a gather is its result, and so of a reduce-scatter the
    shard.
    """
    sizes = [(0, 0)]
    for unit in layout.units:
        leaves = [layout.by_path[path] for path in unit.leaves if unit.name != ROOT]
        shards = (
            _call_bytes(leaf, layout.reduce_dtype(leaf)) // layout.num_parts(leaf.stage("grad"))
            for leaf in leaves
            if leaf.trainable
        )
        sizes.append((sum(_call_bytes(leaf, leaf.stage("use").dtype) for leaf in leaves), sum(shards)))
    return max(whole for whole, _ in sizes), max(shard for _, shard in sizes)


def _call_bytes(leaf: Leaf, dtype: str) -> int:
    return math.prod(leaf.cut_shape[leaf.stacked :]) * item_bytes(dtype)


def init_options(mesh: Any) -> dict[str, Any]:
    """Return compiler options for making the first parameters.

    CPU: no backend optimization. XLA:CPU of JAX 0.12 compiles the tail of a vectorized loop to other last bits than its
    body, so that the same normal deviates differed by an ulp between meshes (28 of 360 cases; without optimization 0).
    """
    return {"xla_backend_optimization_level": 0} if _platform(mesh) == "cpu" else {}


def is_gpu(mesh: Any) -> bool:
    """Return whether the devices of a mesh are GPUs, present or described; False for a mesh of sizes only."""
    return _platform(mesh) in ("gpu", "cuda", "rocm")


def is_there(mesh: Any) -> bool:
    """Return whether the devices of a mesh are this run's own, and not only described."""
    if isinstance(mesh, AbstractMesh):
        return False
    try:
        return mesh.devices.flat[0] in jax.devices(_platform(mesh))
    except RuntimeError:  # no backend for the platform of devices that are only compiled for
        return False


def _platform(mesh: Any) -> str:
    return "none" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
