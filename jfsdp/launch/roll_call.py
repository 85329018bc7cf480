"""Roll call: checks before JAX starts that all processes of a run joined once and are alike. Does not import JAX.

[Note: why before JAX] If a process is missing, joins twice or cannot reach process 0, JAX (0.10.2) aborts in C++ and
does not name the missing process; a port in use causes a segmentation fault. So process 0 first listens at the same
address until all processes have connected, and sends each the result. Then it frees the port for JAX. If fewer
processes suffice (`min_nproc`), those present are renumbered in order.
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

_MAX_BYTES = 1 << 20  # longest message of one process
_ANSWER_S = 5.0  # time for a connected process to identify itself
SILENT_S = 10.0  # time that process 0 waits before it prints whom it waits for


class NotAllThere(ValueError):
    """Processes did not join, or could not reach process 0. Starting again may help."""


def call_roll(place: Place, facts: Mapping[str, Any], timeout_s: float) -> list[int]:
    """Wait until all processes of a run have joined, and compare their facts.

    Process 0 prints once which processes it waits for.

    Cost: one connection of each process to process 0, with a few kB. It takes at most twice `timeout_s`, if process 0
      joins just before the timeout of the others.

    Args:
      facts: plain JSON by name, which must be equal in all processes.

    Returns:
      The processes that joined, in order: all, unless fewer suffice (`place.min_nproc`).

    Raises:
      NotAllThere: in every process that joined, if others did not; if the address cannot be reached or the port is in
        use.
      ValueError: in every process, if processes join twice, or differ in their number of processes or facts.
    """
    assert place.address is not None
    host, _, port = place.address.rpartition(":")
    own = {"process": place.process_id, "count": place.num_processes, "told": dict(facts)}
    own |= {"who": f"{platform.node()}, pid {os.getpid()}", "absent": list(place.absent)}
    deadline = time.monotonic() + timeout_s
    at = (host.strip("[]"), int(port), own, deadline)
    problem, is_lasting, present = _listen(*at, place.min_nproc) if place.is_first else _report(*at)
    if problem:
        raise ValueError(problem) if is_lasting else NotAllThere(problem)
    return present


_Result = tuple[str, bool, list[int]]  # the problem or "", whether it would occur after a restart too, who joined


def _listen(host: str, port: int, own: dict[str, Any], deadline: float, min_nproc: int | None) -> _Result:
    begin, calls = time.monotonic(), queue.SimpleQueue()
    _raise_file_limit(own["count"] + 256)
    try:
        server = _serve(port, own["count"])
    except OSError as error:
        return (
            f"process 0 cannot listen at port {port} of {platform.node()} ({os.strerror(error.errno or 0)}); another "
            f"program uses it: choose another port instead of {host}:{port} (--rendezvous, MASTER_PORT, "
            "or under Slurm JAX_COORDINATOR_PORT)"
        ), False, []  # fmt: skip
    present, others, problem = {own["process"]: own}, [], ""
    acceptor = threading.Thread(target=_accept, args=(server, own, calls), daemon=True)
    with server:
        acceptor.start()
        report_at = begin + SILENT_S
        while not problem and (awaited := _awaited(present)) and (remaining_s := deadline - time.monotonic()) > 0:
            if time.monotonic() >= report_at:
                report_at = math.inf
                say(
                    f"process {own['process']} waits for {len(awaited)} of {own['count']} processes: {_some(awaited)}; "
                    f"{remaining_s:.0f} s more (jfsdp launch --join-timeout, {JOIN_TIMEOUT})"
                )
            with contextlib.suppress(queue.Empty):
                found, connection = calls.get(timeout=max(0.0, min(deadline, report_at) - time.monotonic()))
                others.append(connection)
                problem = _clash(found, present)
                present[found["process"]] = found
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # a thread that waits in `accept` would keep the port from JAX
        acceptor.join()
    missing = sorted(set(range(own["count"])) - present.keys())
    is_lasting = bool(problem) or not missing or (min_nproc is not None and len(present) >= min_nproc)
    if not is_lasting:
        names = [one["who"] for one in present.values()]
        problem = (
            f"{len(missing)} of {own['count']} processes did not come within {time.monotonic() - begin:.0f} s: "
            f"{_some(missing)}; look at their logs. Present: {', '.join(names[:4])}{', ...' * (len(names) > 4)}"
        )
    problem = problem or differences({process: (one["who"], one["told"]) for process, one in present.items()})
    result = problem, is_lasting, sorted(present)
    for connection in others:
        with contextlib.suppress(OSError), connection:
            connection.sendall(json.dumps(result).encode() + b"\n")
    return result


def _awaited(present: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """Return the processes that have not joined and are expected."""
    one = next(iter(present.values()))
    absent = {process for message in present.values() for process in message["absent"]}
    return set(range(one["count"])) - absent - present.keys()


def _serve(port: int, count: int) -> socket.socket:
    backlog = min(count, 4096)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel without IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _accept(server: socket.socket, own: Mapping[str, Any], calls: queue.SimpleQueue) -> None:
    """Read each connection's message in a separate thread, so that a silent one does not delay the others."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the server was shut down
            return
        threading.Thread(target=_read_one, args=(connection, own, calls), daemon=True).start()


