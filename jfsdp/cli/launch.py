"""`jfsdp launch`: start the processes of a run on this host, like torchrun."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jfsdp.launch.environment import DEVICES, LATEST_PORT, find_place, given_address, is_address
from jfsdp.launch.runtime import merge_flags
from jfsdp.launch.supervisor import Hosts, Supervisor, free_port
from jfsdp.objects.path import on_disk
from jfsdp.trainer.help_groups import Options, option
from jfsdp.trainer.options import Count, Name, Number, Real, optional


@dataclasses.dataclass(frozen=True)
class Launch(Options):
    """Start the processes of a run on this host. If one fails, end all, and restart them.

    jfsdp launch [OPTIONS] script.py ARGUMENTS

    The script must call jfsdp.launch.initialize(), as scripts/train.py does. After a restart, scripts/train.py
    continues from its last checkpoint; pass --run-dir and --resume auto so that it also does with a new launcher. On
    several hosts, start a launcher on each, with srun (one task per host), or with --nnodes, --node-rank and
    --rendezvous. The exit status is that of this host's first failed process.
    """

    nproc: Count = option(1, least=1)
    """Processes on this host: one per GPU, or one for all of its GPUs."""
    nnodes: Number = option(None, least=1)
    """Number of hosts. none: from Slurm, else one."""
    node_rank: Number = option(None, least=0)
    """Rank of this host, from 0. none: from Slurm."""
    rendezvous: Annotated[str | None, optional(str, "HOST:PORT")] = None
    """Host 0, and a free port there. none: from Slurm; on one host, any free port."""
    devices_per_proc: Count = option(0, least=0)
    """Simulated CPU devices per process. 0: the real devices."""
    max_restarts: Count = option(0, least=0)
    """Number of restarts after a failure."""
    min_nproc: Number = option(None, least=1)
    """Minimum processes of all hosts together, to continue if others do not come back. none: all."""
    join_timeout: Real = option(300.0, least=1)
    """Seconds that processes wait for each other when they start."""
    grace: Real = option(30.0, least=0)
    """Seconds for the other processes to end after a failure, before they are killed."""
    log_dir: Name = None
    """Directory of ATTEMPT/RANK.log. none: logs/launch-DATE-TIME."""
    command: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        if not self.command:
            raise ValueError("no script is given; run jfsdp launch --nproc 8 script.py ARGUMENTS")
        program = [sys.executable, "-u"] if self.command[0].endswith(".py") else []
        if program and not Path(self.command[0]).is_file():
            raise ValueError(f"script {self.command[0]!r} is not a file; pass the path of a script")
        environment = dict(os.environ)
        if self.devices_per_proc:
            count = {"xla_force_host_platform_device_count": str(self.devices_per_proc)}
            flags = merge_flags(environment.get("XLA_FLAGS", ""), count)
            environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, DEVICES: str(self.devices_per_proc)}
        hosts = self._hosts()
        most = hosts.num_nodes * self.nproc
        if (self.min_nproc or 0) > most:
            raise ValueError(f"--min-nproc {self.min_nproc} must be at most the number of all processes, {most}")
        directory = on_disk(self.log_dir or time.strftime("logs/launch-%Y%m%d-%H%M%S"), "--log-dir")
        supervisor = Supervisor(
            [*program, *self.command],
            self.nproc,
            hosts,
            directory,
            max_restarts=self.max_restarts,
            grace_s=self.grace,
            min_nproc=self.min_nproc,
            join_timeout_s=self.join_timeout,
            environment=environment,
        )
        print(
            f"jfsdp launch: {self.nproc} processes on host {hosts.node} of {hosts.num_nodes}, process 0 at "
            f"{hosts.address}; logs in {directory}",
            file=sys.stderr,
            flush=True,
        )
        return supervisor.run()

    def _hosts(self) -> Hosts:
        """Return the hosts from the options, else from the environment (Slurm and others), else this host."""
        given = (self.nnodes, self.node_rank, self.rendezvous)
        if any(value is not None for value in given):
            if (self.nnodes or 1) > 1 and None in given:
                raise ValueError("several hosts need --nnodes, --node-rank and --rendezvous HOST:PORT; give all three")
            if (self.node_rank or 0) >= (self.nnodes or 1):
                raise ValueError(f"--node-rank {self.node_rank} must be below --nnodes {self.nnodes or 1}")
            address = self.rendezvous or f"localhost:{free_port()}"
            if not is_address(address):
                raise ValueError(f"--rendezvous {address!r} must be HOST:PORT, PORT at most {LATEST_PORT}")
            return Hosts(self.nnodes or 1, self.node_rank or 0, address)
        place = find_place(os.environ)
        if place is None or place.address is None:
            return Hosts(1, 0, given_address(os.environ) or f"localhost:{free_port()}")
        return Hosts(place.num_processes, place.process_id, place.address, place.num_local or 1, place.local_id or 0)


def split_command(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into the options of `jfsdp launch`, and the script with its arguments."""
    takes_value = False
    for place, arg in enumerate(args):
        if arg == "--":
            return list(args[:place]), list(args[place + 1 :])
        if not takes_value and not arg.startswith("-"):
            return list(args[:place]), list(args[place:])
        takes_value = not takes_value and arg.startswith("--") and "=" not in arg and arg != "--help"
    return list(args), []
