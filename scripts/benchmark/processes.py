"""The processes of one contender, and questions to them: lines of JSON over pipes, with a limit of time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

WORKER = Path(__file__).parents[1] / "bench_worker.py"
_LINES = 15  # of the error output of a process that failed


class ContenderFailed(RuntimeError):
    """A contender's process ended, or did not answer in time."""


class Refused(ValueError):
    """A contender refused its options."""


@dataclasses.dataclass
class _Process:
    popen: subprocess.Popen[str]
    errors: IO[bytes]
    answers: queue.Queue[str]

    def tail(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LINES:])


class Processes:
    """All processes of a contender. As a context manager it ends them, whatever happens.

    Args:
      name: of the contender, for messages.
      spec: what the worker reads, as JSON.
      count: how many processes.
      environment: over this process's own.
      timeout: seconds that an answer may take.
    """

    def __init__(self, name: str, spec: Path, count: int, environment: Mapping[str, str | None], timeout: float):
        self.name, self._timeout, self.began = name, timeout, time.perf_counter()
        told = {key: value for key, value in {**os.environ, **environment}.items() if value is not None}
        self._processes = [_start([sys.executable, str(WORKER), str(spec), str(rank)], told) for rank in range(count)]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Put the same question to all processes; return the answers by rank.

        Raises:
          ContenderFailed: if a process ended or did not answer in time, with the last lines of its error output.
          Refused: if one refused its options.
        """
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it ended; the wait below says so
                print(json.dumps({"do": do, **arguments}), file=process.popen.stdin, flush=True)
        deadline = time.monotonic() + self._timeout
        answers = [json.loads(self._wait(rank, do, deadline)) for rank in range(len(self._processes))]
        for answer in answers:
            if "error" in answer:
                raise Refused(f"{self.name}: {answer['error']}")
        return answers

    def end(self) -> None:
        """End all processes, and what they started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # also of one that ended and left others behind
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
            for file in (process.popen.stdin, process.popen.stdout, process.errors):
                file.close()  # type: ignore[union-attr]

    def _wait(self, rank: int, do: str, deadline: float) -> str:
        process = self._processes[rank]
        while True:
            try:
                return process.answers.get(timeout=0.2)
            except queue.Empty:
                pass
            for other, one in enumerate(self._processes):
                if one.popen.poll() is not None and one.answers.empty():
                    raise ContenderFailed(
                        f"{self.name}: process {other} ended with status {one.popen.returncode} (asked for: {do}); the "
                        f"last lines of its error output:\n{one.tail()}"
                    )
            if time.monotonic() > deadline:
                late = [other for other, one in enumerate(self._processes) if other >= rank and one.answers.empty()]
                tails = "\n".join(self._processes[other].tail() for other in late)
                raise ContenderFailed(
                    f"{self.name}: process {', '.join(map(str, late))} did not answer within --timeout "
                    f"{self._timeout:g} s (asked for: {do}); the last lines of the error output:\n{tails}"
                )


def _start(command: Sequence[str], environment: Mapping[str, str]) -> _Process:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - `Processes.end` closes it
    popen = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=dict(environment),
        start_new_session=True,
    )
    answers: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in popen.stdout or ():
            answers.put(line)

    threading.Thread(target=read, daemon=True).start()
    return _Process(popen, errors, answers)
