"""Imports and version branches of what is private or unstable in JAX, XLA and grain; each has a test.

Of Flax the like stands in modules/, the one room that imports it; of orbax in checkpoint/disk/writer.py, on its public
extension points.
"""

from __future__ import annotations

import collections
import os
import re
import sys
import warnings
from typing import Any

import jax
from jax import core
from jax.extend.core import ClosedJaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.random import define_prng_impl
from jax.interpreters.partial_eval import dce_jaxpr

from jfsdp.extras import installed_version, load

__all__ = ["ClosedJaxpr", "Literal", "core", "dce_jaxpr", "define_prng_impl"]


# Primitives of JAX's attention by cuDNN, whose results are not those of a dot_general.
FUSED_ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper")

_NOT_THE_USERS = tuple(f"{os.path.dirname(os.path.abspath(file))}{os.sep}" for file in (__file__, jax.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program: the first one above that is neither jfsdp's nor JAX's."""
    # From Python 3.12 on warnings.warn does this itself: skip_file_prefixes.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def manual_axes(eqn: Any) -> frozenset[str]:
    """Return the mesh axes over which the equation of a `shard_map` maps; {"?"} where it does not say."""
    # JAX 0.9 and before say `manual_axes`.
    return frozenset(map(str, eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", "?"))))


def pipelining(*kinds: str, is_on: bool = True) -> dict[str, Any]:
    """Return the options of XLA:GPU that move collectives of a loop by one iteration, as this JAX's XLA names them.

    Args:
      kinds: "all_gather", "all_reduce", "reduce_scatter".
      is_on: False takes the option away.
    """
    if jax.__version_info__ < (0, 11):
        return {f"xla_gpu_enable_pipelined_{kind}": is_on or None for kind in kinds}
    return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" if is_on else None for kind in kinds}


def misorders_offloads() -> bool:
    """Return whether this XLA:GPU reads values that a loop offloads in the wrong order (openxla/xla#46231).

    Layer i of the backward gets what layer n-1-i saved. Seen in the programs of jaxlib 0.10.2, and mended in 0.11.1.
    """
    return tuple(map(int, re.findall(r"\d+", installed_version("jaxlib") or "")[:3])) < (0, 11, 1)


_UNDER_WAY: collections.deque[jax.Array] = collections.deque()
MAX_UNDER_WAY = 8


def keep_pace(found: jax.Array) -> None:
    """Wait until at most MAX_UNDER_WAY programs behind the arrays given here are under way on simulated CPU devices.

    Before JAX 0.12 several CPU devices hang once over 32 programs of one device are under way: threads that carry out
    programs wait for room on a device, and none is left for those that would make it. docs/log.md, 2026-11-23.
    """
    if jax.__version_info__ >= (0, 12):
        return
    devices = found.sharding.device_set
    if len(devices) == 1 or next(iter(devices)).platform != "cpu":
        return
    _UNDER_WAY.append(found)
    while len(_UNDER_WAY) > MAX_UNDER_WAY:
        first = _UNDER_WAY.popleft()
        if not first.is_deleted():
            first.block_until_ready()


def describe_topology(topology: str, target_config: str) -> Any:
    """Return GPUs that are not there, for compiling: `topology` is domains x hosts x GPUs per host."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=topology, target_config=target_config
    )


def reset_compilation_cache() -> None:
    """Make JAX read the settings of its persistent compilation cache anew."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def gather_from_processes(value: Any) -> Any:
    """Return an array of every process, stacked in their order. Cost: an all-gather; every process must call it."""
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value)


def coordination_store() -> tuple[Any, int, int]:
    """Return the key-value store that the processes of a run share, which of them this is, and how many there are.

    The store has `key_value_set`, which refuses a key that is there, and `key_value_try_get`, which raises for one that
    is not. None for one process.
    """
    from jax.experimental import multihost_utils

    found: Any = multihost_utils.distributed.global_state  # pyright: ignore[reportPrivateImportUsage]
    return found.client, found.process_id or 0, (found.num_processes or 1) if found.client else 1


def grain_experimental() -> Any:
    """Return what grain calls experimental: packing, windowed shuffling, padding of last batches, a reading thread."""
    return load("grain").experimental
