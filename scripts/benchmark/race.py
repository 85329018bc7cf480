"""Turns of the contenders: each turn starts new processes, which measure it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jfsdp.launch.runtime import merge_flags

from .options import PLAIN, TORCH, BenchOptions

WORKER = Path(__file__).parents[1] / "bench_worker.py"
_LINES = 15  # lines of the error output of a failed process to show
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ContenderFailed(RuntimeError):
    """A contender's process failed, or exceeded the time limit."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """Measurements of one turn of a contender.

    Attributes:
      seconds: seconds of each timed step, in its slowest process.
      losses: losses of all steps, timed or not.
      first_s: seconds of the first step, which compiles.
      memory: peaks in bytes: `resident`, summed over processes; `allocated` and `reserved`, on the device with the
        highest; `compiled`, from XLA's analysis.
    """

    seconds: list[float]
    losses: list[float]
    first_s: float
    memory: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Settings for starting contenders.

    Attributes:
      scratch: temporary directory.
      platform: "cpu" or "cuda".
      rows: rows of a global batch.
      case: for PyTorch, the result of `write_for_torch`.
      platforms: JAX_PLATFORMS of the environment; None: not set.
    """

    options: BenchOptions
    scratch: Path
    platform: str
    num_devices: int
    rows: int
    case: Mapping[str, Any]
    platforms: str | None

    def take_turn(self, name: str, number: int) -> Turn:
        """Start a contender's processes (PyTorch: one per device, JAX: one), and return their measurements.

        Raises:
          ContenderFailed: if a process fails or exceeds the time limit, with the last lines of its error output.
          ValueError: if a contender rejects its options.
        """
        world = self.num_devices if name in TORCH else 1
        options = dataclasses.asdict(self.options)
        if name == PLAIN:
            options |= {"mesh": "fsdp=1", "batch_per_device": self.rows}
        path = self.scratch / f"{name}-{number}"
        paths = {"batches": str(self.scratch / "batches.npz"), "rendezvous": f"{path}.rendezvous", "answer": str(path)}
        case = {**self.case, **paths, "platform": self.platform, "timeout": self.options.timeout}
        devices, is_first = 1 if name == PLAIN else self.num_devices, number == 0
        spec = {"name": name, "world": world, "devices": devices, "options": options, "case": case, "first": is_first}
        path.with_suffix(".spec").write_text(json.dumps(spec))
        commands = [[sys.executable, str(WORKER), f"{path}.spec", str(rank)] for rank in range(world)]
        _run(name, commands, self._environment(name, world), self.options.timeout)
        answers = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(world)]
        if "error" in answers[0]:
            raise ValueError(f"{name}: {answers[0]['error']}")
        seconds = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
        memory = {}
        for kind in answers[0]["memory"]:
            values = [answer["memory"][kind] for answer in answers]
            memory[kind] = sum(values) if kind == "resident" else max(values)
        return Turn(seconds[1 + self.options.warmup :], answers[0]["losses"], seconds[0], memory)

    def _environment(self, name: str, world: int) -> dict[str, str]:
        variables: dict[str, str | None] = {**os.environ, **dict.fromkeys(_LAUNCHER)}
        variables["JAX_PLATFORMS"] = "cpu" if self.platform == "cpu" else self.platforms
        if self.platform == "cuda":  # JAX's default is three quarters, PyTorch's all
            variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        elif name in TORCH:
            variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // world))
        else:
            count = "1" if name == PLAIN else str(self.num_devices)
            flags = {"xla_force_host_platform_device_count": count}
            variables["XLA_FLAGS"] = merge_flags(os.environ.get("XLA_FLAGS", ""), flags)
        return {key: value for key, value in variables.items() if value is not None}


def run(setup: Setup, report: Callable[[str], None]) -> dict[str, list[Turn]]:
    """Run all turns, in another random order in each round. Return the turns by name."""
    options, rng = setup.options, np.random.default_rng(setup.options.seed)
    turns: dict[str, list[Turn]] = {name: [] for name in options.settings}
    for number in range(options.rounds):
        for name in map(str, rng.permutation(options.settings)):
            report(f"round {number + 1} of {options.rounds}: {name}")
            turns[name].append(setup.take_turn(name, number))
    return turns


def _run(name: str, commands: list[list[str]], environment: Mapping[str, str], timeout: float) -> None:
    """Run all processes until they succeed or one fails, and then kill all of them and their children."""
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes = [
            subprocess.Popen(command, stdout=file, stderr=file, env=dict(environment), start_new_session=True)
            for command, file in zip(commands, errors, strict=True)
        ]
        for process in processes:
            stack.callback(_end, process)
        while None in (states := [process.poll() for process in processes]) or any(states):
            late = time.monotonic() > deadline
            bad = [rank for rank, state in enumerate(states) if state or (late and state is None)]
            if bad:
                errors[bad[0]].seek(0)
                tail = "\n".join(errors[bad[0]].read().decode(errors="replace").splitlines()[-_LINES:])
                what = f"ended with status {states[bad[0]]}" if states[bad[0]] else f"exceeded --timeout {timeout:g} s"
                raise ContenderFailed(f"{name}: process {bad[0]} {what}; the last lines of its output:\n{tail}")
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # a process that ended may have left children
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
