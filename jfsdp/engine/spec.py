"""All decisions about a step before it is compiled, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.pipeline.schedule import Passes, Schedule

XLA, MANUAL = "xla", "manual"


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """All decisions about a step before it is compiled; `step.resolve` makes it.

    Attributes:
      program: "xla" or "manual".
      reason: why this program, as text.
      prefetch: how far its gathers run ahead; None: XLA orders them.
      accumulate: the number of microbatches.
      deferred: the data axes over which gradients are summed after the last microbatch only.
      gathered: the units that are gathered before the first microbatch and stay gathered through the last.
      schedule: the pipeline's schedule; None without a pipeline.
      passes: how often the pipeline's stages run through their layers.
      auto_axes: the mesh axes over which the model states shardings: left to XLA.
      update_moves: the movements (`Move`) of the optimizer.
      adds_up: whether the loss of all rows is the sum of the microbatches' losses.
      products: by matrix of a product, why it is not in float8; "" if it is.
      is_zigzag: whether rows that axis `context` splits are in zigzag order ([Note: zigzag order] in context/rows.py).
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
    update_moves: tuple[Any, ...] = ()
    adds_up: bool = True
    is_zigzag: bool = False
    products: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
