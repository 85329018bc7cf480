"""Program `manual`: inside a `shard_map` every gather and every reduction stands where a schedule puts it.

[Note: a manual step]
Both programs trace the root once, into a program of calls of units (program.py), and run it by one driver (run.py);
`xla` runs it with depth 0, and ties no gather to an input. The forward runs it and keeps gathers on their way ahead of
the compute, as far as `prefetch` says. The backward runs it in reverse: at each call the next gathers start first, then
the gradient of the call before is reduced, and then the call's own derivative is computed, so that both have its
matmuls to hide behind. Layers of a scan run in a scan. In `manual` its carry holds the weights that are on their way
and the gradient that waits; the first and last iterations, where the pattern differs, stand outside it. So no gather is
wasted at either end, and the program does not grow with depth.

The root's own weights are gathered while the last call before their first use computes, and reduced as soon as the
backward has passed that use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jfsdp.compat import warn
from jfsdp.engine.engine import Pull
from jfsdp.engine.manual.collectives import LocalEngine
from jfsdp.engine.manual.run import run
from jfsdp.engine.manual.schedule import Prefetch
from jfsdp.engine.unit import Arrays, Traced


@dataclasses.dataclass(frozen=True)
class ManualEngine(LocalEngine):
    """Runs a step by a schedule; see [Note: a manual step].

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
