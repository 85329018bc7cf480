"""`jfsdp launch`: starts the processes of a run on this host, ends them together and restarts them. No import of JAX.

[Note: how a supervisor works] The supervisor starts `nproc` processes and sets torchrun's variables for each
(environment.py). Each process has a log file; the first one's output also goes to the terminal. When one fails, the
others have `grace_s` seconds to end (watch.py reports the failure to them), and are then killed. All are restarted
while restarts remain, and continue from their last checkpoint (`--resume auto`). On several hosts, one supervisor runs
on each. A failure reaches the processes of all hosts, so each supervisor restarts its processes independently. The roll
call waits until all are present, regardless of their attempt.

If fewer processes suffice, a process that fails first or hangs twice in a row is no longer started. The remaining ones
keep their GPUs. The roll call notices missing hosts by its timeout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from jfsdp.launch import environment as env
from jfsdp.launch.watch import DAMAGED, ENDED_BY_OTHERS, STUCK, USAGE, not_ignored, say

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.1
_TAIL_LINES = 40


@dataclasses.dataclass(frozen=True)
class Hosts:
    """This supervisor's place among the supervisors of a run.

    Attributes:
      num_nodes, node: number of hosts of the run, and this host's number.
      address: HOST:PORT of process 0.
      num_siblings, sibling: number of supervisors on this host, and this supervisor's number.
    """

    num_nodes: int
    node: int
    address: str
    num_siblings: int = 1
    sibling: int = 0


@dataclasses.dataclass
class Child:
    """A started process: its number on this host, its rank in the run, its handle and its log."""

    local: int
    rank: int
    process: subprocess.Popen[bytes]
    log: Path


@dataclasses.dataclass
class Supervisor:
    """Runs `command` as `nproc` processes of this host; see [Note: how a supervisor works].

    Args:
      log_dir: directory of the logs, `ATTEMPT/RANK.log`.
      max_restarts: maximum number of restarts of all processes.
      grace_s: seconds for the others to end after one has failed.
      min_nproc: number of processes of the whole run that suffice to continue; None: all.
      join_timeout_s: seconds that processes wait for each other at their start.
      environment: of all processes, to which the variables of each are added. If a host has several processes,
        NCCL_LAUNCH_ORDER_IMPLICIT=1 is the default.
    """

    command: Sequence[str]
    nproc: int
    hosts: Hosts
    log_dir: Path
    _: dataclasses.KW_ONLY
    max_restarts: int = 0
    grace_s: float = 30.0
    min_nproc: int | None = None
    join_timeout_s: float = 300.0
    environment: dict[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        # JAX's variables describe the launcher, not its processes.
        self.environment = {name: text for name, text in self.environment.items() if name not in env.JAX_VARIABLES}
        self.environment |= {env.JOIN_TIMEOUT: str(self.join_timeout_s), env.LAUNCHED: time.strftime("%Y%m%d-%H%M%S")}
        if self.nproc * self.hosts.num_siblings > 1:  # processes that share a host launch NCCL kernels in one order
            self.environment.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        self.suspects, self.absent, self.killed = set[int](), set[int](), set[int]()
        self.children: list[Child] = []
        self.stopped_by: int | None = None

    def run(self) -> int:
        """Run until all processes succeed or no restart remains. Return the exit status of the first that failed."""
        with self._forwarding(), contextlib.ExitStack() as stack:
            # Several launchers on a host use the user's directory, because processes of a host share snapshots.
            if env.SNAPSHOTS not in self.environment and self.hosts.num_siblings == 1:
                # The same name if this command is started again after it was killed.
                name = hashlib.sha256(json.dumps([os.getcwd(), *self.command]).encode()).hexdigest()[:16]
                memory = env.memory_dir() / f"launch-{name}"
                self.environment[env.SNAPSHOTS] = str(memory)
                stack.callback(_remove, memory)
            stack.callback(self._kill)
            for attempt in range(self.max_restarts + 1):
                self.children = []
                for local in sorted(set(range(self.nproc)) - self.absent):
                    self.children.append(self.start_process(local, attempt))
                if self.stopped_by is not None:  # the signal came before all were started
                    self._send(self.stopped_by)
                failed = self._wait()
                if failed is None:
                    return 0
                status = _status(failed.process.returncode)
                self._exclude(failed)
                self._report(failed, status, attempt)
                if self.stopped_by is not None or status == USAGE or len(self.absent) == self.nproc:
                    break
        return status

    def start_process(self, local: int, attempt: int) -> Child:
        """Start one process of this host, with the variables of its place."""
        hosts, rank = self.hosts, self.hosts.node * self.nproc + local
        host, _, port = hosts.address.rpartition(":")
        variables = {
            "RANK": rank,
            "WORLD_SIZE": hosts.num_nodes * self.nproc,
            "LOCAL_RANK": hosts.sibling * self.nproc + local,
            "LOCAL_WORLD_SIZE": hosts.num_siblings * self.nproc,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            env.RESTART: attempt,
            env.ABSENT: " ".join(str(hosts.node * self.nproc + absent) for absent in sorted(self.absent)),
        }
        if self.min_nproc is not None:
            variables[env.MIN_NPROC] = self.min_nproc
        log = self.log_dir / str(attempt) / f"{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        with log.open("ab") as file:
            # A new session: only the launcher forwards the terminal's signals, once.
            output = file if self.children else subprocess.PIPE
            process: subprocess.Popen[bytes] = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        if not self.children:
            threading.Thread(target=_copy, args=(process.stdout, log), daemon=True).start()
        return Child(local, rank, process, log)

    def _wait(self) -> Child | None:
        """Wait until all processes have ended. Return the first that failed, if any."""
        first: Child | None = None
        until = float("inf")
        self.killed = set()
        while running := [child for child in self.children if child.process.poll() is None]:
            failed = [child for child in self.children if child.process.returncode not in (None, 0)]
            if failed and first is None:
                first, until = min(failed, key=_blame), time.monotonic() + self.grace_s
            if time.monotonic() > until:
                self.killed |= {child.rank for child in running}
                self._kill()
            time.sleep(_POLL_S)
        failed = [child for child in self.children if child.process.returncode and child.rank not in self.killed]
        if first is None or first.process.returncode == ENDED_BY_OTHERS:
            first = min(failed, key=_blame, default=None)
        return first

    def _exclude(self, failed: Child) -> None:
        """Exclude processes from later attempts that failed first, or hung, in this attempt and the one before."""
        # All processes may have a Python error (1) or a damaged checkpoint (4), or fail because of another process.
        is_cause = failed.process.returncode not in (1, DAMAGED, STUCK, ENDED_BY_OTHERS, -signal.SIGABRT)
        hung = {child.local for child in self.children if child.rank in self.killed}
        # If one hangs, the others end by their timeout, or JAX aborts them for missed heartbeats. But if at least as
        # many were killed as ended, the aborted one may be the cause, for which the killed ones waited.
        aborted = failed.process.returncode == -signal.SIGABRT and len(hung) < len(self.children) - len(hung)
        suspects = {failed.local} if is_cause else hung if aborted or failed.process.returncode == STUCK else set()
        absent = self.absent | (suspects & self.suspects)
        if self.min_nproc is not None and self.hosts.num_nodes * self.nproc - len(absent) >= self.min_nproc:
            self.absent = absent
        self.suspects = suspects

    def _send(self, number: int) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    def _kill(self) -> None:
        for child in self.children:
            if child.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)  # a stopped process handles no other signal

    def _report(self, failed: Child, status: int, attempt: int) -> None:
        remaining = self.max_restarts - attempt
        others = {child.rank: _status(child.process.returncode) for child in self.children if child is not failed}
        try:
            lines = failed.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError as error:  # for example moved by log rotation
            lines = [f"(its log cannot be read: {error.strerror})"]
        verb = "ended" if status == USAGE else "failed"  # all end with this status, process 0 last (watch.py)
        name = f" ({signal.Signals(status - 128).name})" if status - 128 in set(signal.Signals) else ""
        report = [
            f"jfsdp launch: process {failed.rank} {verb} first, with status {status}{name}; the others of "
            f"this host ended with {others or 'nothing: there are none'}. Logs: {failed.log.parent}",
            *[f"these processes hung or were stopped, and were killed: {sorted(self.killed)}"] * bool(self.killed),
            f"the last lines of process {failed.rank}:",
            *(f"    {line}" for line in lines),
        ]
        if self.absent:
            ranks = sorted(self.hosts.node * self.nproc + local for local in self.absent)
            report.append(f"no longer started, because they failed first or hung twice in a row: {ranks}")
        if status == USAGE:
            report.append(f"not restarted: status {USAGE} means that the run cannot begin; correct the command")
        elif self.stopped_by is None:
            can_start = remaining and len(self.absent) < self.nproc
            report.append(f"starting again, {remaining} restarts left" if can_start else "no restart is left")
        say("\n".join(report))

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, _: Any) -> None:
            self.stopped_by = number
            self._send(number)

        before = {number: signal.signal(number, forward) for number in not_ignored(FORWARDED)}
        before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the run continues without a reader
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _remove(memory: Path) -> None:
    shutil.rmtree(memory, ignore_errors=True)
    with contextlib.suppress(OSError):  # removes the user's directory only if it is empty
        memory.parent.rmdir()


def _blame(child: Child) -> tuple[bool, bool, int]:
    """Sort key of failed processes: the likely cause first, and those that other processes ended last."""
    code = child.process.returncode
    return code == ENDED_BY_OTHERS, code == -signal.SIGABRT, child.rank


def _status(code: int | None) -> int:
    """Return a process's exit status as a shell reports it."""
    return 128 - code if code is not None and code < 0 else code or 0


def _copy(source: IO[bytes] | None, log: Path) -> None:
    """Copy a process's output to its log and to the terminal."""
    assert source is not None
    with source, log.open("ab") as file:
        while data := source.read1(1 << 16):  # type: ignore[attr-defined]
            file.write(data)
            file.flush()
            with contextlib.suppress(OSError):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()


def free_port() -> int:
    """Return a free port of this host."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]
