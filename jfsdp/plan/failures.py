"""Goodput of a run on a cluster that fails at random, and the best interval between its checkpoints."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Failures:
    """A run that fails at random and restarts from its last complete checkpoint.

    Assumes that failures are a Poisson process, also during a restart, which then begins again. Training stops while a
    checkpoint is copied to host memory, and continues while it is written. A save waits until the previous one is
    written.

    Attributes:
      mtbf_s: mean seconds between failures of the cluster.
      step_s, copy_s, write_s: seconds of a step, of a copy to host memory, and of writing it.
      restart_s: seconds from a failure to the next step.
    """

    mtbf_s: float
    step_s: float
    copy_s: float
    write_s: float
    restart_s: float

    def goodput(self, every: int) -> float:
        """Return the expected share of time spent in steps whose result is kept.

        A checkpoint counts once it is written, so writing adds to the restart. Source: J. T. Daly, "A higher order
        estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006).

        Args:
          every: steps between checkpoints.
        """
        kept_s = every * self.step_s
        period = (max(kept_s, self.write_s) + self.copy_s) / self.mtbf_s
        first = (self.restart_s + kept_s + self.copy_s + self.write_s) / self.mtbf_s  # until the first is written
        return kept_s / self.mtbf_s * math.exp(-first) / -math.expm1(-period)

    def to_dict(self, every: int) -> dict[str, float]:
        """Return the failures as plain data, with the goodput of the best interval and of a given one."""
        best = {"best_every": self.best_every, "best_goodput": self.goodput(self.best_every)}
        return {**dataclasses.asdict(self), **best, "every": every, "goodput": self.goodput(every)}

    @property
    def best_every(self) -> int:
        """Steps between checkpoints with the highest goodput; no shorter than a write.

        The square root is J. W. Young's, "A first order approximation to the optimum checkpoint interval", CACM 17
        (1974); the series is Daly's (2006).
        """
        half = self.copy_s / (2 * self.mtbf_s)
        series = 1 + math.sqrt(half) / 3 + half / 9
        best_s = math.sqrt(2 * self.copy_s * self.mtbf_s) * series - self.copy_s if half < 1 else self.mtbf_s
        return max(1, round(best_s / self.step_s), math.ceil(self.write_s / self.step_s))
