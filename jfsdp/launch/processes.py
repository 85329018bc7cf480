"""Joining the other processes of a run. Importing this imports no JAX."""

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
from jfsdp.launch.environment import Place, find_place, given_address, join_timeout, own_gpus
from jfsdp.launch.roll_call import call_roll

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jfsdp")
# What of the environment changes the program that is compiled, or how it is run; but for what is a process's own.
_SETTINGS = re.compile(r"XLA_FLAGS|LIBTPU_INIT_ARGS|(JAX|NCCL)_\w+")
_OWN = re.compile(
    r"JAX_(PROCESS_ID|COORDINATOR_\w+|LOCAL_DEVICE_IDS|COMPILATION_CACHE_DIR)|"
    r"NCCL_(\w*IFNAME|\w*HCA|DEBUG\w*|HOSTID|LAUNCH_ORDER_IMPLICIT)"
)


@checked
def initialize(*, compare: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Place | None:
    """Join the other processes of the run, where there are others. Call it before anything else of JAX.

    It reads the environment as Slurm, Open MPI, Kubernetes, torchrun and `jfsdp launch` set it, or as you set it for
    JAX; see [Note: who says it] in environment.py. Process 0 prints what was found. Where a host has several
    processes, its GPUs are shared out evenly, unless `JAX_LOCAL_DEVICE_IDS` says which are whose.

    All processes first call at process 0, which compares the versions of packages, `XLA_FLAGS`, `JAX_*` and `NCCL_*` of
    all; see [Note: why before JAX] in roll_call.py.

    Args:
      compare: more, as plain JSON, that must be equal in all processes: your configuration.
      timeout_s: how long to wait for the others; None: as `jfsdp launch --join-timeout` says, else 300.

    Returns:
      Which process this is; None: there is only one.

    Raises:
      NotAllThere: a ValueError: in every process that came, for processes that are missing; for a process 0 that cannot
        be reached. Starting again may mend it.
      ValueError: in every process, for processes that come twice or are not alike; for variables that are missing or
        contradict each other.
    """
    place = find_place(os.environ)
    if place is None and (address := given_address(os.environ)):
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r}: set JAX_NUM_PROCESSES and JAX_PROCESS_ID too")
    if place is None:
        return None
    is_said = "JAX_LOCAL_DEVICE_IDS" in os.environ or os.environ.get("JAX_PLATFORMS") == "cpu"
    gpus = None if is_said else own_gpus(place, num_gpus())
    if timeout_s is None:
        timeout_s = join_timeout(os.environ)
    if place.address is not None:
        versions = {"python": platform.python_version(), **{name: installed_version(name) for name in _PACKAGES}}
        settings = {name: x for name, x in os.environ.items() if _SETTINGS.fullmatch(name) and not _OWN.fullmatch(name)}
        came = call_roll(place, {**versions, **settings, **(compare or {})}, timeout_s)
        if len(came) < place.num_processes:
            print(f"note: going on with {len(came)} of {place.num_processes} processes: {came}", flush=True)
            place = dataclasses.replace(place, num_processes=len(came), process_id=came.index(place.process_id))
    import jax

    # JAX would catch SIGTERM and tell nobody who does not ask: a run listens itself, and before it a signal is to end.
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
    """Return how many NVIDIA GPUs this process sees, without starting a driver; 0 where that is not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(glob.glob("/dev/nvidia[0-9]*"))
