"""This process's place in a run, from environment variables. Does not import JAX.

[Note: launch variables] Sources of the place, the closest to the process first:

    JAX         JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
                JAX_COORDINATOR_ADDRESS without the other two replaces the address of any source below
    torchrun    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK, LOCAL_WORLD_SIZE    (and `jfsdp launch`)
    Kubernetes  JOB_COMPLETION_INDEX of an indexed Job, with WORLD_SIZE (pods), MASTER_ADDR, MASTER_PORT of its manifest
    Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, with MASTER_ADDR and MASTER_PORT; without these
                JAX finds the address
    Slurm       SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID,
                SLURM_STEP_NODELIST, SLURM_JOB_ID: only inside `srun`
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

LATEST_PORT = 65_535
JAX_VARIABLES = COORDINATOR, *_NUMBERS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Variables that `jfsdp launch` sets in addition to torchrun's.
ABSENT, MIN_NPROC, JOIN_TIMEOUT = "JFSDP_ABSENT", "JFSDP_MIN_NPROC", "JFSDP_JOIN_TIMEOUT"
LAUNCHED, DEVICES = "JFSDP_LAUNCHED", "JFSDP_DEVICES"  # time of the launch; simulated devices per process
RESTART = "JFSDP_RESTART"  # number of restarts by `jfsdp launch`; not set without a launcher
SNAPSHOTS = "JFSDP_SNAPSHOTS"  # directory of a host's snapshots; the launcher sets it, and removes the directory


def join_timeout(environment: Mapping[str, str]) -> float:
    """Return how many seconds the processes wait for each other at their start.

    Raises:
      ValueError: if the variable is not a positive number of seconds.
    """
    text = environment.get(JOIN_TIMEOUT) or "300"
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ValueError(f"{JOIN_TIMEOUT}={text!r} must be a number of seconds above 0, such as 300")


def memory_dir() -> Path:
    """Return the default directory in memory for this user's snapshots."""
    return Path(f"/dev/shm/jfsdp-{os.getuid()}")


@dataclasses.dataclass(frozen=True)
class Place:
    """A process of a run.

    Attributes:
      source: the variables that define the place.
      address: HOST:PORT of process 0; None: JAX finds it.
      num_processes, process_id: of the run.
      num_local, local_id: of this host; 0 and None if unknown.
      absent: processes of this host that the launcher no longer starts.
      min_nproc: number of processes that suffice to begin; None: all.
    """

    source: str
    address: str | None
    num_processes: int
    process_id: int
    num_local: int = 0
    local_id: int | None = None
    absent: tuple[int, ...] = ()
    min_nproc: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether all other processes connect to this one: it is the first that is not absent."""
        return set(range(self.process_id)) <= set(self.absent)

    def __str__(self) -> str:
        on_host = f", {self.num_local} on each host" if self.num_local else ""
        return f"{self.num_processes} processes{on_host} ({self.source}), coordinator {self.address or 'found by JAX'}"


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Return this process's place in a run; None: it is the only process. See [Note: launch variables].

    Raises:
      ValueError: if a variable is missing next to others, is not a number, or contradicts another; names it.
    """
    variables = _Variables({name: value.strip() for name, value in environment.items()})
    found = [place for read in _SOURCES if (place := read(variables)) is not None]
    for place in found[1:]:
        first, more = found[0], place.num_processes - found[0].num_processes
        # A launcher in each task of another one, one per node, starts more processes than tasks. These may be numbered
        # differently.
        if more > 0 or (more == 0 and place.process_id != first.process_id):
            raise ValueError(
                f"{first.source} says that this is process {first.process_id} of {first.num_processes}, and "
                f"{place.source} process {place.process_id} of {place.num_processes}; unset the variables of one"
            )
    if not found or found[0].num_processes == 1:
        return None
    return dataclasses.replace(found[0], address=given_address(environment) or found[0].address)


def given_address(environment: Mapping[str, str]) -> str | None:
    """Return JAX_COORDINATOR_ADDRESS, which overrides the address of any source; None: it is not set.

    Raises:
      ValueError: if it is not HOST:PORT.
    """
    address = environment.get(COORDINATOR, "").strip()
    if address and not is_address(address):
        raise ValueError(f"{COORDINATOR}={address!r} must be HOST:PORT, PORT at most {LATEST_PORT}")
    return address or None


class _Variables:
    """Environment variables read as numbers. Errors name the variable, and `given`, a variable that requires it."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = environment

    def has(self, *names: str) -> bool:
        return any(name in self.environment for name in names)

    def text(self, name: str, given: str) -> str:
        if not self.environment.get(name):
            state = "is empty" if name in self.environment else "is not set"
            raise ValueError(f"{given} is set, and {name} {state}; set both, or unset {given}")
        return self.environment[name]

    def number(self, name: str, given: str = "") -> int:
        value = self.text(name, given or name) if given or self.has(name) else ""
        if not value.isdecimal():
            raise ValueError(f"{name}={value!r} must be a whole number")
        return int(value)

    def below(self, name: str, limit: str) -> tuple[int, int]:
        """Return a number and its upper bound, which is another variable."""
        value, count = self.number(name, limit), self.number(limit, name)
        if value >= count:
            raise ValueError(f"{name}={value} must be below {limit}={count}")
        return value, count

    def local(self, name: str, limit: str) -> tuple[int, int | None]:
        """Return the number of processes on this host and this one's number there, if both are set."""
        if not self.has(name) or not self.has(limit):
            return 0, None
        value, count = self.below(name, limit)
        return count, value

    def address(self, given: str) -> str:
        return f"{self.text('MASTER_ADDR', given)}:{self.port('MASTER_PORT', given)}"

    def port(self, name: str, given: str = "") -> int:
        port = self.number(name, given)
        if not is_port(port):
            raise ValueError(f"{name}={port} must be a port, 1 to {LATEST_PORT}")
        return port


