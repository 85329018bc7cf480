"""Which process of a run this is, as whoever started it says in the environment. Imports no JAX.

[Note: who says it] Asked in this order, the nearest to the process first:

    JAX         JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
                JAX_COORDINATOR_ADDRESS without the other two replaces the address that any of those below give
    torchrun    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK, LOCAL_WORLD_SIZE    (and `jfsdp launch`)
    Kubernetes  JOB_COMPLETION_INDEX of an indexed Job, with WORLD_SIZE (pods), MASTER_ADDR, MASTER_PORT of its manifest
    Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, with MASTER_ADDR and MASTER_PORT; without, JAX
                finds the address itself
    Slurm       SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID,
                SLURM_STEP_NODELIST, SLURM_JOB_ID: inside `srun` alone
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
OF_JAX = COORDINATOR, *_NUMBERS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# What `jfsdp launch` tells its processes beside torchrun's variables.
ABSENT, MIN_NPROC, JOIN_TIMEOUT = "JFSDP_ABSENT", "JFSDP_MIN_NPROC", "JFSDP_JOIN_TIMEOUT"
LAUNCHED, DEVICES = "JFSDP_LAUNCHED", "JFSDP_DEVICES"  # when it began, and how many devices each process simulates
RESTART = "JFSDP_RESTART"  # how often `jfsdp launch` has started the processes again; not there without it
SNAPSHOTS = "JFSDP_SNAPSHOTS"  # the directory of all snapshots of a host; a launcher sets it, and removes that


def join_timeout(environment: Mapping[str, str]) -> float:
    """Return for how many seconds the processes of a start wait for each other.

    Raises:
      ValueError: for a variable that is no number of seconds.
    """
    text = environment.get(JOIN_TIMEOUT) or "300"
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ValueError(f"{JOIN_TIMEOUT}={text!r} must be a number of seconds above 0, such as 300")


def memory_dir() -> Path:
    """Return the directory in memory that this user's snapshots are below, where nothing else is said."""
    return Path(f"/dev/shm/jfsdp-{os.getuid()}")


@dataclasses.dataclass(frozen=True)
class Place:
    """A process of a run.

    Attributes:
      told_by: who says so.
      address: HOST:PORT of process 0; None: JAX finds it.
      num_processes, process_id: of the run.
      num_local, local_id: of this host; 0 and None where nobody says.
      absent: processes that the launcher of this host does not start any more.
      min_nproc: so many processes are enough to begin, where others do not come; None: all must.
    """

    told_by: str
    address: str | None
    num_processes: int
    process_id: int
    num_local: int = 0
    local_id: int | None = None
    absent: tuple[int, ...] = ()
    min_nproc: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether all others call at this process: the first that is to come."""
        return set(range(self.process_id)) <= set(self.absent)

    def __str__(self) -> str:
        on_host = f", {self.num_local} on each host" if self.num_local else ""
        return f"{self.num_processes} processes{on_host} ({self.told_by}), coordinator {self.address or 'found by JAX'}"


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Return which process of a run this is; None: one alone. See [Note: who says it].

    Raises:
      ValueError: for a variable that is missing beside others, is no number, or contradicts another; it is named.
    """
    told = _Told({name: value.strip() for name, value in environment.items()})
    found = [place for ask in _ASKED if (place := ask(told)) is not None]
    for place in found[1:]:
        first, more = found[0], place.num_processes - found[0].num_processes
        # A launcher under another's task, one per node, starts more processes than tasks: they may count differently.
        if more > 0 or (more == 0 and place.process_id != first.process_id):
            raise ValueError(
                f"{first.told_by} says that this is process {first.process_id} of {first.num_processes}, and "
                f"{place.told_by} process {place.process_id} of {place.num_processes}; unset the variables of one"
            )
    if not found or found[0].num_processes == 1:
        return None
    return dataclasses.replace(found[0], address=given_address(environment) or found[0].address)


def given_address(environment: Mapping[str, str]) -> str | None:
    """Return JAX_COORDINATOR_ADDRESS, where process 0 is reached whoever started the processes; None: it is not set.

    Raises:
      ValueError: if it is not HOST:PORT.
    """
    address = environment.get(COORDINATOR, "").strip()
    if address and not is_address(address):
        raise ValueError(f"{COORDINATOR}={address!r} must be HOST:PORT, PORT at most {LATEST_PORT}")
    return address or None


