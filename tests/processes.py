"""Several processes of one run on this machine, each with its own devices, in which tests call functions.

They are started once and serve many calls: `Processes.call("module:function", ...)` calls the function in all of them
and returns the list of results. If a process does not answer in time, all are killed and the test fails.
"""

import contextlib
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jfsdp.launch.runtime import merge_flags
from tests.compiling import compile_once

ROOT = Path(__file__).parents[1]


class Raised(Exception):
    """An exception in a process, as its type and message."""


class Processes:
    """A run of `num` processes with `devices_each` simulated devices each. Must be closed."""

    def __init__(self, num=2, devices_each=2):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        flags = merge_flags(os.environ["XLA_FLAGS"], {"xla_force_host_platform_device_count": str(devices_each)})
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._logs, self._answers, self._running = [], [], []
        for index in range(num):
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
            self._logs.append(log)
            answers, into = os.pipe()
            command = [sys.executable, "-m", "tests.processes", address, str(num), str(index), str(into)]
            environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[into], env=environment, cwd=ROOT,
                text=True,
            )  # fmt: skip
            os.close(into)
            self._running.append(process)
            self._answers.append(os.fdopen(answers))

    def start(self, function, *args):
        """Start a call in every process."""
        assert self._running, "an earlier call ended the processes"
        for process in self._running:
            assert process.stdin is not None
            process.stdin.write(json.dumps([function, args]) + "\n")
            process.stdin.flush()

    def results(self, timeout_s=120):
        """Wait for the started call; return the result of each process, or `Raised` if it raised."""
        deadline, found = time.monotonic() + timeout_s, []
        for index, answers in enumerate(self._answers):
            ready, _, _ = select.select([answers], [], [], max(0, deadline - time.monotonic()))
            line = answers.readline() if ready else ""
            if not line:
                log = self._log(index)
                self.close()
                raise AssertionError(f"process {index} {'ended' if ready else 'hangs'}:\n{log}")
            answer = json.loads(line)
            found.append(Raised(answer["error"]) if "error" in answer else answer["value"])
        return found

    def call(self, function, *args, timeout_s=120):
        """Call a function in every process and return the results; raises if a process raised."""
        self.start(function, *args)
        found = self.results(timeout_s)
        for value in found:
            if isinstance(value, Raised):
                raise value
        return found

    def _log(self, index):
        self._logs[index].seek(0)
        return self._logs[index].read()[-4000:]

    def close(self):
        for process in self._running:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for file in [*self._answers, *self._logs]:
            file.close()
        self._running, self._answers, self._logs = [], [], []


def serve(address, num, index, into):
    """Serve calls from the test until it closes the pipe."""
    import jax

    jax.distributed.initialize(address, int(num), int(index))
    compile_once()
    with os.fdopen(int(into), "w") as answers:
        for line in sys.stdin:
            function, args = json.loads(line)
            module, _, name = function.partition(":")
            try:
                answer = {"value": getattr(importlib.import_module(module), name)(*args)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
