"""Goodput, the time of a run by kind, and the slowest process.

[Note: goodput] Every second of a run, over all its starts, has one of these kinds. `goodput` is the fraction of
`train`.

    train      steps whose result the run still has
    redone     steps after the checkpoint or snapshot from which a restart continued
    compile    the first step of each start
    data       waits for a batch after which the devices of this process were idle: an upper bound
    evaluate   evaluation and logging
    save       time that checkpoints and snapshots blocked the loop
    start      from the start of the program to its first step (imports, weights, restoring), and the end of the run
    down       from the last write of the sums before a failure to the next start

The time between a regular end (also by a signal) and the next start does not count. Process 0 writes the sums to
goodput.json: at the first step of a start, each line of metrics.jsonl, each save and snapshot, and the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jfsdp.launch.hosts import gather_json
from jfsdp.trainer.run.directory import write_json

KINDS: tuple[str, ...] = ("train", "redone", "compile", "data", "evaluate", "save", "start", "down")


class Goodput:
    """Sums the time of a run by kind; see [Note: goodput].

    Args:
      path: the file goodput.json.
      begin: `time.perf_counter()` at the start of the program.
      train_s: training time saved in the checkpoint from which the run continues; None: a new run, which does not read
        the file.
      is_writer: whether this is process 0.
    """

    def __init__(self, path: Path, begin: float, train_s: float | None = None, *, is_writer: bool = True):
        self.path, self._since, self.is_writer = path, begin, is_writer
        self._kind: str = "start"
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        stored = _read(path) if train_s is not None else {}
        if stored:
            self.seconds |= {name: float(value) for name, value in stored["seconds"].items() if name in KINDS}
            before, self.seconds["train"] = self.seconds["train"], min(train_s or 0.0, self.seconds["train"])
            self.seconds["redone"] += before - self.seconds["train"]
            if not stored["in_order"]:
                started = time.time() - (time.perf_counter() - begin)
                self.seconds["down"] += max(0.0, started - stored["until"])

    def to(self, kind: str) -> str:
        """Count the time from now on as `kind`. Return the previous kind."""
        now, before = time.perf_counter(), self._kind
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before

    @contextmanager
    def spent_on(self, kind: str) -> Iterator[None]:
        """Count the time inside as `kind`."""
        before = self.to(kind)
        try:
            yield
        finally:
            self.to(before)

    def move(self, seconds: float, to: str) -> None:
        """Move seconds from the current kind to another."""
        self.seconds[self._kind] -= seconds
        self.seconds[to] += seconds

    @property
    def fraction(self) -> float:
        """The goodput so far, 0..1."""
        self.to(self._kind)
        return self.seconds["train"] / max(sum(self.seconds.values()), 1e-9)

    def write(self, *, in_order: bool = False) -> None:
        """Write the sums, if this is process 0.

        Args:
          in_order: whether the run has ended regularly.
        """
        sums = {"goodput": self.fraction, "seconds": self.seconds, "until": time.time(), "in_order": in_order}
        if self.is_writer:
            write_json(self.path, sums)


def _read(path: Path) -> dict[str, Any]:
    """Read the file of `write`. Return {} if it is missing or incomplete."""
    try:
        stored = json.loads(path.read_text())
        return stored if {"seconds", "until", "in_order"} <= stored.keys() else {}
    except (OSError, ValueError, AttributeError):
        return {}


class Pace:
    """Time per step that a process does not spend waiting for its devices.

    Attributes:
      data_s, host_s: seconds since the start spent waiting for batches, and seconds not spent waiting for devices.
      num_steps: number of steps.
    """

    def __init__(self) -> None:
        self.data_s = self.host_s = 0.0
        self.num_steps = 0
        self._taken = (0.0, 0.0, 0)

    def add(self, data_s: float, host_s: float) -> None:
        self.data_s, self.host_s, self.num_steps = self.data_s + data_s, self.host_s + host_s, self.num_steps + 1

    def take(self) -> dict[str, Any]:
        """Return the means since the last call in the slowest process, and, with several processes, its number.

        Every process must call this.
        """
        sums = (self.data_s, self.host_s, self.num_steps)
        data_s, host_s, steps = (now - before for now, before in zip(sums, self._taken, strict=True))
        self._taken = sums
        paces = gather_json([host_s / max(steps, 1), data_s / max(steps, 1)])
        slowest = max(range(len(paces)), key=paces.__getitem__)
        found = {"data_s": max(data_s for _, data_s in paces), "host_s": paces[slowest][0]}
        return found | ({"slowest_process": slowest} if len(paces) > 1 else {})

    def of_all(self) -> list[dict[str, float]]:
        """Return the means of every process since the start. Every process must call this."""
        steps = max(self.num_steps, 1)
        return gather_json({"data_s": self.data_s / steps, "host_s": self.host_s / steps})
