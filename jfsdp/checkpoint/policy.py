"""Which checkpoints a run keeps, decided from plain data without reading arrays."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Keep the best checkpoints by a metric passed to `save`.

    Attributes:
      metric: its name, such as "eval_loss".
      mode: "min" or "max", the best value.
      num: number of checkpoints to keep.
    """

    metric: str
    mode: str = "min"
    num: int = 1


def parse_best(text: str) -> KeepBest:
    """Parse `METRIC[:min|max[:N]]`.

    Raises:
      ValueError: if the text has another form.
    """
    found = re.fullmatch(r"([^:]+)(?::(min|max)(?::([1-9]\d*))?)?", text)
    if found is None:
        raise ValueError(f"keep_best {text!r} is not METRIC[:min|max[:N]], such as eval_loss or eval_correct:max:2")
    return KeepBest(found[1], found[2] or "min", int(found[3] or 1))


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints to keep: those that any of the rules keeps.

    Attributes:
      last: number of newest checkpoints; None: all.
      every: keep steps that are a multiple of this.
      best: keep the best by a metric. Steps saved without the metric are ignored.
    """

    last: int | None = 3
    every: int | None = None
    best: KeepBest | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ValueError(f"keep={self.last} must be at least 1, or None to keep all checkpoints")
        if self.every is not None and self.every < 1:
            raise ValueError(f"keep_every={self.every} must be at least 1, or None")

    def kept(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps to keep, in order.

        Args:
          metrics: by step, the metrics passed to `save`.
        """
        steps = sorted(metrics)
        if self.last is None:
            return steps
        stay = set(steps[-self.last :])
        stay |= {step for step in steps if self.every and step % self.every == 0}
        return sorted(stay | set(self._best(metrics)))

    def _best(self, metrics: Mapping[int, Mapping[str, float]]) -> Sequence[int]:
        """Return the best steps. Ties go to the later step; NaN is never best."""
        if self.best is None:
            return ()
        sign = 1 if self.best.mode == "min" else -1
        values = {step: found[self.best.metric] for step, found in metrics.items() if self.best.metric in found}
        comparable = [step for step, value in values.items() if value == value]
        return sorted(comparable, key=lambda step: (sign * values[step], -step))[: self.best.num]
