"""Where the time of a run goes: what counts, and what is lost to what; and which process holds up the others.

[Note: goodput] All seconds of a run, over all its starts, are of one of these kinds; `goodput` is the part of `train`.

    train      steps whose result the run still has
    redone     steps that were taken after the checkpoint or the snapshot which a restart went on from
    compile    the first step of each start
    data       waiting for a batch at whose end the devices of this process had nothing left to do: an upper bound
    evaluate   evaluations, and what is logged
    save       what checkpoints and snapshots kept the loop waiting
    start      from the start of the program to its first step: imports, weights, restoring; and its end
    down       from the last time that the sums were kept before a failure to the next start

The time between an end in good order, by a signal too, and the next start is of no kind. Process 0 keeps the sums in
goodput.json: at the first step of a start, each line of metrics.jsonl, each save, snapshot and comparison, and the end.
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
    """Adds the time that passes to one kind after another; see [Note: goodput].

    Args:
      path: of what process 0 keeps; read if it is there.
      begin: `time.perf_counter()` at the start of the program.
      train_s: of the checkpoint that the run goes on from; None: a run that begins, of which nothing is read.
      is_writer: this is process 0.
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
        """Count from now on as another kind; return the kind before."""
        now, before = time.perf_counter(), self._kind
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before

    @contextmanager
    def spent_on(self, kind: str) -> Iterator[None]:
        """Count what happens inside as a kind."""
        before = self.to(kind)
        try:
            yield
        finally:
            self.to(before)

    def move(self, seconds: float, to: str) -> None:
        """Count seconds that were counted as the present kind as another."""
        self.seconds[self._kind] -= seconds
        self.seconds[to] += seconds

    @property
    def fraction(self) -> float:
        """Return goodput, 0..1, up to now."""
        self.to(self._kind)
        return self.seconds["train"] / max(sum(self.seconds.values()), 1e-9)

    def write(self, *, in_order: bool = False) -> None:
        """Keep the sums, if this is process 0.

        Args:
          in_order: the run has ended.
        """
        sums = {"goodput": self.fraction, "seconds": self.seconds, "until": time.time(), "in_order": in_order}
        if self.is_writer:
            write_json(self.path, sums)


def _read(path: Path) -> dict[str, Any]:
    """Read what `write` kept; nothing where that is not there, or was not finished."""
    try:
        stored = json.loads(path.read_text())
        return stored if {"seconds", "until", "in_order"} <= stored.keys() else {}
    except (OSError, ValueError, AttributeError):
        return {}


class Pace:
    """What a process itself does per step, in seconds: all but the waiting for its devices.

    Attributes:
      data_s, host_s: sums since the start: in waiting for batches; in all that is not waiting for devices.
      num_steps: how many steps.
    """

    def __init__(self) -> None:
        self.data_s = self.host_s = 0.0
        self.num_steps = 0
        self._taken = (0.0, 0.0, 0)

    def add(self, data_s: float, host_s: float) -> None:
        self.data_s, self.host_s, self.num_steps = self.data_s + data_s, self.host_s + host_s, self.num_steps + 1

    def take(self) -> dict[str, Any]:
        """Return the means since the last call in the process that took longest, and which that is, of several.

        Every process calls this.
        """
        sums = (self.data_s, self.host_s, self.num_steps)
        data_s, host_s, steps = (now - before for now, before in zip(sums, self._taken, strict=True))
        self._taken = sums
        paces = gather_json([host_s / max(steps, 1), data_s / max(steps, 1)])
        slowest = max(range(len(paces)), key=paces.__getitem__)
        found = {"data_s": max(data_s for _, data_s in paces), "host_s": paces[slowest][0]}
        return found | ({"slowest_process": slowest} if len(paces) > 1 else {})

    def of_all(self) -> list[dict[str, float]]:
        """Return the means of every process since the start. Every process calls this."""
        steps = max(self.num_steps, 1)
        return gather_json({"data_s": self.data_s / steps, "host_s": self.host_s / steps})