class _Told:
    """Variables of the environment, read as numbers, with errors that name them."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = environment

    def has(self, *names: str) -> bool:
        return any(name in self.environment for name in names)

    def text(self, name: str, beside: str) -> str:
        if not self.environment.get(name):
            state = "is empty" if name in self.environment else "is not set"
            raise ValueError(f"{beside} is set, and {name} {state}; set both, or unset {beside}")
        return self.environment[name]

    def number(self, name: str, beside: str = "") -> int:
        value = self.text(name, beside or name) if beside or self.has(name) else ""
        if not value.isdecimal():
            raise ValueError(f"{name}={value!r} must be a whole number")
        return int(value)

    def below(self, name: str, limit: str) -> tuple[int, int]:
        """Return a number and the count that it must be below."""
        value, count = self.number(name, limit), self.number(limit, name)
        if value >= count:
            raise ValueError(f"{name}={value} must be below {limit}={count}")
        return value, count

    def local(self, name: str, limit: str) -> tuple[int, int | None]:
        """Return how many processes a host has and which of them this is, where both are said."""
        if not self.has(name) or not self.has(limit):
            return 0, None
        value, count = self.below(name, limit)
        return count, value

    def address(self, beside: str) -> str:
        return f"{self.text('MASTER_ADDR', beside)}:{self.port('MASTER_PORT', beside)}"

    def port(self, name: str, beside: str = "") -> int:
        port = self.number(name, beside)
        if not is_port(port):
            raise ValueError(f"{name}={port} must be a port, 1 to {LATEST_PORT}")
        return port


def _jax(told: _Told) -> Place | None:
    if not told.has(*_NUMBERS):
        return None
    address = told.text(COORDINATOR, next(name for name in _NUMBERS if told.has(name)))
    process, count = told.below("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    return Place("JAX_NUM_PROCESSES and JAX_PROCESS_ID", address, count, process)


def _torchrun(told: _Told) -> Place | None:
    if not told.has("RANK"):
        return None
    process, count = told.below("RANK", "WORLD_SIZE")
    address = told.address("RANK") if count > 1 else None
    local = told.local("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    absent = told.environment.get(ABSENT, "").split()
    if not all(number.isdecimal() for number in absent):
        raise ValueError(f"{ABSENT}={told.environment[ABSENT]!r} must be numbers of processes, such as '3 7'; unset it")
    min_nproc = told.number(MIN_NPROC) if told.has(MIN_NPROC) else None
    return Place("RANK and WORLD_SIZE", address, count, process, *local, tuple(map(int, absent)), min_nproc)


def _kubernetes(told: _Told) -> Place | None:
    # With RANK the number of processes is that of a launcher in the pod, and not of pods.
    if told.has("RANK") or not told.has("JOB_COMPLETION_INDEX") or not told.has("WORLD_SIZE"):
        return None
    process, count = told.below("JOB_COMPLETION_INDEX", "WORLD_SIZE")
    return Place("JOB_COMPLETION_INDEX and WORLD_SIZE", told.address("JOB_COMPLETION_INDEX"), count, process)


def _open_mpi(told: _Told) -> Place | None:
    prefix = "OMPI_COMM_WORLD_"
    if not told.has(f"{prefix}RANK"):
        return None
    process, count = told.below(f"{prefix}RANK", f"{prefix}SIZE")
    address = told.address(f"{prefix}RANK") if told.has("MASTER_ADDR", "MASTER_PORT") else None
    return Place("Open MPI", address, count, process, *told.local(f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"))


def _slurm(told: _Told) -> Place | None:
    if not told.has("SLURM_STEP_NODELIST"):
        return None
    process, count = told.below("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    nodes, job = told.text("SLURM_STEP_NODELIST", "SLURM_PROCID"), told.number("SLURM_JOB_ID", "SLURM_PROCID")
    local_id = told.number("SLURM_LOCALID", "SLURM_PROCID")
    tasks = expand_counts(told.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID"))
    node = told.number("SLURM_NODEID", "SLURM_PROCID")
    if node >= len(tasks) or sum(tasks) != count or local_id >= tasks[node]:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={told.environment['SLURM_STEP_TASKS_PER_NODE']!r} contradicts "
            f"SLURM_STEP_NUM_TASKS={count}, SLURM_NODEID={node} or SLURM_LOCALID={local_id}; is this inside srun?"
        )
    # One port per job, as JAX and others choose it; steps of a job after each other may share it.
    port = LATEST_PORT - 4095 + job % 4096
    if told.environment.get("JAX_COORDINATOR_PORT"):
        port = told.port("JAX_COORDINATOR_PORT")
    return Place("Slurm", f"{first_host(nodes)}:{port}", count, process, tasks[node], local_id)


_ASKED: tuple[Callable[[_Told], Place | None], ...] = (_jax, _torchrun, _kubernetes, _open_mpi, _slurm)


def is_port(number: int) -> bool:
    return 0 < number <= LATEST_PORT


def is_address(text: str) -> bool:
    """Tell whether a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and is_port(int(port))


def expand_counts(text: str) -> list[int]:
    """Read Slurm's counts by node: `2(x3),1` is [2, 2, 2, 1].

    Raises:
      ValueError: if it is something else.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is no list of counts such as 8(x4)")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, as `scontrol show hostnames` does: of `rack[0-1]node[01-15,20]-ib,b[3]`
    rack0node01-ib.

    Raises:
      ValueError: if it is something else.
    """
    ranges = r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    first = re.match(rf"((?:[^\[\],]|{ranges})+)(?:,|$)", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} is not a list of hosts such as node[01-15],login")
    return re.sub(ranges, r"\1", first[1])


def own_gpus(place: Place, num_visible: int) -> list[int] | None:
    """Return which of the GPUs that a process sees are its own; None: all of them.

    Args:
      num_visible: 0: there are none, or nobody knows.

    Raises:
      ValueError: if the processes of a host cannot share its GPUs evenly.
    """
    if place.local_id is None or place.num_local == 1 or num_visible <= 1:
        return None  # each sees one of its own (--gpus-per-task), or there is nothing to share
    each, rest = divmod(num_visible, place.num_local)
    if rest:
        raise ValueError(f"{place.num_local} processes cannot share {num_visible} GPUs evenly; start one per GPU")
    return list(range(place.local_id * each, (place.local_id + 1) * each))
