"""A published run beside the plan of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from jfsdp.layout.mesh import parse_mesh
from jfsdp.plan.program.collectives import Collective, find_collectives
from jfsdp.plan.program.hlo import Module, parse_module
from jfsdp.plan.published.runs import PublishedRun
from jfsdp.plan.search.jobs import plan_job
from jfsdp.plan.time.timeline import simulate
from jfsdp.plan.time.work import Work

GIB = 2**30
NEAR = 0.12


@dataclasses.dataclass(frozen=True)
class Compared:
    """What was measured, and what is predicted for jfsdp's program at the rates of that run's software.

    Attributes:
      step_s: predicted.
      needed_bytes: of jfsdp's own program, per GPU; that run's program is another one.
    """

    run: PublishedRun
    step_s: float
    needed_bytes: int

    @property
    def ratio(self) -> float | None:
        """Predicted over measured seconds."""
        return self.step_s / self.run.step_s if self.run.step_s else None

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured bytes."""
        return self.needed_bytes / GIB / self.run.memory["gib"] if self.run.memory else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: seconds per step, GiB per GPU."""
        run = dataclasses.asdict(self.run)
        own = {"predicted_s": self.step_s, "needed_gib": self.needed_bytes / GIB}
        return {**run, **own, "ratio": self.ratio, "memory_ratio": self.memory_ratio, "command": self.run.command}


def compare(run: PublishedRun) -> Compared:
    """Plan a run; some ten to sixty seconds each, in the compiler.

    Raises:
      PlanUnavailable: without a compiler for its GPU.
    """
    plan = plan_job(run.step_options, run.cluster)
    return Compared(run, predict(run, *program_of(run, plan.compiled.text)), plan.needed_bytes)


def program_of(run: PublishedRun, text: str) -> tuple[Module, tuple[Collective, ...]]:
    """Read the program of a plan of it."""
    module = parse_module(text)
    return module, tuple(find_collectives(module, run.cluster.num_devices, parse_mesh(run.options["mesh"])))


def predict(
    run: PublishedRun,
    module: Module,
    collectives: Iterable[Collective],
    *,
    works: dict[str, Work] | None = None,
    **constants: float,
) -> float:
    """Return the seconds of a step of that program at the rates of the run's software, `works` as in `simulate`."""
    return simulate(module, collectives, run.rates(**constants), works=works).step_s


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far ratios of predicted to measured seconds are from 1.

    Attributes:
      by_source: of each repository the median of |ratio - 1| over its runs.
      near: how many runs lie within NEAR.
    """

    by_source: dict[str, float]
    near: int

    @property
    def median(self) -> float:
        """The median over the sources."""
        return statistics.median(self.by_source.values())


def find_errors(ratios: Iterable[tuple[PublishedRun, float]]) -> Errors:
    """Return how far ratios are from 1; at least one."""
    own: dict[str, list[float]] = {}
    for run, ratio in ratios:
        own.setdefault(run.source["repository"], []).append(abs(ratio - 1))
    near = sum(error <= NEAR for errors in own.values() for error in errors)
    return Errors({source: statistics.median(errors) for source, errors in own.items()}, near)
