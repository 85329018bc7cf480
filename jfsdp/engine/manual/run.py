"""One run of a traced step, forward and backward, by either program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jfsdp.compat import ClosedJaxpr
from jfsdp.engine.engine import Engine, Pull
from jfsdp.engine.manual.backward import Backward
from jfsdp.engine.manual.forward import Forward
from jfsdp.engine.manual.program import read_program
from jfsdp.engine.manual.schedule import Prefetch
from jfsdp.engine.manual.step import Step
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
    return outs, lambda cotangent, sums: Backward(step, forward.records, sums).run(cotangent), in_place
