"""Run a traced step, forward and backward, in either program.

[Note: how a step runs]
Both programs trace the root once into a program of calls of units (program.py), and run it with the same driver
(run.py); `xla` runs it with depth 0, and ties no gather to an input. The forward starts gathers ahead of the compute,
as far as `prefetch` allows. The backward runs the program in reverse. At each call it first starts the next gathers,
then reduces the gradient of the previous call, and then computes the call's own derivative, so that both collectives
overlap with its matmuls. Layers of a scan run in a scan. In `manual` its carry contains the weights in flight and the
gradient that waits for its reduction. The first and last iterations, where the pattern differs, run outside the scan.
So no gather is wasted at either end, and the size of the program does not depend on the number of layers.

The root's own weights are gathered while the last call before their first use computes, and reduced as soon as the
backward has passed that use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jfsdp.compat import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jfsdp.engine.driver.backward import Backward
from jfsdp.engine.driver.forward import Forward
from jfsdp.engine.driver.program import read_program
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.driver.step import Step
from jfsdp.engine.engine import Engine, Pull
from jfsdp.engine.unit import Arrays, Traced


def run(
    engine: Engine, prefetch: Prefetch, traced: Traced, flat: Sequence[Any], source: Arrays
) -> tuple[list[Any], Pull, list[str]]:
    """Run the root unit as `Engine.vjp`; return also the units that are called outside the schedule."""
    shards = {place: path for place, path in enumerate(traced.names[: traced.num_flat]) if path}
    block, in_place = read_program(ClosedJaxpr(traced.jaxpr, ()), shards, engine.calls)
    step = Step(engine, prefetch, block, shards, dict(source))
    forward = Forward(step)
    outs = forward.run(flat)
    return outs, lambda cotangent, sums: Backward(step, forward.records, sums).run([cotangent])[0], in_place
