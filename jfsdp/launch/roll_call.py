"""Before JAX joins the processes of a run: are all there, once, and do they agree? Imports no JAX.

[Note: why before JAX] JAX (0.10.2) ends a process by an abort in C++, with a stack of C++ and no word about who is
missing, where a process did not come, came twice, or could not reach process 0; a taken port is a segmentation fault.
So process 0 listens at the same address first, for as long as it takes all others to come, and tells each what it
found. Then it frees the port for JAX.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

from jfsdp.launch.environment import Place

_MOST_BYTES = 1 << 20  # of what a process tells
_PATIENCE_S = 5.0  # for one that has connected to say who it is


def call_roll(place: Place, told: Mapping[str, Any], timeout_s: float) -> None:
    """Wait until all processes of a run are there, and compare what they tell.

    Cost: one connection of each process to process 0, of a few kB; no more than `timeout_s` seconds.

    Args:
      told: plain JSON by name, which must be equal in all.

    Raises:
      ValueError: in every process that came: for processes that did not, that came twice, that count differently, or
        tell something else; for an address that cannot be reached, or a port that is taken.
    """
    assert place.address is not None
    host, _, port = place.address.rpartition(":")
    own = {"process": place.process_id, "count": place.num_processes, "told": dict(told)}
    own |= {"who": f"{platform.node()}, pid {os.getpid()}"}
    deadline = time.monotonic() + timeout_s
    problem = (_listen if place.process_id == 0 else _report)(host.strip("[]"), int(port), own, deadline)
    if problem:
        raise ValueError(problem)


def _listen(host: str, port: int, own: dict[str, Any], deadline: float) -> str:
    begin = time.monotonic()
    try:
        server = socket.create_server(("", port), backlog=min(own["count"], 4096))
    except OSError as error:
        return (
            f"process 0 cannot listen at port {port} of {platform.node()} ({error.strerror}); another program has it: "
            f"choose another port (MASTER_PORT, or that of --coordinator {host}:{port})"
        )
    present, problem = {0: own}, ""
    with contextlib.ExitStack() as stack:
        others = []
        with server:
            while not problem and len(present) < own["count"] and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                with contextlib.suppress(OSError, ValueError):  # a stranger, or one that ended: wait for others
                    connection = stack.enter_context(server.accept()[0])
                    found = _read(connection, min(_PATIENCE_S, left))
                    if not isinstance(found, dict) or own.keys() - found.keys():
                        raise ValueError("this is no process of a run")
                    others.append(connection)
                    problem = _clash(found, present)
                    present[found["process"]] = found
        problem = (
            problem
            or _missing(present, own["count"], time.monotonic() - begin)
            or differences({process: (one["who"], one["told"]) for process, one in present.items()})
        )
        for connection in others:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(problem).encode() + b"\n")
    return problem


def _report(host: str, port: int, own: dict[str, Any], deadline: float) -> str:
    failure: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(_PATIENCE_S, left)) as connection:
                connection.sendall(json.dumps(own).encode() + b"\n")
                return _read(connection, left + _PATIENCE_S)
        except TimeoutError:
            failure = TimeoutError("no answer")
        except (OSError, ValueError) as error:
            failure = error if isinstance(error, OSError) else OSError("what answers there is not process 0")
            time.sleep(min(0.5, max(0.0, left)))
    return (
        f"process {own['process']} of {own['count']} ({own['who']}) cannot reach process 0 at {host}:{port}, which is "
        f"{_resolved(host)} here: {failure}; is process 0 running, is that its host, and is the port open?"
    )


def _read(connection: socket.socket, timeout_s: float) -> Any:
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as file:
        line = file.readline(_MOST_BYTES)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the other side ended")
    return json.loads(line)


def _resolved(host: str) -> str:
    try:
        return ", ".join(sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)}))
    except OSError as error:
        return f"no address ({error.strerror})"


def _clash(found: Mapping[str, Any], present: Mapping[int, Mapping[str, Any]]) -> str:
    process, first = found["process"], present[0]
    if found["count"] != first["count"]:
        return (
            f"process {process} ({found['who']}) counts {found['count']} processes, and process 0 ({first['who']}) "
            f"{first['count']}; start all with the same number"
        )
    if process in present:
        return (
            f"two processes are process {process}: {present[process]['who']}, and {found['who']}; give each a number "
            "of its own"
        )
    return ""


def _missing(present: Mapping[int, Any], count: int, waited_s: float) -> str:
    absent = sorted(set(range(count)) - present.keys())
    if not absent:
        return ""
    some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    return (
        f"{len(absent)} of {count} processes did not come within {waited_s:.0f} s: {some}; look at their logs. Those "
        f"that came: {', '.join(one['who'] for one in list(present.values())[:4])}{', ...' * (len(present) > 4)}"
    )


def differences(present: Mapping[int, tuple[str, Mapping[str, Any]]]) -> str:
    """Say which processes tell something else than most others do, and what; "": they are alike.

    Args:
      present: by process, who it is, and what it tells, by name.
    """
    lines = []
    for name in sorted({name for _, told in present.values() for name in told}):
        shown = {process: json.dumps(told.get(name), sort_keys=True) for process, (_, told) in sorted(present.items())}
        usual = max(shown.values(), key=list(shown.values()).count)
        odd = [f"process {process} ({present[process][0]}) {text}" for process, text in shown.items() if text != usual]
        if odd:
            lines.append(f"{name} is {usual}, but of {'; '.join(odd[:4])}{' and others' * (len(odd) > 4)}")
    return f"the processes of the run are not alike: {'. '.join(lines)}; start all alike" if lines else ""
