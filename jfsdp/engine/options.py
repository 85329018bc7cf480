"""Options for XLA, computed from the layout, that keep the guarantees of jfsdp and overlap communication.

[Note: how communication hides]
With XLA:GPU's defaults most communication is exposed. Of the bytes that Llama-3-8B moves inside its layer loop on 64
H100, 56 % (JAX 0.10.2) and 52 % (0.12) overlap with a matrix product. Three options together give 100 %, with the same
bytes and no more memory: one collective per unit (combining up to a unit's bytes, and no further), the next unit's
gather moved one iteration of the loop ahead (pipelining), and several collectives in flight. Two of the three are not
enough: combining only gives 0 %, the other two 97 to 99 %. docs/log.md has the table.

XLA's scheduler also gives up overlap if it estimates that memory is short: beyond 80 % of the GPU's memory, less 5 %
for safety. Llama-3-405B on 1024 H100 takes 55 of 79 GiB and its backward gathers were exposed for this reason (67 %
overlapped). With 96 % of the GPU's memory as the limit all of them overlap. The manual engine's schedule bounds a
loop's memory without the scheduler, so the limit is set to a value that never applies: the same job then waits 0.2 % of
its step, compared with 6.2 % with a limit of 120 and flat storage.

[Note: slices of stacks]
From JAX 0.12 on, XLA's pass `dynamic-slice-copy-fusion-async-wrapper` (openxla/xla#44359) makes each slice of a stack
an asynchronous copy. The latency estimator does not know these copies and falls back to an abstract constant, 5000,
which the scheduler reads as 5 ms, longer than any collective of a layer. So all matrix products of a layer are
scheduled next to the copies, and none overlaps with the reduce-scatter. In program manual 66.7 % of the bytes in
Llama-3-8B's layer loop (64 H100) overlap with that pass, and 100 % without it. In program xla they overlap with or
without it, so the pass stays on.
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

COMBINE_BYTES = 30 * 2**20  # XLA's own threshold: small leaves of a step are combined up to it in all cases
COMBINE_SHARD_BYTES = 2**20
NUM_IN_FLIGHT = 8  # with fewer than 4, a third of the bytes is exposed
LIST_IN_FLIGHT = 2  # a gather and a reduction; with 1, JAX 0.12 exposes every second reduction
MEMORY_PERCENT = 120
MANUAL_MEMORY_PERCENT = 200
SLICE_COPIES = "dynamic-slice-copy-fusion-async-wrapper"


def compiler_options(mesh: Any, layout: Layout | None = None, *, is_scheduled: bool = False) -> dict[str, Any]:
    """Return compiler options for a step on this mesh's platform.

    GPU: XLA's rematerialization pass is off. Near the memory limit it silently recomputes gathers, and it multiplied
    the traffic of a 469B model (gathers 1.49x, scatters 2.95x). Only the units' remat policies determine what is
    recomputed. With a layout, collectives are combined by unit, pipelined, and several may be in flight; see
    [Note: how communication hides]. If gathers run by our schedule, slices of stacks are not copied asynchronously; see
    [Note: slices of stacks].

    Args:
      layout: the step's layout; None for programs without a backward.
      is_scheduled: whether gathers run by our schedule.
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
            # In a list, no loop bounds the number of whole gradients: 15.8 GiB with 1 in flight, 18.9 with 8.
            return options | {limit: LIST_IN_FLIGHT}
        return options | {limit: NUM_IN_FLIGHT, "xla_gpu_memory_limit_slop_factor": MANUAL_MEMORY_PERCENT}
    return options | {
        limit: NUM_IN_FLIGHT,
        "xla_gpu_memory_limit_slop_factor": MEMORY_PERCENT,
        **pipelining("all_gather", "all_reduce"),
    }


def check_options(options: Mapping[str, Any]) -> None:
    """Check that the XLA of this process accepts the options. Cost: compiles a program of one number.

    Raises:
      ValueError: as `naming_options`.
    """
    with naming_options():
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()


@contextlib.contextmanager
def naming_options() -> Iterator[None]:
    """Name the option if XLA refuses one.

    Raises:
      ValueError: with the option and XLA's message about its value.
    """
    try:
        yield
    except Exception as error:  # JAX 0.10.2 to 0.12 wraps XLA's errors in a RuntimeError
        if unknown := re.search(r"No such compile option: '(\w+)'", str(error)):
            raise ValueError(
                f"compiler_options[{unknown[1]!r}]: the XLA of this jaxlib has no such option; leave it out"
            ) from error
        if found := re.search(r"While setting option (\w+), ([^\n]*)", str(error)):
            raise ValueError(f"compiler_options[{found[1]!r}]: {found[2].rstrip('. ')}; set another value") from error
        raise


def _combined(layout: Layout) -> dict[str, Any]:
    """Return the options that combine the collectives of a unit, if each leaf moves separately."""
    whole, shard = unit_bytes(layout)
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": max(whole, COMBINE_BYTES),
        "xla_gpu_all_reduce_combine_threshold_bytes": max(whole, COMBINE_BYTES),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": max(shard, COMBINE_SHARD_BYTES),
    }


def unit_bytes(layout: Layout) -> tuple[int, int]:
    """Return the bytes of the largest unit other than the root as one call gathers it, and of its gradient's shard.

    They are in the dtypes in use and of the reduction. XLA counts the result of a collective: the gathered array, and
    the shard of a reduce-scatter.
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
    """Return compiler options for the initialization of parameters.

    CPU: no backend optimization. XLA:CPU of JAX 0.12 compiles the tail of a vectorized loop to other last bits than its
    body, so that normally distributed values differed by an ulp between meshes (28 of 360 cases; 0 without
    optimization).
    """
    return {"xla_backend_optimization_level": 0} if _platform(mesh) == "cpu" else {}


def is_gpu(mesh: Any) -> bool:
    """Return whether a mesh's devices are GPUs, present or described; False for a mesh without devices."""
    return _platform(mesh) in ("gpu", "cuda", "rocm")


def is_there(mesh: Any) -> bool:
    """Return whether a mesh's devices belong to this process's backend and are not only described."""
    if isinstance(mesh, AbstractMesh):
        return False
    try:
        return mesh.devices.flat[0] in jax.devices(_platform(mesh))
    except RuntimeError:  # no backend for the platform of described devices
        return False


def _platform(mesh: Any) -> str:
    return "none" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
