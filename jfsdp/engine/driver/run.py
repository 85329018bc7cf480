"""One run of a traced step, forward and backward, by either program.

[Note: how a step runs]
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
    """Run the root unit as `Engine.vjp` says; return also the units that no schedule reaches."""
    shards = {place: path for place, path in enumerate(traced.names[: traced.num_flat]) if path}
    block, in_place = read_program(ClosedJaxpr(traced.jaxpr, ()), shards, engine.calls)
    step = Step(engine, prefetch, block, shards, dict(source))
    forward = Forward(step)
    outs = forward.run(flat)
    return outs, lambda cotangent, sums: Backward(step, forward.records, sums).run([cotangent])[0], in_place
