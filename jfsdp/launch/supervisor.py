"""`jfsdp launch`: the processes of a run on this host, ended together and started again. Imports no JAX.

[Note: how a supervisor works] It starts `nproc` processes and tells each by torchrun's variables which it is
(environment.py). What they print goes to a file each, and that of the first to the terminal too. When one fails, the
others have a while to end by themselves (watch.py tells them why), then they are ended. All are started again as long
as restarts are left: they go on from their last checkpoint, as `--resume auto` says. On several hosts one supervisor
runs on each. There a failure reaches the processes of all hosts, so all supervisors start again, each by itself; the
roll call waits until all are there, of whatever attempt.

Where fewer processes are enough, one that fails first, or hangs, twice in a row is not started any more; those left
keep the GPUs that they had. Of hosts that do not come back the roll call learns by waiting.
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

from jfsdp.launch.environment import ABSENT, JOIN_TIMEOUT, LAUNCHED, MIN_NPROC, OF_JAX, RESTART, SNAPSHOTS, memory_dir
from jfsdp.launch.watch import DAMAGED, ENDED_BY_OTHERS, STUCK, USAGE, heard, say

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.1
_TAIL_LINES = 40


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Where a supervisor stands among those of a run.

    Attributes:
      num_nodes, node: of the run, and this one.
      address: HOST:PORT of process 0.
      num_siblings, sibling: how many supervisors this host has, and which of them this is.
    """

    num_nodes: int
    node: int
    address: str
    num_siblings: int = 1
    sibling: int = 0


@dataclasses.dataclass
class Child:
    """A process that was started: its place on this host, its rank of the run, its log, and what it ended with."""

    local: int
    rank: int
    process: subprocess.Popen[bytes]
    log: Path


