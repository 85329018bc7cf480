"""Which devices share a host, and exchange of small values between the processes of a run.

JAX knows which devices share a process, but a host may run one process per device. Imports only JAX, so that every
package may import it.
"""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfsdp.compat import gather_from_processes
from jfsdp.launch.roll_call import differences

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def hosts(devices: Sequence[Any]) -> tuple[int, ...]:
    """Return the host of each device, as the number of the host's first process.

    - Devices of one process share a host.
    - Each process of a deviceless topology has its own host. In a run of one process, devices of several processes
      belong to a deviceless topology.
    - Otherwise the processes exchange their `host_id` once.

    Cost: for devices of several processes, the first call exchanges a short text between all processes of the run, and
      waits until each of them calls it (`make_mesh` does). The result is cached.

    Raises:
      ValueError: in every process, if one of them cannot identify its host.
    """
    processes = [device.process_index for device in devices]
    several = len(set(processes)) > 1 and jax.process_count() > 1
    if several and devices[0].client.runtime_type != "compile_only_runtime":  # the runtime of deviceless topologies
        processes = [_first_processes()[process] for process in processes]
    return tuple(processes)


def run_devices() -> tuple[str, int, int]:
    """Return the kind of the run's devices, the number of its hosts, and the devices of one. Cost: as `hosts`."""
    devices = jax.devices()
    num_hosts = len(set(hosts(devices)))
    return devices[0].device_kind, num_hosts, len(devices) // num_hosts


def host_id() -> str:
    """Return an identifier of this process's host; empty if there is none.

    It is the kernel's boot id, which containers on one machine share, as they share its links. Without a boot id it is
    the host name.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node().removeprefix("localhost")  # other hosts may have this name too


@functools.cache
def _first_processes() -> tuple[int, ...]:
    """Return, for each process of the run, the first process on its host."""
    names = gather_json(host_id())
    if "" in names:
        raise ValueError(f"process {names.index('')} cannot identify its host; give each host another name")
    return tuple(names.index(name) for name in names)


def wait_for_all(place: str) -> None:
    """Wait until every process of the run reaches this place.

    Raises:
      RuntimeError: if other processes are at another place.
    """
    places = gather_json(place)
    if set(places) != {place}:
        raise RuntimeError(f"the processes of the run are at different places: {places}; start all with one command")


def check_alike(facts: Mapping[str, Any]) -> None:
    """Check that all processes pass equal facts. All processes of the run must call it.

    Raises:
      ValueError: in every process, naming the processes that differ and the facts.
    """
    if problem := differences(dict(enumerate(gather_json((platform.node(), facts))))):
        raise ValueError(problem)


def gather_json(value: Any) -> list[Any]:
    """Return the values of all processes, which must be plain JSON, in process order.

    Cost: two small all-gathers, which every process of the run must call; none with one process.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(np.max(gather_from_processes(np.asarray(data.size))))
    rows = gather_from_processes(np.pad(data, (0, length - data.size), constant_values=ord(" ")))
    return [json.loads(bytes(row).decode()) for row in rows]
