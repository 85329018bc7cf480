"""Joining the other processes of a run. Does not import JAX."""

from __future__ import annotations

import dataclasses
import glob
import os
import platform
import re
from collections.abc import Mapping
from typing import Any

from jfsdp.arguments import checked
from jfsdp.extras import installed_version
from jfsdp.launch.environment import Place, assigned_gpus, find_place, given_address, join_timeout
from jfsdp.launch.roll_call import call_roll

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jfsdp")
# Environment variables that change the compiled program or how it runs, except those that differ between processes.
_SETTINGS = re.compile(r"XLA_FLAGS|LIBTPU_INIT_ARGS|(JAX|NCCL)_\w+")
_PER_PROCESS = re.compile(
    r"JAX_(PROCESS_ID|COORDINATOR_\w+|LOCAL_DEVICE_IDS|COMPILATION_CACHE_DIR)|"
    r"NCCL_(\w*IFNAME|\w*HCA|DEBUG\w*|HOSTID|LAUNCH_ORDER_IMPLICIT)"
)


@checked
def initialize(*, compare: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Place | None:
    """Join the other processes of the run, if any. Call it before anything else of JAX.

    It reads the environment variables of Slurm, Open MPI, Kubernetes, torchrun, `jfsdp launch` and JAX; see
    [Note: launch variables] in environment.py. Process 0 prints the result. Processes of one host share its GPUs
    evenly, unless `JAX_LOCAL_DEVICE_IDS` assigns them.

    All processes first connect to process 0, which compares their package versions, `XLA_FLAGS`, `JAX_*` and `NCCL_*`;
    see [Note: why before JAX] in roll_call.py.

    Args:
      compare: more facts that must be equal in all processes, such as your configuration, as plain JSON.
      timeout_s: seconds to wait for the others; None: `jfsdp launch --join-timeout`, else 300.

    Returns:
      This process's place in the run; None: there is only one process.

    Raises:
      NotAllThere: a ValueError: in every process that joined, if processes are missing; if process 0 cannot be reached.
        Starting again may help.
      ValueError: in every process, if processes join twice or are not alike; if variables are missing or contradict
        each other.
    """
    place = find_place(os.environ)
    if place is None and (address := given_address(os.environ)):
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r}: set JAX_NUM_PROCESSES and JAX_PROCESS_ID too")
    if place is None:
        return None
    is_assigned = "JAX_LOCAL_DEVICE_IDS" in os.environ or os.environ.get("JAX_PLATFORMS") == "cpu"
    gpus = None if is_assigned else assigned_gpus(place, num_gpus())
    if timeout_s is None:
        timeout_s = join_timeout(os.environ)
    if place.address is not None:
        versions = {"python": platform.python_version(), **{name: installed_version(name) for name in _PACKAGES}}
        names = [name for name in os.environ if _SETTINGS.fullmatch(name) and not _PER_PROCESS.fullmatch(name)]
        settings = {name: os.environ[name] for name in names}
        present = call_roll(place, {**versions, **settings, **(compare or {})}, timeout_s)
        if len(present) < place.num_processes:
            print(f"note: continuing with {len(present)} of {place.num_processes} processes: {present}", flush=True)
            place = dataclasses.replace(place, num_processes=len(present), process_id=present.index(place.process_id))
    import jax

    # JAX's service would catch SIGTERM. Before a run SIGTERM must end the process, and the run handles it itself.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.address,
        place.num_processes,
        place.process_id,
        local_device_ids=gpus,
        initialization_timeout=max(1, int(timeout_s)),
    )
    if place.process_id == 0:
        print(f"processes: {place}", flush=True)
    return place


def num_gpus() -> int:
    """Return the number of NVIDIA GPUs visible to this process, without starting a driver; 0 if unknown."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(glob.glob("/dev/nvidia[0-9]*"))
