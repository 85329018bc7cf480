"""Before JAX joins the processes of a run: are all there, once, and do they agree? Imports no JAX.

[Note: why before JAX] JAX (0.10.2) ends a process by an abort in C++, with a stack of C++ and no word about who is
missing, where a process did not come, came twice, or could not reach process 0; a taken port is a segmentation fault.
So process 0 listens at the same address first, for as long as it takes all others to come, and tells each what it
found. Then it frees the port for JAX. Where fewer processes are enough, those that came are numbered anew, in order.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import platform
import queue
import resource
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jfsdp.launch.environment import JOIN_TIMEOUT, Place
from jfsdp.launch.watch import say

_MOST_BYTES = 1 << 20  # of what a process tells
_PATIENCE_S = 5.0  # for one that has connected to say who it is
SILENT_S = 10.0  # that process 0 waits without saying for whom


class NotAllThere(ValueError):
    """Processes did not come, or could not reach process 0. Starting again may mend it."""


def call_roll(place: Place, told: Mapping[str, Any], timeout_s: float) -> list[int]:
    """Wait until all processes of a run are there, and compare what they tell. Process 0 says once for whom it waits.

    Cost: one connection of each process to process 0, of a few kB; at most twice `timeout_s` seconds, where process 0
      comes at the end of the time of others.

    Args:
      told: plain JSON by name, which must be equal in all.

    Returns:
      Which processes came, in order: all, but where `place.min_nproc` says that fewer are enough.

    Raises:
      NotAllThere: in every process that came, for processes that did not; for an address that cannot be reached, or a
        port that is taken.
      ValueError: in every process, for processes that came twice, count differently, or tell something else.
    """
    assert place.address is not None
    host, _, port = place.address.rpartition(":")
    own = {"process": place.process_id, "count": place.num_processes, "told": dict(told)}
    own |= {"who": f"{platform.node()}, pid {os.getpid()}", "absent": list(place.absent)}
    deadline = time.monotonic() + timeout_s
    at = (host.strip("[]"), int(port), own, deadline)
    problem, is_lasting, came = _listen(*at, place.min_nproc) if place.is_first else _report(*at)
    if problem:
        raise ValueError(problem) if is_lasting else NotAllThere(problem)
    return came


_Found = tuple[str, bool, list[int]]  # what is wrong, whether starting again does not mend it, and who came


def _listen(host: str, port: int, own: dict[str, Any], deadline: float, min_nproc: int | None) -> _Found:
    begin, calls = time.monotonic(), queue.SimpleQueue()
    _raise_file_limit(own["count"] + 256)
    try:
        server = _serve(port, own["count"])
    except OSError as error:
        return (
            f"process 0 cannot listen at port {port} of {platform.node()} ({os.strerror(error.errno or 0)}); another "
            f"program has it: choose another where {host}:{port} was chosen (--rendezvous, MASTER_PORT, "
            "or under Slurm JAX_COORDINATOR_PORT)"
        ), False, []  # fmt: skip
    present, others, problem = {own["process"]: own}, [], ""
    acceptor = threading.Thread(target=_accept, args=(server, own, calls), daemon=True)
    with server:
        acceptor.start()
        say_at = begin + SILENT_S
        while not problem and (awaited := _awaited(present)) and (left := deadline - time.monotonic()) > 0:
            if time.monotonic() >= say_at:
                say_at = math.inf
                say(
                    f"process {own['process']} waits for {len(awaited)} of {own['count']} processes: {_some(awaited)}; "
                    f"{left:.0f} s more (jfsdp launch --join-timeout, {JOIN_TIMEOUT})"
                )
            with contextlib.suppress(queue.Empty):
                found, connection = calls.get(timeout=max(0.0, min(deadline, say_at) - time.monotonic()))
                others.append(connection)
                problem = _clash(found, present)
                present[found["process"]] = found
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # a thread that waits in `accept` would keep the port from JAX
        acceptor.join()
    missing = sorted(set(range(own["count"])) - present.keys())
    is_lasting = bool(problem) or not missing or (min_nproc is not None and len(present) >= min_nproc)
    if not is_lasting:
        came = [one["who"] for one in present.values()]
        problem = (
            f"{len(missing)} of {own['count']} processes did not come within {time.monotonic() - begin:.0f} s: "
            f"{_some(missing)}; look at their logs. Those that came: {', '.join(came[:4])}{', ...' * (len(came) > 4)}"
        )
    problem = problem or differences({process: (one["who"], one["told"]) for process, one in present.items()})
    found = problem, is_lasting, sorted(present)
    for connection in others:
        with contextlib.suppress(OSError), connection:
            connection.sendall(json.dumps(found).encode() + b"\n")
    return found


def _awaited(present: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """Return the processes that are still to come."""
    one = next(iter(present.values()))
    absent = {process for told in present.values() for process in told["absent"]}
    return set(range(one["count"])) - absent - present.keys()


def _serve(port: int, count: int) -> socket.socket:
    backlog = min(count, 4096)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel without IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _accept(server: socket.socket, own: Mapping[str, Any], came: queue.SimpleQueue) -> None:
    """Read what each that connects tells, in a thread of its own: one that is silent holds nobody up."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # all are there, or the time is over
            return
        threading.Thread(target=_read_one, args=(connection, own, came), daemon=True).start()


