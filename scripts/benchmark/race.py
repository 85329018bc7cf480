"""Who runs when: contenders as processes that take turns, and what each turn measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .options import PLAIN, TORCH, BenchOptions, is_single
from .processes import Processes

PROFILED_STEPS = 3
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass
class Turn:
    """What one life of a contender showed.

    Attributes:
      seconds: of each timed step.
      losses: of every step since the first weights, timed or not.
      first_s: from the start of its processes to the end of the first step.
      compile_s: how much of it went into tracing, lowering and compiling; None: nothing is compiled.
      memory: peaks in bytes: `resident`, summed over processes; `allocated`, `reserved`, the device that had the most;
        `compiled`, by XLA's analysis.
      profile: of some more steps, in the last turn where that was asked for; see `profile_jax.profile`.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    first_s: float = 0.0
    compile_s: float | None = None
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    profile: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """How contenders are started.

    Attributes:
      scratch: a directory of this benchmark's own.
      platform: "cpu" or "cuda".
      rows: of a global batch.
      threads: cores of each contender on CPUs; 0 on GPUs.
      case: for PyTorch, what `write_for_torch` returned.
      platforms: JAX_PLATFORMS as it was; None: not set.
    """

    options: BenchOptions
    scratch: Path
    platform: str
    num_devices: int
    rows: int
    threads: int
    case: Mapping[str, Any]
    platforms: str | None

    @property
    def batches(self) -> Path:
        return self.scratch / "batches.npz"

    def num_processes(self, name: str) -> int:
        """Return how many processes a contender has: PyTorch's one per device, JAX's one."""
        return self.num_devices if name in TORCH and not is_single(name) else 1

    def threads_each(self, name: str) -> int:
        """Return the threads that compute in each process of a contender; 0 on GPUs, where that is left alone."""
        return max(1, self.threads // self.num_processes(name)) if self.threads else 0

    def start(self, name: str, number: int) -> Processes:
        """Start the processes of a contender; `number` tells its lives apart."""
        count, each = self.num_processes(name), self.threads_each(name)
        case = {
            **self.case,
            "batches": str(self.batches),
            "platform": self.platform,
            "rendezvous": str(self.scratch / f"rendezvous-{name}-{number}"),
            "timeout": self.options.timeout,
        }
        alone = {"mesh": "fsdp=1", "batch_per_device": self.rows}
        spec = {
            "name": name,
            "library": "torch" if name in TORCH else "jax",
            "world": count,
            "threads": self.threads,
            "threads_each": each,
            "devices": 1 if is_single(name) else self.num_devices,
            "options": dataclasses.asdict(self.options) | (alone if name == PLAIN else {}),
            "case": case,
        }
        path = self.scratch / f"{name}.json"
        path.write_text(json.dumps(spec))
        return Processes(name, path, count, self._environment(name, each), self.options.timeout)

    def _environment(self, name: str, threads_each: int) -> dict[str, str | None]:
        told: dict[str, str | None] = dict.fromkeys(_LAUNCHER, None)
        told["JAX_PLATFORMS"] = "cpu" if self.platform == "cpu" else self.platforms
        if threads_each and name in TORCH:
            told["OMP_NUM_THREADS"] = str(threads_each)
        if self.platform == "cpu" and name not in TORCH:
            from jfsdp.launch.runtime import merge_flags

            count = "1" if is_single(name) else str(self.num_devices)
            flags = {"xla_force_host_platform_device_count": count}
            told["XLA_FLAGS"] = merge_flags(os.environ.get("XLA_FLAGS", ""), flags)
        if self.platform == "cuda" and self.options.together:
            told["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        elif self.platform == "cuda":  # of its own accord JAX takes three quarters, and PyTorch all
            told["XLA_PYTHON_CLIENT_MEM_FRACTION"] = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        return told


def run(setup: Setup, tell: Callable[[str], None]) -> dict[str, list[Turn]]:
    """Let all contenders take their turns; return these by name."""
    return _together(setup, tell) if setup.options.together else _fresh(setup, tell)


def _fresh(setup: Setup, tell: Callable[[str], None]) -> dict[str, list[Turn]]:
    """Give each contender new processes for each of its turns."""
    options = setup.options
    turns: dict[str, list[Turn]] = {name: [] for name in options.settings}
    for number, order in enumerate(orders(options)):
        for name in order:
            tell(f"round {number + 1} of {options.num_rounds}: {name}")
            with setup.start(name, number) as processes:
                turn = _begin(processes, options)
                _step(processes, turn, options.steps, is_timed=True)
                _measure(processes, turn, is_first=number == 0)
                if options.profile and number + 1 == options.num_rounds:
                    turn.profile = _profile(processes)
            turns[name].append(turn)
    return turns


def _together(setup: Setup, tell: Callable[[str], None]) -> dict[str, list[Turn]]:
    """Start every contender once, one after the other, and let them take single steps in random order."""
    options, turns = setup.options, {}
    with contextlib.ExitStack() as stack:
        alive = {}
        for name in options.settings:
            tell(f"starting {name}")
            alive[name] = stack.enter_context(setup.start(name, 0))
            turns[name] = [_begin(alive[name], options)]
        tell(f"{options.num_rounds} rounds")
        for order in orders(options):
            for name in order:
                _step(alive[name], turns[name][0], 1, is_timed=True)
        for name in options.settings:
            _measure(alive[name], turns[name][0], is_first=True)
        if options.profile:
            for name in options.settings:
                turns[name][0].profile = _profile(alive[name])
    return turns


def orders(options: BenchOptions) -> Iterator[list[str]]:
    """Yield the order of each round: random, and the same for the same seed."""
    rng = np.random.default_rng(options.seed)
    for _ in range(options.num_rounds):
        yield [str(name) for name in rng.permutation(options.settings)]


def _begin(processes: Processes, options: BenchOptions) -> Turn:
    """Take the first step and the warm-up."""
    turn = Turn()
    first = processes.ask("first")
    turn.first_s = time.perf_counter() - processes.began
    turn.losses += first[0]["losses"]
    turn.compile_s = first[0].get("compile_s")
    later = _step(processes, turn, options.warmup, is_timed=False)
    if processes.name.endswith("-compile"):
        turn.compile_s = max(first[0]["seconds"][0] - statistics.median(later), 0.0)
    return turn


def _step(processes: Processes, turn: Turn, count: int, *, is_timed: bool) -> list[float]:
    """Take steps; one takes as long as its slowest process."""
    answers = processes.ask("steps", count=count)
    seconds = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
    turn.losses += answers[0]["losses"]
    turn.seconds += seconds if is_timed else []
    return seconds


def _measure(processes: Processes, turn: Turn, *, is_first: bool) -> None:
    answers = processes.ask("memory", is_first=is_first)
    for name in answers[0]:
        values = [answer[name] for answer in answers]
        if None not in values:
            turn.memory[name] = sum(values) if name == "resident" else max(values)


def _profile(processes: Processes) -> dict[str, Any]:
    """Take some steps under the library's profiler, in all processes; return what the first found."""
    return processes.ask("profile", count=PROFILED_STEPS)[0]
