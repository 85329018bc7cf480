"""All that is decided about a step before it is compiled, as data."""

from __future__ import annotations

import dataclasses

from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.pipeline.schedule import Passes, Schedule

XLA, MANUAL = "xla", "manual"


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """All that is decided about a step before it is compiled; `step.resolve` makes it.

    Attributes:
      program: "xla" or "manual".
      reason: why, in words.
      prefetch: how far its gathers run ahead; None: XLA orders them.
      accumulate: the number of microbatches.
      deferred: the data axes over which gradients are summed after the last microbatch only.
      gathered: the units that are gathered before the first microbatch and kept to the last.
      schedule: of a pipeline; None: there is none.
      passes: of a pipeline, how often its stages go through their layers.
      auto_axes: the mesh axes over which the model states shardings of its own: left to XLA.
      adds_up: whether the loss of all rows is the sum of those of the microbatches.
    """

    program: str = MANUAL
    reason: str = ""
    prefetch: Prefetch | None = None
    accumulate: int = 1
    deferred: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    schedule: Schedule | None = None
    passes: Passes | None = None
    auto_axes: tuple[str, ...] = ()
    adds_up: bool = True
