"""Program `manual`: inside a `shard_map` every gather and every reduction stands where a schedule puts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jfsdp.compat import warn
from jfsdp.engine.collectives import LocalEngine
from jfsdp.engine.driver.run import run
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.engine import Pull
from jfsdp.engine.unit import Arrays, Traced


@dataclasses.dataclass(frozen=True)
class ManualEngine(LocalEngine):
    """Runs a step by a schedule; see [Note: how a step runs] in engine/driver/run.py.

    Attributes:
      prefetch: how far gathers run ahead.
      is_asked: whether the user asked for a schedule, and is told where there is none.
    """

    prefetch: Prefetch = dataclasses.field(default_factory=Prefetch)
    is_asked: bool = True

    def vjp(self, traced: Traced, flat: Sequence[Any], source: Arrays) -> tuple[list[Any], Pull]:
        """Run the root by the schedule; see `Engine.vjp`.

        Warns:
          UserWarning: for units that no schedule reaches, and that gather where they are called.
        """
        outs, pull, in_place = run(self, self.prefetch, traced, flat, source)
        if in_place and self.is_asked and self.prefetch != Prefetch(0, 0):
            warn(
                f"units {', '.join(in_place[:4])} are called inside another unit, a nested or reversed loop, a "
                "vmap, a derivative or a remat of the model's own, where no schedule reaches them: they are gathered "
                "when they are called, without prefetch; for a remat use jfsdp's own (remat=)"
            )
        return outs, pull
