"""Private and unstable imports and version branches of JAX, XLA and grain; each has a test.

Those of Flax are in modules/, the only package that imports it. checkpoint/disk/writer.py uses the public extension
points of orbax.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax import core
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.random import define_prng_impl
from jax.interpreters.partial_eval import dce_jaxpr

from jfsdp.extras import installed_version, load

__all__ = ["ClosedJaxpr", "Literal", "core", "dce_jaxpr", "define_prng_impl"]


# Primitives of JAX's cuDNN attention; its matrix products are not dot_general operations.
FUSED_ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper")

_NOT_THE_USERS = tuple(f"{os.path.dirname(os.path.abspath(file))}{os.sep}" for file in (__file__, jax.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the innermost frame outside of jfsdp and JAX."""
    # From Python 3.12 on, warnings.warn has skip_file_prefixes for this.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def source_line(eqn: Any) -> str:
    """Return the user's file, line and function that made an equation."""
    return source_info_util.summarize(eqn.source_info)


def manual_axes(eqn: Any) -> frozenset[str]:
    """Return the mesh axes over which the equation of a `shard_map` maps; {"?"} if unknown."""
    # The parameter is `manual_axes` up to JAX 0.9.
    return frozenset(map(str, eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", "?"))))


def pipelining(*kinds: str, is_on: bool = True) -> dict[str, Any]:
    """Return the options of this XLA:GPU that pipeline the collectives of loops by one iteration.

    Args:
      kinds: "all_gather", "all_reduce", "reduce_scatter".
      is_on: False unsets the option.
    """
    if jax.__version_info__ < (0, 11):
        return {f"xla_gpu_enable_pipelined_{kind}": is_on or None for kind in kinds}
    return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" if is_on else None for kind in kinds}


def cudnn_attention() -> Any:
    """Return JAX's private module of cuDNN's attention, or None if this JAX has none."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo
    except ImportError:
        return None
    return fused_attention_stablehlo


def counts_query_heads() -> bool:
    """Return whether JAX's cuDNN attention computes offsets of documents in keys with the number of query heads.

    Seen in JAX 0.10.2, and fixed in 0.12. With fewer key heads it reads other tokens without an error.
    """
    return jax.__version_info__ < (0, 12)


def misorders_offloads() -> bool:
    """Return whether this XLA:GPU reads offloaded values of a loop in the wrong order (openxla/xla#46231).

    Layer i of the backward reads the values of layer n-1-i. Seen in jaxlib 0.10.2, and fixed in 0.11.1.
    """
    return tuple(map(int, re.findall(r"\d+", installed_version("jaxlib") or "")[:3])) < (0, 11, 1)


_RUNNING: collections.deque[jax.Array] = collections.deque()
MAX_RUNNING = 8


def limit_running(result: jax.Array) -> None:
    """Wait until at most MAX_RUNNING of the programs that computed the arrays passed here run on simulated CPU devices.

    Before JAX 0.12, several CPU devices deadlock if more than 32 programs of one device are running: all threads wait
    for a slot on a device, and none is left to run the programs that would free one. See docs/log.md, 2026-11-23.
    """
    if jax.__version_info__ >= (0, 12):
        return
    devices = result.sharding.device_set
    if len(devices) == 1 or next(iter(devices)).platform != "cpu":
        return
    _RUNNING.append(result)
    while len(_RUNNING) > MAX_RUNNING:
        first = _RUNNING.popleft()
        if not first.is_deleted():
            first.block_until_ready()


def describe_topology(topology: str, config: str) -> Any:
    """Return a description of GPUs to compile for: `topology` is domains x hosts x GPUs per host."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="cuda", topology_name="", topology=topology, target_config=config)


def read_trace(file: Any) -> Iterator[tuple[str, str, str, int, int, dict[str, Any]]]:
    """Yield plane, line, name, begin and end in ns, and stats of each event of an xplane.pb.

    Raises:
      ValueError: for a file that is cut short.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # types of jaxlib have no __module__ (0.12)
        try:
            data = jax.profiler.ProfileData.from_file(str(file))
        except RuntimeError as error:
            raise ValueError(f"{file} is not a complete trace ({error}); trace again") from error
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    begin, length = int(event.start_ns), int(event.duration_ns)
                    yield plane.name, line.name, event.name, begin, begin + length, dict(event.stats)


def check_thunks() -> None:
    """Check that this JAX can show the thunks of an executable.

    Raises:
      ValueError: if it cannot; names the versions.
    """
    if jax.__version_info__ < (0, 12):
        raise ValueError(
            f"--launches needs JAX 0.12 or newer, but this is {jax.__version__}; update jax, or leave it out"
        )


def read_thunks(compiled: Any) -> Any:
    """Return the thunks of an executable for GPUs, the launches of XLA:GPU, as a module of MLIR. Needs JAX 0.12."""
    from jax._src.thunky import thunky  # pyright: ignore[reportMissingImports]

    return thunky.jax_executable_to_mlir(compiled, thunky.make_ir_context())


@contextlib.contextmanager
def using_cache(**settings: Any) -> Iterator[None]:
    """Change settings of JAX's persistent compilation cache, by their names in `jax.config`."""
    from jax.experimental.compilation_cache import compilation_cache

    def use(values: dict[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX reads the settings again

    before = {name: getattr(jax.config, name) for name in settings}
    use(settings)
    try:
        yield
    finally:
        use(before)


def gather_from_processes(value: Any) -> Any:
    """Return the arrays of all processes, stacked. Cost: an all-gather; every process must call it."""
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value)


def coordination_store() -> tuple[Any, int, int]:
    """Return the key-value store of the run's processes, the index of this process, and the number of processes.

    `key_value_set` of the store raises for an existing key, and `key_value_try_get` for a missing one. The store is
    None with one process.
    """
    from jax.experimental import multihost_utils

    found: Any = multihost_utils.distributed.global_state  # pyright: ignore[reportPrivateImportUsage]
    return found.client, found.process_id or 0, (found.num_processes or 1) if found.client else 1


def grain_experimental() -> Any:
    """Return grain's experimental module: packing, windowed shuffling, padding of last batches, a reading thread."""
    return load("grain").experimental