def _jax(variables: _Variables) -> Place | None:
    if not variables.has(*_NUMBERS):
        return None
    address = variables.text(COORDINATOR, next(name for name in _NUMBERS if variables.has(name)))
    process, count = variables.below("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    return Place("JAX_NUM_PROCESSES and JAX_PROCESS_ID", address, count, process)


def _torchrun(variables: _Variables) -> Place | None:
    if not variables.has("RANK"):
        return None
    process, count = variables.below("RANK", "WORLD_SIZE")
    address = variables.address("RANK") if count > 1 else None
    local = variables.local("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    text = variables.environment.get(ABSENT, "")
    absent = text.split()
    if not all(number.isdecimal() for number in absent):
        raise ValueError(f"{ABSENT}={text!r} must be numbers of processes, such as '3 7'; unset it")
    min_nproc = variables.number(MIN_NPROC) if variables.has(MIN_NPROC) else None
    return Place("RANK and WORLD_SIZE", address, count, process, *local, tuple(map(int, absent)), min_nproc)


def _kubernetes(variables: _Variables) -> Place | None:
    # With RANK set, WORLD_SIZE is the number of processes of a launcher in the pods, not the number of pods.
    if variables.has("RANK") or not variables.has("JOB_COMPLETION_INDEX") or not variables.has("WORLD_SIZE"):
        return None
    process, count = variables.below("JOB_COMPLETION_INDEX", "WORLD_SIZE")
    return Place("JOB_COMPLETION_INDEX and WORLD_SIZE", variables.address("JOB_COMPLETION_INDEX"), count, process)


def _open_mpi(variables: _Variables) -> Place | None:
    prefix = "OMPI_COMM_WORLD_"
    if not variables.has(f"{prefix}RANK"):
        return None
    process, count = variables.below(f"{prefix}RANK", f"{prefix}SIZE")
    address = variables.address(f"{prefix}RANK") if variables.has("MASTER_ADDR", "MASTER_PORT") else None
    return Place("Open MPI", address, count, process, *variables.local(f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"))


def _slurm(variables: _Variables) -> Place | None:
    if not variables.has("SLURM_STEP_NODELIST"):
        return None
    process, count = variables.below("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    nodes, job = variables.text("SLURM_STEP_NODELIST", "SLURM_PROCID"), variables.number("SLURM_JOB_ID", "SLURM_PROCID")
    local_id = variables.number("SLURM_LOCALID", "SLURM_PROCID")
    tasks = expand_counts(variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID"))
    node = variables.number("SLURM_NODEID", "SLURM_PROCID")
    if node >= len(tasks) or sum(tasks) != count or local_id >= tasks[node]:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={variables.environment['SLURM_STEP_TASKS_PER_NODE']!r} contradicts "
            f"SLURM_STEP_NUM_TASKS={count}, SLURM_NODEID={node} or SLURM_LOCALID={local_id}; is this inside srun?"
        )
    # One port per job, chosen as JAX does. Consecutive steps of a job may share it.
    port = LATEST_PORT - 4095 + job % 4096
    if variables.environment.get("JAX_COORDINATOR_PORT"):
        port = variables.port("JAX_COORDINATOR_PORT")
    return Place("Slurm", f"{first_host(nodes)}:{port}", count, process, tasks[node], local_id)


_SOURCES: tuple[Callable[[_Variables], Place | None], ...] = (_jax, _torchrun, _kubernetes, _open_mpi, _slurm)


def is_port(number: int) -> bool:
    return 0 < number <= LATEST_PORT


def is_address(text: str) -> bool:
    """Return whether a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and is_port(int(port))


def expand_counts(text: str) -> list[int]:
    """Parse Slurm's counts per node: `2(x3),1` is [2, 2, 2, 1].

    Raises:
      ValueError: if the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of counts such as 8(x4)")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, as `scontrol show hostnames` does.

    For `rack[0-1]node[01-15,20]-ib,b[3]` it is rack0node01-ib.

    Raises:
      ValueError: if the text has another form.
    """
    ranges = r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    first = re.match(rf"((?:[^\[\],]|{ranges})+)(?:,|$)", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} is not a list of hosts such as node[01-15],login")
    return re.sub(ranges, r"\1", first[1])


def assigned_gpus(place: Place, num_visible: int) -> list[int] | None:
    """Return the GPUs that this process uses, among those it sees; None: all of them.

    Args:
      num_visible: number of GPUs that the process sees; 0: none, or unknown.

    Raises:
      ValueError: if the processes of a host cannot share its GPUs evenly.
    """
    if place.local_id is None or place.num_local == 1 or num_visible <= 1:
        return None  # one GPU is visible per process (--gpus-per-task), or there is nothing to share
    each, rest = divmod(num_visible, place.num_local)
    if rest:
        raise ValueError(f"{place.num_local} processes cannot share {num_visible} GPUs evenly; start one per GPU")
    return list(range(place.local_id * each, (place.local_id + 1) * each))