def _read_one(connection: socket.socket, own: Mapping[str, Any], came: queue.SimpleQueue) -> None:
    try:
        found = _read(connection, _PATIENCE_S)
        if any(type(found[name]) is not type(value) for name, value in own.items()):
            raise ValueError("this is no process of a run")
        if not 0 <= found["process"] < max(found["count"], own["count"]):
            raise ValueError("this is no process of this run")
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # a stranger, or one that ended
        connection.close()
    else:
        came.put((found, connection))


def _raise_file_limit(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        if 0 <= soft < count:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard))


def _report(host: str, port: int, own: dict[str, Any], deadline: float) -> _Found:
    failure: OSError | None = None
    patience_s = deadline - time.monotonic() + _PATIENCE_S  # process 0 may have begun to wait later
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(_PATIENCE_S, left)) as connection:
                connection.sendall(json.dumps(own).encode() + b"\n")
                problem, is_lasting, came = _read(connection, patience_s)
                return problem, is_lasting, came
        except TimeoutError:
            failure = TimeoutError("no answer")
        except (OSError, ValueError, TypeError) as error:
            failure = error if isinstance(error, OSError) else OSError("what answers there is not process 0")
            time.sleep(min(0.5, max(0.0, left)))
    return (
        f"process {own['process']} of {own['count']} ({own['who']}) cannot reach process 0 at {host}:{port}: "
        f"{failure}; is process 0 running, is that its host, and is the port open?"
    ), False, []  # fmt: skip


def _read(connection: socket.socket, timeout_s: float) -> Any:
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as file:
        line = file.readline(_MOST_BYTES)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the other side ended")
    return json.loads(line)


def _clash(found: Mapping[str, Any], present: Mapping[int, Mapping[str, Any]]) -> str:
    process, first = found["process"], next(iter(present.values()))
    if found["count"] != first["count"]:
        return (
            f"process {process} ({found['who']}) counts {found['count']} processes, and process {first['process']} "
            f"({first['who']}) {first['count']}; start all with the same number"
        )
    if process in present:
        return f"two processes are process {process}: {present[process]['who']}, and {found['who']}; renumber one"
    return ""


def _some(processes: Iterable[int]) -> str:
    shown = sorted(processes)
    return ", ".join(map(str, shown[:8])) + ", ..." * (len(shown) > 8)


def differences(present: Mapping[int, tuple[str, Mapping[str, Any]]]) -> str:
    """Say which processes tell something else than most others do, and what; "": they are alike.

    Args:
      present: by process, who it is, and what it tells, by name.
    """
    lines = []
    for name in sorted({name for _, told in present.values() for name in told}):
        shown = {process: json.dumps(told.get(name), sort_keys=True) for process, (_, told) in sorted(present.items())}
        ((usual, _),) = collections.Counter(shown.values()).most_common(1)
        odd = [f"process {process} ({present[process][0]}) {text}" for process, text in shown.items() if text != usual]
        if odd:
            lines.append(f"{name} is {usual}, but of {'; '.join(odd[:4])}{' and others' * (len(odd) > 4)}")
    return f"the processes of the run are not alike: {'. '.join(lines)}; start all alike" if lines else ""