@dataclasses.dataclass
class Supervisor:
    """Runs `command` as `nproc` processes of this host; see [Note: how a supervisor works].

    Args:
      log_dir: of files `ATTEMPT/RANK.log`.
      max_restarts: how often all are started again.
      grace_s: seconds for the others to end by themselves after one has failed.
      min_nproc: so many processes of the whole run are enough to go on; None: all are needed.
      join_timeout_s: how long processes wait for each other at their start.
      environment: of the processes, but for what is said to each; where a host has several and it does not say
        otherwise, with NCCL_LAUNCH_ORDER_IMPLICIT=1.
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
        # Which process the launcher is itself, and whom it would call, is not for the processes.
        self.environment = {name: text for name, text in self.environment.items() if name not in OF_JAX}
        self.environment |= {JOIN_TIMEOUT: str(self.join_timeout_s), LAUNCHED: time.strftime("%Y%m%d-%H%M%S")}
        if self.nproc * self.hosts.num_siblings > 1:  # GPUs of several processes start kernels of NCCL in one order
            self.environment.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        self.suspects, self.absent, self.killed = set[int](), set[int](), set[int]()
        self.children: list[Child] = []
        self.stopped_by: int | None = None

    def run(self) -> int:
        """Run until all have ended well, or no restart is left; return the exit status: that of the first to fail."""
        with self._forwarding(), contextlib.ExitStack() as stack:
            # Several launchers on a host leave it to the user's one: what a host has, its processes share.
            if SNAPSHOTS not in self.environment and self.hosts.num_siblings == 1:
                # The same when this command is given again, after this was killed.
                name = hashlib.sha256(json.dumps([os.getcwd(), *self.command]).encode()).hexdigest()[:16]
                memory = memory_dir() / f"launch-{name}"
                self.environment[SNAPSHOTS] = str(memory)
                stack.callback(_remove, memory)
            stack.callback(self._kill)
            for attempt in range(self.max_restarts + 1):
                self.children = []
                for local in sorted(set(range(self.nproc)) - self.absent):
                    self.children.append(self.start_process(local, attempt))
                if self.stopped_by is not None:  # some were not there yet when it came
                    self._send(self.stopped_by)
                failed = self._wait()
                if failed is None:
                    return 0
                status = _status(failed.process.returncode)
                self._leave_out(failed)
                self._report(failed, status, attempt)
                if self.stopped_by is not None or status == USAGE or len(self.absent) == self.nproc:
                    break
        return status

    def start_process(self, local: int, attempt: int) -> Child:
        """Start one process of this host, with what tells it its place."""
        hosts, rank = self.hosts, self.hosts.node * self.nproc + local
        host, _, port = hosts.address.rpartition(":")
        told = {
            "RANK": rank,
            "WORLD_SIZE": hosts.num_nodes * self.nproc,
            "LOCAL_RANK": hosts.sibling * self.nproc + local,
            "LOCAL_WORLD_SIZE": hosts.num_siblings * self.nproc,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            RESTART: attempt,
            ABSENT: " ".join(str(hosts.node * self.nproc + absent) for absent in sorted(self.absent)),
        }
        if self.min_nproc is not None:
            told[MIN_NPROC] = self.min_nproc
        log = self.log_dir / str(attempt) / f"{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = self.environment | {name: str(value) for name, value in told.items()}
        with log.open("ab") as file:
            # Of a group of its own: a signal of the terminal comes from here alone, once.
            output = file if self.children else subprocess.PIPE
            process: subprocess.Popen[bytes] = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        if not self.children:
            threading.Thread(target=_copy, args=(process.stdout, log), daemon=True).start()
        return Child(local, rank, process, log)

    def _wait(self) -> Child | None:
        """Wait until all have ended; return the one that failed first, if any did."""
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

    def _leave_out(self, failed: Child) -> None:
        """Start no more what failed first, or else what hung, in this attempt and in the one before."""
        # An error that Python reported (1), a damaged checkpoint (4), and what follows from others may be of all.
        is_cause = failed.process.returncode not in (1, DAMAGED, STUCK, ENDED_BY_OTHERS, -signal.SIGABRT)
        hung = {child.local for child in self.children if child.rank in self.killed}
        # The others of one that hangs end by their own time, or by JAX, which misses its heartbeats. But where as many
        # had to be killed as ended, the one that aborted may be the cause, and they only waited for it.
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
                    os.killpg(child.process.pid, signal.SIGKILL)  # one that is stopped takes no other

    def _report(self, failed: Child, status: int, attempt: int) -> None:
        left = self.max_restarts - attempt
        others = {child.rank: _status(child.process.returncode) for child in self.children if child is not failed}
        try:
            lines = failed.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError as error:  # moved away, by a rotation of logs say
            lines = [f"(its log cannot be read: {error.strerror})"]
        word = "ended" if status == USAGE else "failed"  # all end with that one, and process 0 last (watch.py)
        name = f" ({signal.Signals(status - 128).name})" if status - 128 in set(signal.Signals) else ""
        told = [
            f"jfsdp launch: process {failed.rank} {word} first, with status {status}{name}; the others of "
            f"this host ended with {others or 'nothing: there are none'}. Logs: {failed.log.parent}",
            *[f"did not end by themselves, and were killed: {sorted(self.killed)}; they hung, or were stopped"]
            * bool(self.killed),
            f"the last lines of process {failed.rank}:",
            *(f"    {line}" for line in lines),
        ]
        if self.absent:
            ranks = sorted(self.hosts.node * self.nproc + local for local in self.absent)
            told.append(f"failed first, or hung, twice in a row, and not started any more: {ranks}")
        if status == USAGE:
            told.append("not started again: what was asked cannot begin")
        elif self.stopped_by is None:
            can_start = left and len(self.absent) < self.nproc
            told.append(f"starting again, {left} restarts left" if can_start else "no restart is left")
        say("\n".join(told))

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, _: Any) -> None:
            self.stopped_by = number
            self._send(number)

        before = {number: signal.signal(number, forward) for number in heard(FORWARDED)}
        before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # nobody reads on: the run goes on
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _remove(memory: Path) -> None:
    shutil.rmtree(memory, ignore_errors=True)
    with contextlib.suppress(OSError):  # that of the user, if this was the last
        memory.parent.rmdir()


def _blame(child: Child) -> tuple[bool, bool, int]:
    """Order processes that have failed by who is likely to be the cause: not those that others ended."""
    code = child.process.returncode
    return code == ENDED_BY_OTHERS, code == -signal.SIGABRT, child.rank


def _status(code: int | None) -> int:
    """Return a process's exit status as a shell says it."""
    return 128 - code if code is not None and code < 0 else code or 0


def _copy(source: IO[bytes] | None, log: Path) -> None:
    """Copy what a process prints to its log, and to the terminal."""
    assert source is not None
    with source, log.open("ab") as file:
        while data := source.read1(1 << 16):  # type: ignore[attr-defined]
            file.write(data)
            file.flush()
            with contextlib.suppress(OSError):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()


def free_port() -> int:
    """Return a port of this host that nothing listens at."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]