def _read_one(connection: socket.socket, own: Mapping[str, Any], calls: queue.SimpleQueue) -> None:
    try:
        found = _read(connection, _ANSWER_S)
        if any(type(found[name]) is not type(value) for name, value in own.items()):
            raise ValueError("this is not a process of a run")
        if not 0 <= found["process"] < max(found["count"], own["count"]):
            raise ValueError("this is not a process of this run")
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # another program, or a process that ended
        connection.close()
    else:
        calls.put((found, connection))


def _raise_file_limit(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        if 0 <= soft < count:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard))


def _report(host: str, port: int, own: dict[str, Any], deadline: float) -> _Result:
    failure: OSError | None = None
    answer_s = deadline - time.monotonic() + _ANSWER_S  # process 0 may have begun to wait later
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(_ANSWER_S, remaining_s)) as connection:
                connection.sendall(json.dumps(own).encode() + b"\n")
                problem, is_lasting, present = _read(connection, answer_s)
                return problem, is_lasting, present
        except TimeoutError:
            failure = TimeoutError("no answer")
        except (OSError, ValueError, TypeError) as error:
            failure = error if isinstance(error, OSError) else OSError("the program that answers is not process 0")
            time.sleep(min(0.5, max(0.0, remaining_s)))
    return (
        f"process {own['process']} of {own['count']} ({own['who']}) cannot reach process 0 at {host}:{port}: "
        f"{failure}; check that process 0 is running, that this is its host, and that the port is open"
    ), False, []  # fmt: skip


def _read(connection: socket.socket, timeout_s: float) -> Any:
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as file:
        line = file.readline(_MAX_BYTES)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the other side ended")
    return json.loads(line)


def _clash(found: Mapping[str, Any], present: Mapping[int, Mapping[str, Any]]) -> str:
    process, first = found["process"], next(iter(present.values()))
    if found["count"] != first["count"]:
        return (
            f"process {process} ({found['who']}) expects {found['count']} processes, and process {first['process']} "
            f"({first['who']}) expects {first['count']}; start all with the same number"
        )
    if process in present:
        return f"two processes are process {process}: {present[process]['who']}, and {found['who']}; renumber one"
    return ""


def _some(processes: Iterable[int]) -> str:
    shown = sorted(processes)
    return ", ".join(map(str, shown[:8])) + ", ..." * (len(shown) > 8)


def differences(present: Mapping[int, tuple[str, Mapping[str, Any]]]) -> str:
    """Describe which processes differ from the majority, and in which facts; "" if all are alike.

    Args:
      present: by process, its name and its facts.
    """
    lines = []
    for name in sorted({name for _, facts in present.values() for name in facts}):
        texts = {i: json.dumps(facts.get(name), sort_keys=True) for i, (_, facts) in sorted(present.items())}
        ((usual, _),) = collections.Counter(texts.values()).most_common(1)
        odd = [f"process {i} ({present[i][0]}) has {text}" for i, text in texts.items() if text != usual]
        if odd:
            lines.append(f"{name} is {usual}, but {'; '.join(odd[:4])}{' and others' * (len(odd) > 4)}")
    return f"the processes of the run are not alike: {'. '.join(lines)}; start all alike" if lines else ""
