"""A pipeline on the clock: which part of a step its stages compute for nothing, and when each has which microbatch.

[Note: bubble]
By the schedule a stage goes vM times through a part of its layers and vM+P-1 times in all, forward as backward; in the
others it computes for nothing. By the clock the same share of the seconds that these passes take counts, waits in them
included, over the whole step: less, as heads, losses and the update are never idle. FLOPs of the model, and so MFU,
count what is useful; the clock's matrix products count all.
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
    """A step's pipeline.

    Attributes:
      name: of the schedule.
      repeats: parts of a stage's layers.
      seconds: of a step on the clock, in passes forward, in passes backward, and in what the stages share.
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
        """Of the passes forward, and backward, the share that a stage computes for nothing."""
        passes = self.schedule.passes(self.repeats, True)
        useful = self.repeats * self.microbatches
        return {FORWARD: 1 - useful / passes.forward, BACKWARD: 1 - useful / passes.backward}

    @property
    def bubble(self) -> float:
        """The share of idle passes: (P-1)/(vM+P-1) for the schedules that have names."""
        return sum(self.idle.values()) / 2

    @property
    def bubble_share(self) -> float:
        """The share of the step's seconds that a stage computes for nothing; see [Note: bubble]."""
        return sum(share * self.seconds[kind] for kind, share in self.idle.items()) / self.step_s

    @property
    def live(self) -> int:
        """How many parts of microbatches wait on a stage for their backward, at most."""
        ticks = lay_out(self.schedule, self.microbatches, self.repeats)
        return int(ticks.saved.write[ticks.forward != IDLE].max()) + 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: shares, and seconds per step."""
        names = ("stages", "microbatches", "repeats", "bubble", "bubble_share", "live", "seconds")
        return {"schedule": self.name, **{name: getattr(self, name) for name in names}}


def tick_seconds(module: Module, timeline: Timeline) -> dict[str, float]:
    """Return the seconds per step of what stands in the scopes of a pipeline's ticks, waits included.

    What has no scope, as copies that XLA adds, has that of the loop around it.
    """
    lines = [line for computation in module.computations.values() for line in computation.instructions]
    runners = {name: line.op_name for line in lines for name in line.called if line.opcode == "while"}
    seconds: dict[str, float] = dict.fromkeys((FORWARD, BACKWARD, SHARED), 0.0)
    for event in timeline.events:
        if event.lane == "compute" and event.kind != "loop":
            own = module.computations[event.computation].by_name[event.name.partition("/")[0]].op_name
            if scopes := _SCOPE.findall(own) or _SCOPE.findall(runners.get(event.computation, "")):
                seconds[scopes[-1]] += (event.end_s - event.begin_s) * event.times
    return seconds
