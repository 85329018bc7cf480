"""Which devices share a host, and what the processes of a run tell each other.

JAX knows which devices share a process, and a host may run one process per device. Imports only JAX, so that every room
may import it.
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
    """Return the host of each device, by the number of the host's first process: devices of equal number share a host.

    - Devices of one process are on one host.
    - Devices of a deviceless topology have one process per host. In a run of one process, all devices of several
      processes are such.
    - Otherwise every process says once which host it is on, see `own_host`.

    Cost: for devices of several processes, the first call exchanges a short text between all processes of the run, and
      waits until each of them calls it (`make_mesh` does). Later calls remember.

    Raises:
      ValueError: in every process, if one of them cannot tell its host.
    """
    processes = [device.process_index for device in devices]
    several = len(set(processes)) > 1 and jax.process_count() > 1
    if several and devices[0].client.runtime_type != "compile_only_runtime":  # a deviceless topology's
        processes = [_first_processes()[process] for process in processes]
    return tuple(processes)


def own_host() -> str:
    """Return what tells this process's host from others; empty if nothing does.

    That is the boot id of the kernel, which the containers of a machine share as they share its links; without one, the
    name of the host.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node().removeprefix("localhost")  # that name other hosts may have too


@functools.cache
def _first_processes() -> tuple[int, ...]:
    """Return, for each process of the run, the first process on its host."""
    names = gather_json(own_host())
    if "" in names:
        raise ValueError(f"process {names.index('')} cannot tell its host; give each host another name")
    return tuple(names.index(name) for name in names)


def wait_for_all(place: str) -> None:
    """Wait until every process of the run is here.

    Raises:
      RuntimeError: if others are at another place.
    """
    told = gather_json(place)
    if set(told) != {place}:
        raise RuntimeError(f"the processes of the run are at different places: {told}; were all started alike?")


def check_alike(told: Mapping[str, Any]) -> None:
    """Refuse to go on where a process tells something else than the others; all of the run must call it.

    Raises:
      ValueError: in every process, naming who differs and in what.
    """
    if problem := differences(dict(enumerate(gather_json((platform.node(), told))))):
        raise ValueError(problem)


def gather_json(value: Any) -> list[Any]:
    """Collect every process's value, plain JSON, in the order of the processes, on all of them.

    Cost: two small all-gathers; every process of the run must call it, and waits for the others. None for one process.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(np.max(gather_from_processes(np.asarray(data.size))))
    rows = gather_from_processes(np.pad(data, (0, length - data.size), constant_values=ord(" ")))
    return [json.loads(bytes(row).decode()) for row in rows]
