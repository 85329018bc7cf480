"""`jfsdp launch`: the processes of a run on this host, as torchrun starts them for PyTorch."""

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
from jfsdp.trainer.help_groups import Options, option
from jfsdp.trainer.options import Count, Name, Number, Real, optional


@dataclasses.dataclass(frozen=True)
class Launch(Options):
    """Start the processes of a run on this host, end all when one fails, and start them again.

    jfsdp launch [OPTIONS] script.py ARGUMENTS

    The script joins them by jfsdp.launch.initialize(), which scripts/train.py calls. That one goes on from its last
    checkpoint when it is started again; give it --run-dir and --resume auto, so that it does under a new launcher too.
    On several hosts start one on each, by srun (one task per host), or with --nnodes, --node-rank and --rendezvous.
    The exit status is the status of the first process of this host that failed.
    """

    nproc: Count = option(1, least=1)
    """Processes on this host: one per GPU, or one for all of its GPUs."""
    nnodes: Number = option(None, least=1)
    """How many hosts. none: as Slurm says, else one."""
    node_rank: Number = option(None, least=0)
    """Which of them this is, from 0. none: as Slurm says."""
    rendezvous: Annotated[str | None, optional(str, "HOST:PORT")] = None
    """Host 0 and a port that is free there. none: as Slurm says; alone, any free port."""
    devices_per_proc: Count = option(0, least=0)
    """Simulated CPU devices of each process. 0: the real devices."""
    max_restarts: Count = option(0, least=0)
    """How often all are started again after one has failed."""
    min_nproc: Number = option(None, least=1)
    """So many processes, of all hosts together, are enough to go on, where others do not come back. none: all."""
    join_timeout: Real = option(300.0, least=1)
    """Seconds that processes wait for each other at their start."""
    grace: Real = option(30.0, least=0)
    """Seconds that the others have to end by themselves, once one has failed."""
    log_dir: Name = None
    """Where ATTEMPT/RANK.log are written. none: logs/launch-DATE-TIME."""
    command: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        if not self.command:
            raise ValueError("no script is named: jfsdp launch --nproc 8 script.py ARGUMENTS")
        program = [sys.executable, "-u"] if self.command[0].endswith(".py") else []
        if program and not Path(self.command[0]).is_file():
            raise ValueError(f"script {self.command[0]!r} is no file; name one that is there")
        environment = dict(os.environ)
        if self.devices_per_proc:
            count = {"xla_force_host_platform_device_count": str(self.devices_per_proc)}
            flags = merge_flags(environment.get("XLA_FLAGS", ""), count)
            environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, DEVICES: str(self.devices_per_proc)}
        hosts = self._hosts()
        most = hosts.num_nodes * self.nproc
        if (self.min_nproc or 0) > most:
            raise ValueError(f"--min-nproc {self.min_nproc} must be at most all processes, {most}")
        directory = Path(self.log_dir or time.strftime("logs/launch-%Y%m%d-%H%M%S"))
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
        """Return where this host stands, by the options or as Slurm and others say."""
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
    """Return the options of `jfsdp launch`, and the script with its own arguments after them."""
    takes_value = False
    for place, arg in enumerate(args):
        if arg == "--":
            return list(args[:place]), list(args[place + 1 :])
        if not takes_value and not arg.startswith("-"):
            return list(args[:place]), list(args[place:])
        takes_value = not takes_value and arg.startswith("--") and "=" not in arg and arg != "--help"
    return list(args), []
