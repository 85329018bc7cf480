"""Pipelines in simulated time: the idle share of a step, and the live microbatches of a stage.

[Note: bubble]
In both directions, a stage runs vM+P-1 passes over a part of its layers, of which vM are useful and P-1 are idle work.
`bubble` is the idle share of passes. `bubble_share` is the idle share of the step's seconds: the seconds of the passes,
including waits, times their idle share, over the step. It is smaller, since heads, losses and the update are never
idle. The model's FLOPs, and so MFU, count useful passes only. The simulated matmuls count all passes.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jfsdp.engine.pipeline.schedule import IDLE, Schedule, lay_out
from jfsdp.plan.hlo.parse import Module
from jfsdp.plan.time.timeline import Timeline

FORWARD, BACKWARD, SHARED = "forward", "backward", "shared"
_SCOPE = re.compile(r"jfsdp\.tick\.(\w+)")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The pipeline of a step.

    Attributes:
      name: of the schedule.
      repeats: parts of a stage's layers.
      seconds: simulated seconds per step of forward passes, of backward passes, and of shared work.
      step_s: of the whole step.
    """

    name: str
    schedule: Schedule
    repeats: int
    microbatches: int
    seconds: dict[str, float]
    step_s: float

    @property
    def stages(self) -> int:
        return len(self.schedule.forward[0])

    @property
    def idle(self) -> dict[str, float]:
        """The idle share of forward and of backward passes."""
        passes = self.schedule.passes(self.repeats, True)
        useful = self.repeats * self.microbatches
        return {FORWARD: 1 - useful / passes.forward, BACKWARD: 1 - useful / passes.backward}

    @property
    def bubble(self) -> float:
        """The idle share of all passes: (P-1)/(vM+P-1) for the named schedules."""
        return sum(self.idle.values()) / 2

    @property
    def bubble_share(self) -> float:
        """The idle share of the step's seconds; see [Note: bubble]."""
        return sum(share * self.seconds[kind] for kind, share in self.idle.items()) / self.step_s

    @property
    def live(self) -> int:
        """The largest number of parts of microbatches that a stage keeps for their backward."""
        ticks = lay_out(self.schedule, self.microbatches, self.repeats)
        return int(ticks.saved.write[ticks.forward != IDLE].max()) + 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: shares, and seconds per step."""
        names = ("stages", "microbatches", "repeats", "bubble", "bubble_share", "live", "seconds")
        return {"schedule": self.name, **{name: getattr(self, name) for name in names}}


def tick_seconds(module: Module, timeline: Timeline) -> dict[str, float]:
    """Return the seconds per step in each scope of a pipeline's ticks, including waits.

    Instructions without a scope, such as copies that XLA adds, count in the scope of their loop.
    """
    lines = [line for computation in module.computations.values() for line in computation.instructions]
    runners = {name: line.op_name for line in lines for name in line.called if line.opcode == "while"}
    seconds: dict[str, float] = dict.fromkeys((FORWARD, BACKWARD, SHARED), 0.0)
    for event in timeline.events:
        if event.lane == "compute" and event.kind != "loop":
            op_name = module.computations[event.computation].by_name[event.name.partition("/")[0]].op_name
            if scopes := _SCOPE.findall(op_name) or _SCOPE.findall(runners.get(event.computation, "")):
                seconds[scopes[-1]] += (event.end_s - event.begin_s) * event.times
    return seconds
